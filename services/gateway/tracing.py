"""The span of a request over HTTP, by OpenTelemetry's conventions for generative AI."""

import sys
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from services.gateway.choices import Figures, Piece
from services.gateway.requests import Job
from services.telemetry.names import Attribute
from services.telemetry.spans import Event, Sink, Span, Trace, Value, begun, moved
from services.types.configuration import Tracing
from services.types.errors import WealdError


@dataclass(frozen=True, slots=True)
class Tracer:
    """Tells of requests; `sink` None: of none."""

    sink: Sink | None
    tracing: Tracing
    model: str

    def begin(self, traceparent: str) -> tuple[Trace | None, str]:
        """The span of a request that came with this trace, and the one above; None: nobody is told."""
        return begun(traceparent, self.tracing.ratio) if self.sink else (None, "")

    async def watched(
        self, job: Job, trace: Trace, parent: str, pieces: AsyncGenerator[tuple[int, Piece]], began_ns: int
    ) -> AsyncGenerator[tuple[int, Piece]]:
        """The pieces of a job's choices as they are; the span ends with them. It began then, Unix time."""
        figures: dict[int, Figures] = {}
        events: list[Event] = []
        finishes: dict[int, str] = {}
        try:
            async with aclosing(pieces):
                async for index, piece in pieces:
                    known = len(figures[index].moves) if index in figures else 0
                    figures[index] = piece.figures
                    events += [moved(job.calls[index].session, each) for each in piece.figures.moves[known:]]
                    if piece.finish:
                        finishes[index] = str(piece.finish)
                    yield index, piece
        finally:
            self._end(job, trace, parent, began_ns, figures, finishes, tuple(events), sys.exception())

    def _end(
        self,
        job: Job,
        trace: Trace,
        parent: str,
        began_ns: int,
        figures: dict[int, Figures],
        finishes: dict[int, str],
        events: tuple[Event, ...],
        error: BaseException | None,
    ) -> None:
        if not self.sink or not trace.sampled:
            return
        operation = "text_completion" if job.continues else "chat"
        params = job.calls[0].params
        attributes: dict[str, Value] = {
            Attribute.OPERATION: operation,
            Attribute.PROVIDER: "weald",
            Attribute.MODEL: self.model,
            Attribute.TEMPERATURE: params.temperature,
            Attribute.MAX_TOKENS: params.max_tokens,
            Attribute.CHOICES: job.n,
            Attribute.RESPONSE: job.id,
            Attribute.INPUT_TOKENS: sum(len(call.prompt) for call in job.calls[:: job.n]),
            Attribute.OUTPUT_TOKENS: sum(each.completion_tokens for each in figures.values()),
            Attribute.FINISH: [finishes[index] for index in sorted(finishes)],
        }
        said = ""
        if isinstance(error, WealdError):
            attributes[Attribute.ERROR], said = str(error.code), error.message
        name, now = f"{operation} {self.model}", time.time_ns()
        self.sink(Span(name, trace, parent, began_ns, now, attributes, events, error=said, served=True))
