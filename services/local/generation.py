"""One session's result, gathered step by step: its text as it becomes final, and what its rounds did."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.gateway.detokenizer import Detokenizer
from services.gateway.stops import StopMatcher
from services.gateway.tokenizer import Tokenizer
from services.types.messages import Moved
from services.types.session import FinishReason

if TYPE_CHECKING:
    # Only the name is needed, and the decoder brings torch.
    from services.local.decoder import Step


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds of one generation."""

    draft_s: float
    """Spent drafting."""
    verify_s: float
    """Spent in the verifier, prefill included."""
    total_s: float
    """From the start to the finish, everything included."""


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a session; as a dictionary, what `weald generate --json` prints."""

    text: str
    """Without the end token, and without the stop string and what followed it."""
    token_ids: tuple[int, ...]
    """Up to the last token the text ended with: an end token, or the one that completed a stop string."""
    finish_reason: FinishReason
    seed: int
    session: str | None
    """Its id at the service; None when it was decoded in this process."""
    rounds: int
    """Target steps after the prefill."""
    tau: float | None
    """Tokens committed per round that verified more than its root, bonus included; None without one."""
    nodes_drafted: int
    """Draft nodes proposed, roots not counted."""
    nodes_verified: int
    """Draft nodes that stood in a target step, roots not counted."""
    recoveries: int
    """How often it went on elsewhere because a replica was lost."""
    timings: Timings


class Generation:
    """Gathers the steps of one session. The clock of `Timings.total_s` starts with it."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        seed: int,
        stops: Sequence[str] = (),
        session: str | None = None,
        known: int = 0,
    ) -> None:
        """Begin before the session's first step.

        Args:
            tokenizer: of the target.
            seed: in use.
            stops: strings that end the text right before them.
            session: its id at the service that serves it.
            known: tokens whose text the user has already.

        Raises:
            WealdError: `INVALID_ARGUMENT` when a stop string is empty.
        """
        self._started = self._ended = time.perf_counter()
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopMatcher(stops)
        self._seed = seed
        self._session = session
        self._known = known
        self._text: list[str] = []
        """What became final with each token, and in the end."""
        self._token_ids: list[int] = []
        self._rounds = 0
        self._tree_rounds = 0
        self._tree_tokens = 0
        self._drafted = 0
        self._verified = 0
        self._draft_s = 0.0
        self._verify_s = 0.0
        self._recoveries = 0
        self.finish: FinishReason | None = None
        """Set when the text is over: by the session's own end, or by a stop string before it."""

    @property
    def rounds(self) -> int:
        """Target steps after the prefill, so far."""
        return self._rounds

    @property
    def tau(self) -> float | None:
        """Tokens committed per round that verified more than its root, so far."""
        return self._tree_tokens / self._tree_rounds if self._tree_rounds else None

    def add(self, step: "Step") -> str:
        """Take the session's next step; return the text that became final, and that the user lacks."""
        before, pieces = len(self._token_ids), len(self._text)
        self._read(step.outcome.tokens, step.outcome.finish)
        fresh = "".join(self._text[max(pieces, self._known) :])
        self._draft_s += step.draft_s
        self._verify_s += step.verify_s
        if step.tree is not None:
            self._rounds += 1
            self._drafted += len(step.tree) - 1
            self._verified += step.outcome.verified - 1
            if step.outcome.verified > 1:
                self._tree_rounds += 1
                self._tree_tokens += len(self._token_ids) - before
        self._ended = time.perf_counter()
        return fresh

    def moved(self, move: Moved) -> None:
        """Take note that the session goes on at another replica."""
        self._recoveries += move.lost

    def result(self) -> Result:
        """The finished session's result; `ValueError` before its finish."""
        if self.finish is None:
            raise ValueError("the session has not finished")
        return Result(
            text="".join(self._text),
            token_ids=tuple(self._token_ids),
            finish_reason=self.finish,
            seed=self._seed,
            session=self._session,
            rounds=self._rounds,
            tau=self.tau,
            nodes_drafted=self._drafted,
            nodes_verified=self._verified,
            recoveries=self._recoveries,
            timings=Timings(self._draft_s, self._verify_s, self._ended - self._started),
        )

    def _read(self, tokens: Sequence[int], finish: FinishReason | None) -> None:
        """Token by token, so that where a stop string cuts does not depend on how rounds group tokens."""
        for count, token in enumerate(tokens, 1):
            self._token_ids.append(token)
            ends = finish is FinishReason.STOP and count == len(tokens)
            self._text.append("" if ends else self._match(self._detokenizer.push((token,))))
            if self.finish:
                return
        if finish:
            self._text.append(self._match(self._detokenizer.flush()) + self._stops.flush())
            self.finish = self.finish or finish

    def _match(self, text: str) -> str:
        text, found = self._stops.push(text)
        if found:
            self.finish = FinishReason.STOP
        return text
