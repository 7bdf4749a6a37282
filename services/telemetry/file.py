"""Traces in files, in the JSON encoding of OTLP: a line for each batch of spans of a process."""

import json
import logging
import os
import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.telemetry.spans import Event, Span, Trace, Value
from services.types.errors import invalid

PERIOD_S = 0.5
"""What a process that dies has told of itself is written up to so long before."""
MOST = 1 << 16
"""Spans that wait for the file; more are dropped."""
SCOPE = "weald"
_log = logging.getLogger(__name__)
_INTERNAL, _SERVER = 1, 2
_ERROR = 2


class TraceFile:
    """Appends spans to a file, behind the back of whoever hands them in."""

    def __init__(self, path: Path, resource: Mapping[str, str]) -> None:
        """Append to a file, which several processes can share.

        Args:
            path: made with all directories above it where there is none.
            resource: what the spans are of: `service.name` and so on.

        Raises:
            WealdError: `INVALID_ARGUMENT` when it cannot be written.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        except OSError as error:
            raise invalid(f"traces cannot be written to {path}: {error}; name another file") from error
        self._resource = {"attributes": _attributes(resource)}
        self._spans: queue.SimpleQueue[Span] = queue.SimpleQueue()
        self._failed = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    def put(self, span: Span) -> None:
        """Take a span, from any thread."""
        if self._spans.qsize() < MOST:
            self._spans.put(span)

    def close(self) -> None:
        """Write what is left."""
        self._closing.set()
        self._thread.join()
        os.close(self._file)

    def _run(self) -> None:
        while not self._closing.wait(PERIOD_S):
            self._write()
        self._write()

    def _write(self) -> None:
        spans = [_encoded(self._spans.get()) for _ in range(self._spans.qsize())]
        if spans:
            scoped = {"scope": {"name": SCOPE}, "spans": spans}
            batch = {"resourceSpans": [{"resource": self._resource, "scopeSpans": [scoped]}]}
            try:
                # In one piece: others append to the same file.
                os.write(self._file, json.dumps(batch, separators=(",", ":")).encode() + b"\n")
            except OSError as error:
                if not self._failed:
                    _log.warning("spans are lost, their file cannot be written: %s; make room for it", error)
                self._failed = True


@dataclass(frozen=True, slots=True)
class Told:
    """A span, and who told of it."""

    span: Span
    process: str
    """Service and instance."""


def read(path: Path) -> list[Told]:
    """All spans of a file, or of all files of a directory, by their beginning.

    Raises:
        WealdError: `INVALID_ARGUMENT` when there are none, or a line is not one of traces.
    """
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    try:
        told = [one for file in files for line in file.read_text().splitlines() for one in _read(line)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise invalid(f"{path} has no traces that can be read: {error!r}") from error
    if not told:
        raise invalid(f"{path} has no traces; name what --trace-file named, or a directory of such files")
    return sorted(told, key=lambda one: (one.span.begin_ns, -one.span.end_ns))


def _read(line: str) -> Iterator[Told]:
    for batch in json.loads(line)["resourceSpans"]:
        resource = _values(batch["resource"]["attributes"])
        process = " ".join(
            str(resource[name]) for name in ("service.name", "service.instance.id") if name in resource
        )
        for scoped in batch["scopeSpans"]:
            for span in scoped["spans"]:
                yield Told(_decoded(span), process)


def _encoded(span: Span) -> dict[str, Any]:
    encoded: dict[str, Any] = {
        "traceId": span.trace.id,
        "spanId": span.trace.span,
        "parentSpanId": span.parent,
        "name": span.name,
        "kind": _SERVER if span.served else _INTERNAL,
        # 64-bit integers are strings there.
        "startTimeUnixNano": str(span.begin_ns),
        "endTimeUnixNano": str(span.end_ns),
        "attributes": _attributes(span.attributes),
    }
    if span.events:
        encoded["events"] = [
            {"timeUnixNano": str(e.at_ns), "name": e.name, "attributes": _attributes(e.attributes)}
            for e in span.events
        ]
    if span.links:
        encoded["links"] = [{"traceId": link.id, "spanId": link.span} for link in span.links]
    if span.error:
        encoded["status"] = {"code": _ERROR, "message": span.error}
    return encoded


def _decoded(span: Mapping[str, Any]) -> Span:
    return Span(
        span["name"],
        Trace(span["traceId"], span["spanId"], True),
        span.get("parentSpanId", ""),
        int(span["startTimeUnixNano"]),
        int(span["endTimeUnixNano"]),
        _values(span.get("attributes", ())),
        tuple(
            Event(event["name"], int(event["timeUnixNano"]), _values(event.get("attributes", ())))
            for event in span.get("events", ())
        ),
        tuple(Trace(link["traceId"], link["spanId"], True) for link in span.get("links", ())),
        span["status"].get("message", "failed") if span.get("status", {}).get("code") == _ERROR else "",
        span.get("kind") == _SERVER,
    )


def _attributes(values: Mapping[str, Value]) -> list[dict[str, Any]]:
    return [{"key": str(key), "value": _any(value)} for key, value in values.items()]


def _any(value: Value) -> dict[str, Any]:
    match value:
        case str():
            return {"stringValue": str(value)}
        case bool():
            return {"boolValue": value}
        case int():
            return {"intValue": str(value)}
        case float():
            return {"doubleValue": value}
    return {"arrayValue": {"values": [_any(one) for one in value]}}


def _values(attributes: Sequence[Mapping[str, Any]]) -> dict[str, Value]:
    return {one["key"]: _value(one["value"]) for one in attributes}


def _value(value: Mapping[str, Any]) -> Any:
    ((kind, content),) = value.items()
    match kind:
        case "intValue":
            return int(content)
        case "arrayValue":
            return [_value(one) for one in content.get("values", ())]
    return content
