"""Spans as plain values: services tell what has passed, exporters carry it away."""

import hashlib
import random
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from services.telemetry.names import Attribute, EventName
from services.types.messages import Moved

Value = str | bool | int | float | Sequence[str] | Sequence[bool] | Sequence[int] | Sequence[float]
_TRACEPARENT = re.compile(r"(?!ff)([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


@dataclass(frozen=True, slots=True)
class Trace:
    """A span's place in a trace: what W3C Trace Context calls `traceparent`."""

    id: str
    """Of the trace, 32 hexadecimal digits."""
    span: str
    """16 of them."""
    sampled: bool
    """Whether anybody records it."""

    @classmethod
    def parse(cls, traceparent: str) -> Self | None:
        """Of a `traceparent`; None of anything else."""
        match = _TRACEPARENT.fullmatch(traceparent)
        if match is None:
            return None
        version, id, span, flags, more = match.groups()
        # Later versions may say more.
        if not int(id, 16) or not int(span, 16) or (more and version == "00"):
            return None
        return cls(id, span, bool(int(flags, 16) & 1))

    @classmethod
    def begin(cls, ratio: float) -> Self:
        """A new trace, which is sampled with this probability."""
        return cls(secrets.token_hex(16), secrets.token_hex(8), random.random() < ratio)

    def child(self) -> "Trace":
        """A new span below this one."""
        return Trace(self.id, secrets.token_hex(8), self.sampled)

    def round(self, epoch: int, number: int) -> "Trace":
        """The round below a session's `generate` span: both services know it without telling each other."""
        name = f"{self.span} {epoch} {number}".encode()
        return Trace(self.id, hashlib.blake2b(name, digest_size=8).hexdigest(), self.sampled)

    def __str__(self) -> str:
        return f"00-{self.id}-{self.span}-{int(self.sampled):02x}"


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened within a span."""

    name: str
    at_ns: int
    """Unix time."""
    attributes: Mapping[str, Value] = field(default_factory=dict)


def moved(session: str, to: Moved) -> Event:
    """A session goes on elsewhere, now."""
    attributes: dict[str, Value] = {
        Attribute.SESSION: session,
        Attribute.MOVED_KIND: str(to.kind),
        Attribute.MOVED_TO: to.address,
        Attribute.MOVED_LOST: to.lost,
    }
    return Event(EventName.MOVED, time.time_ns(), attributes)


@dataclass(frozen=True, slots=True)
class Span:
    """What took from `begin_ns` to `end_ns`, Unix time."""

    name: str
    trace: Trace
    parent: str
    """The span that it is a part of; empty for the first of a trace."""
    begin_ns: int
    end_ns: int
    attributes: Mapping[str, Value] = field(default_factory=dict)
    events: tuple[Event, ...] = ()
    links: tuple[Trace, ...] = ()
    """Other spans that it has to do with."""
    error: str = ""
    """Why it failed."""
    served: bool = False
    """Whether it serves a call of another process."""


Sink = Callable[[Span], None]
"""Takes a span, from any thread, at once; nothing it does can fail a session."""


def begun(traceparent: str, ratio: float) -> tuple[Trace, str]:
    """The first span of a process for a request, and the one it is below.

    Args:
        traceparent: that came with the request.
        ratio: of the requests without one that are sampled.
    """
    if above := Trace.parse(traceparent):
        return above.child(), above.span
    return Trace.begin(ratio), ""


def unix_ns(monotonic_ns: int) -> int:
    """Unix time of an instant of `time.monotonic_ns`."""
    return time.time_ns() - time.monotonic_ns() + monotonic_ns
