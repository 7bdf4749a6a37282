"""From spans to whoever collects them: a file, an OpenTelemetry collector, or both."""

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import weald
from services.telemetry.file import SCOPE, TraceFile
from services.telemetry.spans import Sink, Span, Trace
from services.types.configuration import Tracing
from services.types.errors import invalid

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import SpanContext

PROTOCOL = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"


@contextmanager
def exporting(tracing: Tracing, service: str) -> Iterator[Sink | None]:
    """Where spans of this process go; None: nowhere, so none need be made.

    Args:
        tracing: to what.
        service: `weald-draft` and so on.

    Raises:
        WealdError: `INVALID_ARGUMENT` when the file cannot be written, or OpenTelemetry is not installed.
    """
    resource = {
        "service.name": service,
        "service.instance.id": f"{socket.gethostname()}:{os.getpid()}",
        "service.version": weald.__version__,
    }
    with ExitStack() as stack:
        sinks: list[Sink] = []
        if tracing.file:
            file = TraceFile(tracing.file, resource)
            stack.callback(file.close)
            sinks.append(file.put)
        if tracing.endpoint:
            put, close = _collector(tracing.endpoint, resource)
            stack.callback(close)
            sinks.append(put)

        def all_of_them(span: Span) -> None:
            for sink in sinks:
                sink(span)

        yield sinks[0] if len(sinks) == 1 else all_of_them if sinks else None


def _collector(endpoint: str, resource: dict[str, str]) -> tuple[Sink, Callable[[], None]]:
    """Spans in batches to a collector, behind the back of whoever hands them in."""
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import Event, ReadableSpan
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        from opentelemetry.trace import Link, SpanKind, Status, StatusCode

        exporter = _exporter(endpoint)
    except ImportError as error:
        raise invalid(
            "traces go to a collector by OpenTelemetry; run: pip install 'weald[telemetry]'"
        ) from error
    processor = BatchSpanProcessor(exporter)
    described, scope = Resource.create(resource), InstrumentationScope(SCOPE, weald.__version__)

    def put(span: Span) -> None:
        context = _context(span.trace)
        processor.on_end(
            ReadableSpan(
                name=span.name,
                context=context,
                parent=_context(Trace(span.trace.id, span.parent, True)) if span.parent else None,
                resource=described,
                attributes=dict(span.attributes),
                events=[Event(e.name, dict(e.attributes), e.at_ns) for e in span.events],
                links=[Link(_context(link)) for link in span.links],
                kind=SpanKind.SERVER if span.served else SpanKind.INTERNAL,
                status=Status(StatusCode.ERROR, span.error) if span.error else Status(),
                start_time=span.begin_ns,
                end_time=span.end_ns,
                instrumentation_scope=scope,
            )
        )

    return put, processor.shutdown


def _exporter(endpoint: str) -> "SpanExporter":
    """As engines read these variables: gRPC unless HTTP is asked for."""
    protocol = os.environ.get(PROTOCOL, "grpc")
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as Grpc

        return Grpc(endpoint=endpoint, insecure=endpoint.startswith("http://") or "://" not in endpoint)
    if protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as Http

        return Http(endpoint=endpoint)
    raise invalid(f"{PROTOCOL} is {protocol!r}; set it to grpc or http/protobuf")


def _context(trace: Trace) -> "SpanContext":
    from opentelemetry.trace import SpanContext, TraceFlags

    return SpanContext(int(trace.id, 16), int(trace.span, 16), is_remote=False, trace_flags=TraceFlags(1))
