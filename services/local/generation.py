"""One session's result, gathered step by step: its text as it becomes final, and what its rounds did."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.gateway.detokenizer import Detokenizer
from services.gateway.stops import StopMatcher
from services.gateway.tokenizer import Tokenizer
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
    rounds: int
    """Target steps after the prefill."""
    tau: float | None
    """Tokens committed per round that verified more than its root, bonus included; None without one."""
    nodes_drafted: int
    """Draft nodes proposed, roots not counted."""
    nodes_verified: int
    """Draft nodes that stood in a target step, roots not counted."""
    timings: Timings


class Generation:
    """Gathers the steps of one session. The clock of `Timings.total_s` starts with it.

    Raises `WealdError(INVALID_ARGUMENT)` on construction when a stop string is empty.
    """

    def __init__(self, tokenizer: Tokenizer, seed: int, stops: Sequence[str] = ()) -> None:
        self._started = self._ended = time.perf_counter()
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopMatcher(stops)
        self._seed = seed
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._rounds = 0
        self._tree_rounds = 0
        self._tree_tokens = 0
        self._drafted = 0
        self._verified = 0
        self._draft_s = 0.0
        self._verify_s = 0.0
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
        """Take the session's next step; return the text that became final."""
        before = len(self._token_ids)
        fresh = self._read(step.outcome.tokens, step.outcome.finish)
        self._text.append(fresh)
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

    def result(self) -> Result:
        """The finished session's result; `ValueError` before its finish."""
        if self.finish is None:
            raise ValueError("the session has not finished")
        return Result(
            text="".join(self._text),
            token_ids=tuple(self._token_ids),
            finish_reason=self.finish,
            seed=self._seed,
            rounds=self._rounds,
            tau=self.tau,
            nodes_drafted=self._drafted,
            nodes_verified=self._verified,
            timings=Timings(self._draft_s, self._verify_s, self._ended - self._started),
        )

    def _read(self, tokens: Sequence[int], finish: FinishReason | None) -> str:
        """Token by token, so that where a stop string cuts does not depend on how rounds group tokens."""
        fresh = ""
        for count, token in enumerate(tokens, 1):
            self._token_ids.append(token)
            ends = finish is FinishReason.STOP and count == len(tokens)
            fresh += "" if ends else self._match(self._detokenizer.push((token,)))
            if self.finish:
                return fresh
        if finish:
            fresh += self._match(self._detokenizer.flush()) + self._stops.flush()
            self.finish = self.finish or finish
        return fresh

    def _match(self, text: str) -> str:
        text, found = self._stops.push(text)
        if found:
            self.finish = FinishReason.STOP
        return text
