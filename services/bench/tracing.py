"""`weald bench tracing`: what it costs to trace every request."""

import asyncio
import gzip
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from services.bench.paired import cost, pairs
from services.bench.replicas import WHOLE_TREES, replica
from services.bench.report import write_json
from services.engine.checkpoints import resolve
from services.gateway.tokenizer import Tokenizer
from services.telemetry.export import PROTOCOL
from services.telemetry.file import read

To = Literal["file", "collector"]
OFF, ON = "off", "on"
PROCESSES = ("verify", "draft")


def bench_tracing(
    model: str,
    head: str | None,
    dtype: str,
    prompts: Sequence[str],
    max_tokens: int,
    to: To,
    json_file: Path | None,
) -> None:
    """Answer every prompt with tracing off and with every span told, in turn; compare time.

    The verify replica serves both: it tells of sessions whose drafter does.
    """
    named = ("--model", model, "--dtype", dtype, "--port", 0)
    heads = ("--speculative-model", head) if head else ()
    tokenizer = Tokenizer.load(resolve(model))
    chats = [tuple(tokenizer.chat([{"role": "user", "content": prompt}])) for prompt in prompts]
    with _target(to) as (traced, count):
        with (
            replica("verify", *named, *traced, threads=1) as verifier,
            replica("draft", *named, *heads, *WHOLE_TREES, "--verify", verifier.address, threads=1) as plain,
            replica(
                *("draft", *named, *heads, *WHOLE_TREES, "--verify", verifier.address, *traced), threads=1
            ) as told,
        ):
            pids = {
                mode: {"verify": verifier.process.pid, "draft": drafter.process.pid}
                for mode, drafter in ((OFF, plain), (ON, told))
            }
            addresses = {OFF: plain.address, ON: told.address}
            answers = asyncio.run(pairs(addresses, pids, chats, max_tokens, "bench tracing"))
        spans = count()
    costs = {
        "processor time": cost(answers, OFF, ON, PROCESSES, PROCESSES),
        "time of an answer": cost(answers, OFF, ON, ("wall",), ("wall",)),
    }
    if json_file:
        settings = {"model": model, "dtype": dtype, "answers": len(chats), "max_tokens": max_tokens, "to": to}
        write_json(json_file, "tracing", settings, {"costs": costs, "spans": spans, "answers": answers})
    console = Console()
    console.print(
        f"{spans} spans told to a {to}, of {len(chats) + 1} answers of {max_tokens} tokens and as many of one"
    )
    for name, more in costs.items():
        console.print(
            f"every request traced to a {to}, {name}: {more['mean']:+.2%}, "
            f"95 % confidence {more['low']:+.2%} to {more['high']:+.2%}"
        )


@contextmanager
def _target(to: To) -> Iterator[tuple[tuple[object, ...], Callable[[], int]]]:
    """The options that trace to a file, or to a collector that only counts, and how many spans came."""
    if to == "file":
        with tempfile.TemporaryDirectory(prefix="weald-tracing-") as directory:
            file = Path(directory) / "traces.jsonl"
            yield ("--trace-file", file), lambda: len(read(file))
        return
    came: list[int] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Collector, came))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    given = os.environ.get(PROTOCOL)
    os.environ[PROTOCOL] = "http/protobuf"
    try:
        url = f"http://127.0.0.1:{server.server_port}/v1/traces"
        yield ("--otlp-traces-endpoint", url), lambda: sum(came)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
        del os.environ[PROTOCOL]
        if given:
            os.environ[PROTOCOL] = given


class _Collector(BaseHTTPRequestHandler):
    """Counts spans and forgets them."""

    protocol_version = "HTTP/1.1"

    def __init__(self, came: list[int], *arguments: Any) -> None:
        self._came = came
        super().__init__(*arguments)

    def do_POST(self) -> None:
        """Say that all is well."""
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        told = ExportTraceServiceRequest.FromString(body)
        self._came.append(sum(len(scoped.spans) for one in told.resource_spans for scoped in one.scope_spans))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""
