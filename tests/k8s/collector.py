"""Stands where the collector does, whose image is not here: tells who sent which spans, a line each."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)


class Collector(TraceServiceServicer):  # type: ignore[misc]
    """Prints `service span`."""

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Of OTLP."""
        for sender in request.resource_spans:
            (service,) = [a.value.string_value for a in sender.resource.attributes if a.key == "service.name"]
            for scope in sender.scope_spans:
                for span in scope.spans:
                    print(service, span.name, flush=True)
        return ExportTraceServiceResponse()


if __name__ == "__main__":
    server = grpc.server(ThreadPoolExecutor(2))
    add_TraceServiceServicer_to_server(Collector(), server)
    server.add_insecure_port("0.0.0.0:4317")
    server.start()
    server.wait_for_termination()
