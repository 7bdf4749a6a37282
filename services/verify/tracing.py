"""The spans of a target step, in the trace of every session that took part in it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from services.telemetry.names import Attribute, SpanName
from services.telemetry.spans import Span, Trace, Value, unix_ns
from services.types.messages import StepTimings
from services.verify.scheduler import Seat, Step

MOST_LINKS = 32
"""To rounds of other sessions: of a step of hundreds, each would tell of all others."""


@dataclass(frozen=True, slots=True)
class Traced:
    """A round of a session whose trace is recorded."""

    round: Trace
    arrived_ns: int | None
    """When its tree arrived, by `time.monotonic_ns`; None without one."""
    tokens: int
    """Rows in the step."""


def traced(seats: Mapping[str, Seat], step: Step) -> list[Traced]:
    """Those of a step's sessions that are to be told of, before it is settled."""
    return [
        Traced(
            seat.trace.round(seat.request.epoch, seat.round),
            int(seat.arrived * 1e9) if seat.proposal else None,
            len(step.trees[id]) if id in step.trees else step.chunks[id],
        )
        for id, seat in seats.items()
        if seat.trace
    ]


def spans_of(
    rounds: Sequence[Traced], timings: StepTimings, began_ns: int, sent_ns: int, sessions: int
) -> Iterator[Span]:
    """The parts of a step below each round.

    Args:
        rounds: that stood in it.
        timings: of the step.
        began_ns: when it began, by `time.monotonic_ns`, as the next.
        sent_ns: when its replies had been sent.
        sessions: in it, whether they are recorded or not.
    """
    ends = [began_ns]
    for lasted in (timings.forward, timings.accept, timings.commit):
        ends.append(ends[-1] + lasted)
    began, forwarded, accepted, committed = map(unix_ns, ends)
    steps = (
        (SpanName.FORWARD, began, forwarded),
        (SpanName.ACCEPT, forwarded, accepted),
        (SpanName.COMMIT, accepted, committed),
        (SpanName.REPLY, committed, unix_ns(sent_ns)),
    )
    for one in rounds:
        others = tuple(other.round for other in rounds if other is not one)[:MOST_LINKS]
        shared: dict[str, Value] = {
            Attribute.STEP_SESSIONS: sessions,
            Attribute.STEP_TOKENS: one.tokens,
        }
        queued = () if one.arrived_ns is None else ((SpanName.QUEUE, unix_ns(one.arrived_ns), began),)
        for name, begin, end in (*queued, *steps):
            told, links = (shared, others) if name is SpanName.FORWARD else ({}, ())
            yield Span(name, one.round.child(), one.round.span, begin, end, told, links=links)
