"""Streams as their callers hear them, and the account of their tokens against the undisturbed texts."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from services.gateway.calls import generate
from services.gateway.drafters import Drafters
from services.local.decoder import decode
from services.local.models import Models, quiet
from services.types.errors import WealdError
from services.types.messages import Call, Finished, Moved, Round
from services.types.sampling import SamplingParams
from services.types.session import Cursor, FinishReason, Session
from services.verify.verifier import Verifier, pages_for

_log = logging.getLogger(__name__)

WITHIN_S = 600.0
"""Of one call, all its recoveries included."""


@dataclass(frozen=True, slots=True)
class Text:
    """What a session says when nothing disturbs it."""

    session: Session
    tokens: tuple[int, ...]
    finish: FinishReason | None


@dataclass(slots=True)
class Stream:
    """One session as its caller hears it."""

    text: Text
    begun: float = field(default_factory=time.monotonic)
    rounds: list[Round] = field(default_factory=list)
    moves: list[Moved] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)
    """Seconds between two rounds with a recovery between them."""
    finished: Finished | None = None
    error: WealdError | None = None
    ended: float = 0.0
    """Seconds, when it finished or failed; 0 before."""

    @property
    def id(self) -> str:
        """The session's."""
        return self.text.session.id

    @property
    def delivered(self) -> int:
        """Tokens that came."""
        return sum(len(round.tokens) for round in self.rounds)

    @property
    def output(self) -> tuple[int, ...]:
        """They."""
        return tuple(token for round in self.rounds for token in round.tokens)

    def call(self) -> Call:
        """The call that generates the session."""
        session = self.text.session
        return Call(session.id, session.prompt, (), replace(session.params, seed=session.seed))

    def by_id(self) -> Call:
        """The call of one who has nothing but the session's id."""
        return Call(self.id, (), (), SamplingParams())

    def continued(self, later: "Stream") -> None:
        """Add what a later call of the same session heard; what came again as before does not count twice."""
        have, prompt = self.output, len(self.text.session.prompt)
        for round in later.rounds:
            at = round.position - prompt
            again = len(have[at : at + len(round.tokens)])
            if round.tokens[:again] == have[at : at + again]:
                round = replace(round, position=round.position + again, tokens=round.tokens[again:])
            self.rounds.append(round)
        self.moves += later.moves
        self.finished, self.error, self.ended = later.finished, later.error, later.ended

    async def hear(
        self,
        callers: Drafters,
        call: Call,
        cursor: Cursor | None = None,
        heard: Callable[[Round], object] = lambda round: None,
        within_s: float = WITHIN_S,
    ) -> None:
        """Listen until the end or the error; `heard` is called with every round."""
        before, moved = time.monotonic(), False
        try:
            async with aclosing(generate(callers, call, within_s, cursor)) as events:
                async for event in events:
                    now = time.monotonic()
                    match event:
                        case Round():
                            self.rounds.append(event)
                            if moved:
                                self.pauses.append(now - before)
                                _log.info(
                                    "%s went on after %.2f s, %s", self.id, now - before, self.moves[-1]
                                )
                            before, moved = now, False
                            heard(event)
                        case Moved():
                            self.moves.append(event)
                            moved = True
                        case Finished():
                            self.finished = event
        except WealdError as error:
            self.error = error
        self.ended = time.monotonic()


@dataclass(frozen=True, slots=True)
class Account:
    """What became of the tokens of all streams."""

    streams: int = 0
    finished: int = 0
    delivered: int = 0
    lost: int = 0
    """Tokens of the text that a stream went past, or ended before."""
    repeated: int = 0
    """Tokens of a place in the text that had been delivered."""
    changed: int = 0
    """Tokens that are not those of the text at their place, and ends that are not the text's."""

    @property
    def sound(self) -> bool:
        """Whether every stream finished with its text, each token once."""
        return self.finished == self.streams and not (self.lost or self.repeated or self.changed)


def account(streams: Iterable[Stream]) -> Account:
    """Compare what was heard with the undisturbed texts; one that ended with an error is not finished."""
    total = Account()
    for stream in streams:
        tokens, prompt = stream.text.tokens, len(stream.text.session.prompt)
        lost = repeated = changed = at = 0
        for round in stream.rounds:
            begin, end = round.position - prompt, round.position - prompt + len(round.tokens)
            lost += max(0, begin - at)
            repeated += max(0, min(at, end) - begin)
            expected = tokens[max(0, begin) : max(0, end)]
            same = sum(a == b for a, b in zip(round.tokens, expected, strict=False))
            changed += len(round.tokens) - same
            at = max(at, end)
        if stream.finished:
            lost += max(0, len(tokens) - at)
            ended = (stream.finished.finish_reason, stream.finished.output_tokens)
            changed += ended != (stream.text.finish, len(tokens))
        total = Account(
            total.streams + 1,
            total.finished + (stream.finished is not None),
            total.delivered + stream.delivered,
            total.lost + lost,
            total.repeated + repeated,
            total.changed + changed,
        )
    return total


def undisturbed(models: Models, sessions: Iterable[Session]) -> list[Text]:
    """What the sessions say, by plain steps of one batch in this process."""
    known = {session.id: session for session in sessions}
    pages = sum(pages_for(len(s.prompt) + s.params.max_tokens) for s in known.values())
    said: dict[str, tuple[int, ...]] = dict.fromkeys(known, ())
    ends: dict[str, FinishReason | None] = {}
    with quiet():
        for step in decode(Verifier(models.target, num_pages=pages), None, list(known.values())):
            said[step.session] += step.outcome.tokens
            ends[step.session] = step.outcome.finish
    return [Text(session, said[id], ends[id]) for id, session in known.items()]


async def heard_all(streams: Iterable[asyncio.Task[None]], within_s: float) -> None:
    """Wait for the end of all; a stream that is still going on then is left. Raises `TimeoutError`."""
    async with asyncio.timeout(within_s):
        await asyncio.gather(*streams)
