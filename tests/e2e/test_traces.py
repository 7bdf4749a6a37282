"""Traces of real processes: one request's holds every process, every round, and the parts of each."""

import asyncio
import json
from collections.abc import Iterator
from concurrent import futures
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from typer.testing import CliRunner

from services.bench.replicas import Replica, replica
from services.cli.app import app
from services.telemetry.file import read
from services.telemetry.names import Attribute, EventName, SpanName
from services.telemetry.requests import PARTS, Request, requests
from services.types.errors import ErrorCode
from services.types.replica import SIDES, ReplicaKind
from services.wire.channel import connect
from services.wire.clients import DraftClient, VerifyClient

pytestmark = pytest.mark.slow

TRACE = "0af7651916cd43dd8448eb211c80319c"
HEADER = f"00-{TRACE}-b7ad6b7169203331-01"


@contextmanager
def service(tiny: Any, *traced: object) -> Iterator[str]:
    """The base URL of a gateway before a draft and a verify replica, all with these options."""
    with (
        replica(*tiny.verify, *traced) as verifier,
        replica(*tiny.draft(verifier.address), *traced) as drafter,
        replica(*tiny.gateway(drafter.address), *traced) as gateway,
    ):
        yield f"http://{gateway.address}"


def ask(url: str, **options: Any) -> Any:
    """A completion of 40 tokens."""
    body = {"model": "tiny", "prompt": [1, 5, 3, 8], "max_tokens": 40, "ignore_eos": True, "seed": 7}
    response = httpx.post(
        f"{url}/v1/completions", json=body | options, headers={"traceparent": HEADER}, timeout=60
    )
    assert response.status_code == 200, response.text
    return response.json()


