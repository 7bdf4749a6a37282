"""The spans of a draft replica: a call, its rounds, and what of each passes here or on the way."""

import time
from dataclasses import dataclass, field

from services.draft.generating import Generating, Lost
from services.telemetry.names import Attribute, EventName, SpanName
from services.telemetry.spans import Event, Sink, Span, Trace, Value, begun, moved, unix_ns
from services.types.configuration import Tracing
from services.types.errors import WealdError
from services.types.messages import Call, Moved, Reply


@dataclass(slots=True)
class Tracer:
    """Tells of calls that are traced; of others it makes nothing."""

    sink: Sink
    tracing: Tracing
    model: str

    def begin(self, call: Call) -> "Telling":
        """A call comes in."""
        return Telling(self, *begun(call.traceparent, self.tracing.ratio))


@dataclass(slots=True)
class Telling:
    """The `generate` span of one call, and those below it."""

    tracer: Tracer
    trace: Trace
    parent: str
    began_ns: int = field(default_factory=time.time_ns)
    rounds: int = 0
    trees: int = 0
    tree_tokens: int = 0
    events: list[Event] = field(default_factory=list)

    def lost(self, lost: Lost) -> None:
        """The session has to leave its verify replica."""
        attributes: dict[str, Value] = {
            Attribute.VERIFIER: lost.opening.link.address,
            Attribute.ERROR: str(lost.error.code),
            Attribute.REASON: lost.error.message,
        }
        self.events.append(Event(EventName.LOST, time.time_ns(), attributes))

    def moved(self, to: Moved, session: str) -> None:
        """It goes on elsewhere."""
        self.events.append(moved(session, to))

    def round(self, generating: Generating, reply: Reply, now_ns: int) -> None:
        """A reply has arrived; `now_ns` by `time.monotonic_ns`."""
        tree, outcome = generating.tree if reply.nodes > 1 else None, reply.outcome
        self.rounds += reply.round > 0
        if tree:
            self.trees += 1
            self.tree_tokens += len(outcome.tokens)
        if not self.trace.sampled:
            return
        trace = self.trace.round(reply.epoch, reply.round)
        config, coupled = generating.config, generating.call.coupled
        attributes: dict[str, Value] = {
            Attribute.ROUND: reply.round,
            Attribute.EPOCH: reply.epoch,
            Attribute.POSITION: reply.position,
            Attribute.COMMITTED: len(outcome.tokens),
            Attribute.ACCEPTED: len(outcome.accepted),
            Attribute.DRAFTED: len(tree) if tree else 0,
            Attribute.VERIFIED: outcome.verified,
        }
        content = self.tracer.tracing.content
        if content:
            attributes[Attribute.TOKENS] = outcome.tokens
        if tree:
            attributes |= {
                Attribute.BUDGET: config.budget,
                Attribute.COUPLED: (config.coupled if coupled is None else coupled)
                and generating.session.params.temperature > 0,
                Attribute.PARENTS: tree.parents,
                Attribute.CONFIDENCES: tree.confidences,
                Attribute.STOOD: [node for node in range(len(tree)) if reply.nodes >> node & 1],
                Attribute.PATH: outcome.accepted,
            }
            if content:
                attributes[Attribute.NODES] = tree.tokens
        arrived, now = unix_ns(generating.arrived_ns), unix_ns(now_ns)
        self.tracer.sink(Span(SpanName.ROUND, trace, self.trace.span, arrived, now, attributes))
        if tree:
            self._parts(generating, reply, trace, now)

    def end(self, generating: Generating, error: BaseException | None) -> None:
        """The call is over."""
        if not self.trace.sampled:
            return
        params, session = generating.session.params, generating.session
        attributes: dict[str, Value] = {
            Attribute.SESSION: session.id,
            Attribute.EPOCH: generating.epoch,
            Attribute.MODEL: self.tracer.model,
            Attribute.TEMPERATURE: params.temperature,
            Attribute.SEED: str(session.seed),
            Attribute.INPUT_TOKENS: len(session.prompt),
            Attribute.OUTPUT_TOKENS: len(generating.output),
            Attribute.CACHED_TOKENS: generating.cached,
            Attribute.ROUNDS: self.rounds,
        }
        if self.trees:
            attributes[Attribute.TAU] = self.tree_tokens / self.trees
        if generating.opened:
            attributes[Attribute.VERIFIER] = generating.opened.link.address
        if generating.finished:
            attributes[Attribute.FINISH] = [str(generating.finished)]
        said = ""
        if isinstance(error, WealdError):
            attributes[Attribute.ERROR], said = str(error.code), error.message
        self.tracer.sink(
            Span(
                SpanName.GENERATE,
                self.trace,
                self.parent,
                self.began_ns,
                time.time_ns(),
                attributes,
                tuple(self.events),
                error=said,
                served=True,
            )
        )

    def _parts(self, generating: Generating, reply: Reply, round: Trace, now: int) -> None:
        """What this replica did for a tree, and its ways there and back by the clocks of both ends."""
        times, at = generating.times, unix_ns(generating.began_ns)
        for name, lasted in (
            (SpanName.EXTEND, times.extend),
            (SpanName.GROW, times.grow),
            (SpanName.RERANK, times.rerank),
        ):
            self.tracer.sink(Span(name, round.child(), round.span, at, at + lasted))
            at += lasted
        sent = unix_ns(generating.sent_ns)
        way = max(0, now - sent - reply.turnaround_ns)
        up = reply.arrived_unix_ns - sent
        if not 0 <= up <= way:
            # Clocks of two hosts differ by more than the way takes: both directions are as long, then.
            up = way // 2
        for direction, begin, end in (("up", sent, sent + up), ("down", now - way + up, now)):
            told: dict[str, Value] = {Attribute.DIRECTION: direction}
            self.tracer.sink(Span(SpanName.LINK, round.child(), round.span, begin, end, told))
