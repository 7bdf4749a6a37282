"""One session as the draft service knows it."""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from services.draft.drafter import Times
from services.draft.link import VerifyLink
from services.types.configuration import DraftConfig
from services.types.errors import WealdError
from services.types.messages import Call, Event, Finished, Round
from services.types.retry import backoff
from services.types.session import FinishReason, Session
from services.types.tree import DraftTree

if TYPE_CHECKING:
    from services.draft.tracing import Telling

FIRST_PAUSE_S, LAST_PAUSE_S = 0.05, 2.0
"""Between attempts to find another verify replica."""


@dataclass(frozen=True, slots=True)
class Opening:
    """A session at a verify replica, under one epoch."""

    session: Session
    epoch: int
    link: VerifyLink


@dataclass(frozen=True, slots=True)
class Lost:
    """A session has to leave its verify replica."""

    opening: Opening
    error: WealdError
    """Why."""
    draining: bool = False
    """Whether it can also stay: the replica still serves it."""


@dataclass(slots=True, eq=False)
class Generating:
    """Its drafting state belongs to the thread, the rest to the event loop."""

    call: Call
    session: Session
    """With the output from which it goes on here."""
    epoch: int
    output: list[int]
    """Tokens committed so far."""
    replay: Round | None
    """What the caller lacks of the journal's output."""
    telling: "Telling | None" = None
    """Its spans."""
    events: asyncio.Queue[Event | Lost | WealdError] = field(default_factory=asyncio.Queue)
    opening: Opening | None = None
    """Where it is served."""
    leaving: bool = False
    """Whether it is about to leave a replica that drains."""
    finished: FinishReason | None = None
    """Why its text is over."""
    lost_at: float | None = None
    """Seconds, when it lost a replica for the first time since its latest progress."""
    refusals: set[str] = field(default_factory=set)
    """Verify replicas that failed it since then."""
    pauses: Iterator[float] = field(default_factory=lambda: backoff(FIRST_PAUSE_S, LAST_PAUSE_S))
    arrived_ns: int = field(default_factory=time.monotonic_ns)
    """When the latest reply arrived."""

    opened: Opening | None = None
    """Where the thread has opened it."""
    cached: int = 0
    config: DraftConfig = field(default_factory=DraftConfig)
    """Of its trees."""
    tree: DraftTree | None = None
    """The latest proposal, until its reply."""
    began_ns: int = 0
    """When it was begun."""
    times: Times = field(default_factory=Times)
    """Where its time went."""
    sent_ns: int = 0
    """When it was sent."""
    retired: bool = False
    """The head's pages have run out: no more trees."""

    @property
    def traceparent(self) -> str:
        """What its rounds are below."""
        return str(self.telling.trace) if self.telling else self.call.traceparent

    @property
    def drafted_ns(self) -> int:
        """How long its making took."""
        return self.sent_ns - self.began_ns

    @property
    def id(self) -> str:
        """The session's id."""
        return self.session.id

    def progressed(self) -> None:
        """Forget what went wrong before: tokens came."""
        if self.lost_at is not None:
            self.lost_at = None
            self.refusals.clear()
            self.pauses = backoff(FIRST_PAUSE_S, LAST_PAUSE_S)

    def finish(self, reason: FinishReason) -> None:
        """Tell the caller that the text is over."""
        self.finished = reason
        self.events.put_nowait(Finished(reason, len(self.session.prompt), len(self.output), self.cached))