@pytest.fixture(scope="module")
def file(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trace of one request."""
    path = tmp_path_factory.mktemp("traces") / "traces.jsonl"
    with service(tiny, "--trace-file", path) as url:
        ask(url)
    return path


@pytest.fixture(scope="module")
def request_(file: Path) -> Request:
    """It."""
    (request,) = requests(read(file))
    return request


def test_one_trace_holds_the_request_every_process_and_every_round(request_: Request) -> None:
    assert request_.id == TRACE
    names = {process.split()[0] for process in request_.processes}
    assert names == {"weald-gateway", "weald-draft", "weald-verify"}
    whole, call = request_.told[0].span, request_.generations[0].span
    assert (whole.name, whole.parent, whole.served) == ("text_completion tiny", HEADER[36:52], True)
    assert whole.attributes[Attribute.OUTPUT_TOKENS] == 40
    assert whole.attributes[Attribute.FINISH] == ["length"]
    assert call.parent == whole.trace.span
    numbers = [round.count(Attribute.ROUND) for round in request_.rounds]
    assert numbers == list(range(len(numbers)))
    assert sum(round.count(Attribute.COMMITTED) for round in request_.rounds) == 40
    assert all(round.span.parent == call.trace.span for round in request_.rounds)
    assert call.attributes[Attribute.ROUNDS] == len(numbers) - 1
    spans = {one.span.trace.span for one in request_.told}
    assert all(one.span.parent in spans for one in request_.told[1:])


def test_the_parts_of_a_round_come_one_after_the_other_within_it(request_: Request) -> None:
    drafted = [round for round in request_.rounds if round.count(Attribute.DRAFTED)]
    assert len(drafted) > 5
    for round in drafted:
        parts = sorted((one.span for one in round.parts), key=lambda span: span.begin_ns)
        order = ["extend", "grow", "rerank", "link", "queue", "forward", "accept", "commit", "reply", "link"]
        assert [span.name for span in parts] == order
        slack = 1_000_000  # two conversions between clocks of one host
        for before, after in pairwise(parts):
            assert before.begin_ns <= before.end_ns <= after.begin_ns + slack
        assert round.span.begin_ns - slack <= parts[0].begin_ns
        assert parts[-1].end_ns <= round.span.end_ns + slack
        assert round.left_ns > -slack


def test_a_round_tells_of_its_tree_but_of_no_token(request_: Request, file: Path) -> None:
    round = next(r for r in request_.rounds if r.count(Attribute.ACCEPTED))
    tree, path = round.tree, round.column(Attribute.PATH)
    assert tree
    assert len(tree) == round.count(Attribute.DRAFTED)
    assert len(round.column(Attribute.STOOD)) == round.count(Attribute.VERIFIED)
    assert [tree.parents[node] for node in path] == [0, *path[:-1]]
    assert Attribute.NODES not in file.read_text()
    assert Attribute.TOKENS not in file.read_text()


def test_with_content_a_trace_holds_the_text(tiny: Any, tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    with (
        replica(*tiny.verify) as verifier,
        replica(*tiny.draft(verifier.address), "--trace-file", path, "--trace-content") as drafter,
        replica(*tiny.gateway(drafter.address)) as gateway,
    ):
        said = ask(f"http://{gateway.address}")
    (request,) = requests(read(path))
    tokens = [token for round in request.rounds for token in round.column(Attribute.TOKENS)]
    assert len(tokens) == said["usage"]["completion_tokens"]
    assert all(round.tree for round in request.rounds if round.count(Attribute.DRAFTED))


def test_sessions_that_share_a_step_are_linked(tiny: Any, tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    with service(tiny, "--trace-file", path) as url:
        ask(url, n=3, temperature=1)
    (request,) = requests(read(path))
    assert len(request.generations) == 3
    rounds = {round.span.trace.span: round for round in request.rounds}
    forwards = [one.span for one in request.told if one.span.name == SpanName.FORWARD]
    shared = [span for span in forwards if span.attributes[Attribute.STEP_SESSIONS] == 3]
    assert shared
    for span in shared:
        linked = {link.span for link in span.links}
        assert len(linked) == 2
        assert span.parent not in linked
        assert linked <= rounds.keys()


def test_a_trace_that_is_not_sampled_and_a_service_that_is_not_traced_tell_nothing(
    tiny: Any, tmp_path: Path
) -> None:
    path = tmp_path / "traces.jsonl"
    with service(tiny, "--trace-file", path) as url:
        off = {"traceparent": HEADER[:-1] + "0"}
        body = {"model": "tiny", "prompt": [1, 5], "max_tokens": 5, "ignore_eos": True}
        assert httpx.post(f"{url}/v1/completions", json=body, headers=off, timeout=60).status_code == 200
    assert path.read_text() == ""


@pytest.mark.parametrize("kind", SIDES)
def test_a_trace_tells_of_the_replica_that_was_lost_and_where_the_session_went_on(
    tiny: Any, tmp_path: Path, kind: ReplicaKind
) -> None:
    path = tmp_path / "traces.jsonl"
    traced = "--trace-file", path
    with ExitStack() as stack:

        def run(*arguments: object) -> Replica:
            return stack.enter_context(replica(*arguments, *traced))

        verifiers = [run(*tiny.verify) for _ in range(2)]
        drafters = [run(*tiny.draft(*(v.address for v in verifiers))) for _ in range(2)]
        gateway = run(*tiny.gateway(*(d.address for d in drafters)))
        replicas = verifiers if kind is ReplicaKind.VERIFY else drafters
        body = {
            "model": "tiny",
            "prompt": [1, 5, 3, 8],
            "max_tokens": 200,
            "ignore_eos": True,
            "stream": True,
        }
        url, headers = f"http://{gateway.address}/v1/completions", {"traceparent": HEADER}
        killed = None
        with httpx.stream("POST", url, json=body, headers=headers, timeout=60) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: ") and killed is None:
                    killed = next(one for one in replicas if asyncio.run(sessions_of(kind, one.address)))
                    killed.process.kill()
        assert killed
        (other,) = (one for one in replicas if one is not killed)
    (request,) = requests(read(path))
    teller = SpanName.GENERATE if kind is ReplicaKind.VERIFY else request.told[0].span.name
    (span,) = (one.span for one in request.told if one.span.name == teller and one.span.events)
    (moved,) = (event for event in span.events if event.name == EventName.MOVED)
    assert moved.attributes[Attribute.MOVED_KIND] == kind
    assert moved.attributes[Attribute.MOVED_TO] == other.address
    assert moved.attributes[Attribute.MOVED_LOST] is True
    if kind is ReplicaKind.VERIFY:
        lost = span.events[0]
        assert (lost.name, lost.attributes[Attribute.VERIFIER]) == (EventName.LOST, killed.address)
        assert lost.attributes[Attribute.ERROR] == ErrorCode.UNAVAILABLE
    assert sum(round.count(Attribute.COMMITTED) for round in request.rounds) <= 200


async def sessions_of(kind: ReplicaKind, address: str) -> int:
    """That a replica serves."""
    async with connect(address) as channel:
        if kind is ReplicaKind.DRAFT:
            return (await DraftClient(channel).status(5)).running
        return (await VerifyClient(channel).status(5)).load.running


def test_a_collector_gets_the_same_spans(tiny: Any, tmp_path: Path) -> None:
    path, collector = tmp_path / "traces.jsonl", Collector()
    server = grpc.server(futures.ThreadPoolExecutor(4))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    endpoint = "--otlp-traces-endpoint", f"http://127.0.0.1:{port}"
    with service(tiny, "--trace-file", path, *endpoint) as url:
        ask(url)
    server.stop(5).wait()
    told = {(one.process.split()[0], one.span.trace.span, one.span.name) for one in read(path)}
    assert collector.got == told


class Collector(trace_service_pb2_grpc.TraceServiceServicer):  # type: ignore[misc]
    """What an OpenTelemetry collector receives."""

    def __init__(self) -> None:
        self.got: set[tuple[str, str, str]] = set()

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Take spans."""
        for batch in request.resource_spans:
            names = {one.key: one.value.string_value for one in batch.resource.attributes}
            for scoped in batch.scope_spans:
                self.got |= {(names["service.name"], s.span_id.hex(), s.name) for s in scoped.spans}
        return trace_service_pb2.ExportTraceServiceResponse()


def test_the_command_shows_rounds_and_writes_a_page_and_a_file_for_perfetto(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    page, events = tmp_path / "trace.html", tmp_path / "perfetto.json"
    shown = CliRunner().invoke(
        app, ["trace", "show", str(file), "--html", str(page), "--perfetto", str(events)]
    )
    assert shown.exit_code == 0, shown.output
    assert f"trace {TRACE}" in shown.output
    assert all(part in shown.output for part in PARTS)
    assert "http://" not in page.read_text().replace("http://www.w3.org", "")
    named = json.loads(events.read_text())["traceEvents"]
    assert {event["ph"] for event in named} == {"M", "X"}
    again = CliRunner().invoke(app, ["trace", "show", TRACE[:8], "--file", str(file)])
    assert again.exit_code == 0, again.output
    unknown = CliRunner().invoke(app, ["trace", "show", "ffff", "--file", str(file)])
    assert "has no request" in unknown.output
