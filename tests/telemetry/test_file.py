"""Traces in files: what is read is what was told, by however many processes."""

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.telemetry.file import PERIOD_S, TraceFile, read
from services.telemetry.spans import Event, Span, Trace
from services.types.errors import ErrorCode, WealdError

times = st.integers(0, 2**63)
traces = st.builds(
    lambda id, span: Trace(f"{id:032x}", f"{span:016x}", True),
    st.integers(1, 2**128 - 1),
    st.integers(1, 2**64 - 1),
)
values = st.one_of(
    st.text(),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.lists(st.integers(0, 99)),
    st.lists(st.text()),
)
attributes = st.dictionaries(st.text(min_size=1), values, max_size=4)
spans = st.builds(
    Span,
    st.text(min_size=1),
    traces,
    st.just("") | traces.map(lambda trace: trace.span),
    times,
    times,
    attributes,
    st.lists(st.builds(Event, st.text(), times, attributes), max_size=2).map(tuple),
    st.lists(traces, max_size=2).map(tuple),
    st.text(),
    st.booleans(),
)


@given(told=st.lists(spans, max_size=5))
def test_what_is_read_is_what_was_told(told: list[Span], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("traces") / "below" / "traces.jsonl"
    file = TraceFile(path, {"service.name": "here", "service.instance.id": "1"})
    for span in told:
        file.put(span)
    file.close()
    if not told:
        assert path.read_text() == ""
        return
    found = read(path)
    assert {one.process for one in found} == {"here 1"}
    assert sorted(map(repr, (one.span for one in found))) == sorted(map(repr, told))
    assert [one.span.begin_ns for one in found] == sorted(span.begin_ns for span in told)


def test_the_file_is_otlp_as_a_collector_reads_it(tmp_path: Path) -> None:
    trace, link = Trace("1" * 32, "2" * 16, True), Trace("3" * 32, "4" * 16, True)
    file = TraceFile(tmp_path / "t.jsonl", {"service.name": "here"})
    file.put(Span("a", trace, "5" * 16, 1, 2, {"n": 3, "x": [0.5]}, links=(link,), error="no", served=True))
    file.close()
    (line,) = (tmp_path / "t.jsonl").read_text().splitlines()
    assert json.loads(line) == {
        "resourceSpans": [
            {
                "resource": {"attributes": [{"key": "service.name", "value": {"stringValue": "here"}}]},
                "scopeSpans": [
                    {
                        "scope": {"name": "weald"},
                        "spans": [
                            {
                                "traceId": "1" * 32,
                                "spanId": "2" * 16,
                                "parentSpanId": "5" * 16,
                                "name": "a",
                                "kind": 2,
                                "startTimeUnixNano": "1",
                                "endTimeUnixNano": "2",
                                "attributes": [
                                    {"key": "n", "value": {"intValue": "3"}},
                                    {"key": "x", "value": {"arrayValue": {"values": [{"doubleValue": 0.5}]}}},
                                ],
                                "links": [{"traceId": "3" * 32, "spanId": "4" * 16}],
                                "status": {"code": 2, "message": "no"},
                            }
                        ],
                    }
                ],
            }
        ]
    }


PROGRAM = """
import sys
from pathlib import Path
from services.telemetry.file import TraceFile
from services.telemetry.spans import Span, Trace
file = TraceFile(Path(sys.argv[1]), {"service.name": sys.argv[2]})
for i in range(2000):
    file.put(Span(str(i), Trace("1" * 32, "2" * 16, True), "", i, i + 1, {"long": "x" * 200}))
file.close()
"""


def test_processes_and_threads_that_share_a_file_do_not_tear_each_others_lines(tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    others = [subprocess.Popen([sys.executable, "-c", PROGRAM, path, str(i)]) for i in range(3)]
    file = TraceFile(path, {"service.name": "here"})

    def put() -> None:
        for i in range(2000):
            file.put(Span(str(i), Trace("1" * 32, "2" * 16, True), "", i, i + 1))

    threads = [threading.Thread(target=put) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    file.close()
    assert [other.wait(60) for other in others] == [0, 0, 0]
    found = read(path)
    assert {one.process: 0 for one in found}.keys() == {"0", "1", "2", "here"}
    assert len(found) == 10_000


@pytest.mark.parametrize("text", ["", "no json\n", '{"resourceLogs": []}\n', '{"resourceSpans": 3}\n'])
def test_what_holds_no_traces_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    path.write_text(text)
    with pytest.raises(WealdError, match="has no traces") as refused:
        read(path)
    assert refused.value.code is ErrorCode.INVALID_ARGUMENT


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WealdError, match="name another file"):
        TraceFile(tmp_path / "file" / "traces.jsonl", {})


def test_a_disk_that_is_full_costs_spans_and_no_more(caplog: pytest.LogCaptureFixture) -> None:
    file = TraceFile(Path("/dev/full"), {})
    for _ in range(2):
        file.put(Span("a", Trace("1" * 32, "2" * 16, True), "", 1, 2))
        time.sleep(1.2 * PERIOD_S)
    file.close()
    (said,) = caplog.messages
    assert "spans are lost" in said


def test_spans_that_pile_up_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.telemetry.file.MOST", 3)
    monkeypatch.setattr("services.telemetry.file.PERIOD_S", 60.0)
    file = TraceFile(tmp_path / "t.jsonl", {})
    for at in range(9):
        file.put(Span("a", Trace("1" * 32, "2" * 16, True), "", at, at))
    file.close()
    assert [one.span.begin_ns for one in read(tmp_path / "t.jsonl")] == [0, 1, 2]
