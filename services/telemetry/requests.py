"""A request as its spans tell it: rounds, and where the time of each went."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from services.telemetry.file import Told
from services.telemetry.names import Attribute, SpanName
from services.telemetry.spans import Event, Span
from services.types.tree import DraftTree

PARTS = tuple(SpanName)[2:]
"""Of a round, in the order of time."""


@dataclass(frozen=True, slots=True)
class Round:
    """One round, and its parts by the processes that they passed in."""

    told: Told
    parts: tuple[Told, ...]

    @property
    def span(self) -> Span:
        """Of the whole."""
        return self.told.span

    @property
    def wall_ns(self) -> int:
        """How long it took."""
        return self.span.end_ns - self.span.begin_ns

    def lasted(self, part: SpanName) -> int:
        """Nanoseconds of a part."""
        return sum(t.span.end_ns - t.span.begin_ns for t in self.parts if t.span.name == part)

    @property
    def left_ns(self) -> int:
        """What no part tells of."""
        return self.wall_ns - sum(self.lasted(part) for part in PARTS)

    def count(self, attribute: Attribute) -> int:
        """A number that it tells, or 0."""
        value = self.span.attributes.get(attribute, 0)
        return value if isinstance(value, int) else 0

    def column(self, attribute: Attribute) -> tuple[int, ...]:
        """Numbers that it tells, if any."""
        value = self.span.attributes.get(attribute, ())
        return tuple(int(one) for one in value) if isinstance(value, Sequence) else ()

    @property
    def tree(self) -> DraftTree | None:
        """What was drafted; token 0 everywhere where content was not asked for."""
        parents = self.column(Attribute.PARENTS)
        if not parents:
            return None
        confidences = self.span.attributes[Attribute.CONFIDENCES]
        assert isinstance(confidences, Sequence)
        tokens = self.column(Attribute.NODES) or tuple(range(len(parents)))
        return DraftTree(tokens, parents, tuple(float(one) for one in confidences))


@dataclass(frozen=True, slots=True)
class Request:
    """All spans of one trace."""

    id: str
    told: tuple[Told, ...]
    """By their beginning."""
    generations: tuple[Told, ...]
    """Calls of draft replicas: one for each choice, and more where one was lost."""
    rounds: tuple[Round, ...]
    """Call by call."""

    @property
    def begin_ns(self) -> int:
        """Unix time."""
        return min(t.span.begin_ns for t in self.told)

    @property
    def end_ns(self) -> int:
        """Unix time."""
        return max(t.span.end_ns for t in self.told)

    def call(self, round: Round) -> int:
        """Which of the calls a round is of, from 1 on; 0: its replica died before it told of the call."""
        spans = [told.span.trace.span for told in self.generations]
        return spans.index(round.span.parent) + 1 if round.span.parent in spans else 0

    @property
    def events(self) -> list[tuple[Told, Event]]:
        """What happened, in the order of time, and within which span."""
        events = [(told, event) for told in self.told for event in told.span.events]
        return sorted(events, key=lambda pair: pair[1].at_ns)

    @property
    def processes(self) -> list[str]:
        """Who tells of it."""
        return list(dict.fromkeys(t.process for t in self.told))

    def named(self, name: str) -> bool:
        """Whether a user can mean it: by its trace, session or answer, or by how one of these begins."""
        keys = (Attribute.SESSION, Attribute.RESPONSE)
        names = [self.id, *(str(t.span.attributes.get(key, "")) for t in self.told for key in keys)]
        return any(one.startswith(name) for one in names)


def requests(told: Iterable[Told]) -> list[Request]:
    """The requests in what was told, the latest last."""
    traces: dict[str, list[Told]] = defaultdict(list)
    for one in told:
        traces[one.span.trace.id].append(one)
    return [_request(id, spans) for id, spans in traces.items()]


def _request(id: str, told: Sequence[Told]) -> Request:
    below: dict[str, list[Told]] = defaultdict(list)
    for one in told:
        below[one.span.parent].append(one)
    rounds = [
        Round(one, tuple(below[one.span.trace.span])) for one in told if one.span.name == SpanName.ROUND
    ]
    calls = tuple(one for one in told if one.span.name == SpanName.GENERATE)
    request = Request(id, tuple(told), calls, tuple(rounds))
    return replace(request, rounds=tuple(sorted(rounds, key=request.call)))
