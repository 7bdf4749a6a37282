"""The benchmarks that start replicas: what they write is what their tables show."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from services.bench.gateway import PARALLEL, bench_gateway
from services.bench.journal import bench_journal
from services.bench.link import WIDTHS, bench_link
from services.bench.load import FIXED, MODES, Answer, Load, Run, bench_load
from services.bench.questions import PROMPTS, some_prompts
from services.bench.tracing import bench_tracing
from services.bench.turns import bench_turns
from services.types.messages import Round

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """No table has to cut its cells."""
    monkeypatch.setenv("COLUMNS", "120")


def test_the_link_is_measured_in_real_rounds_and_alone_beside_an_echo_of_the_same_sizes(
    checkpoints: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    device = torch.device("cpu")
    file = tmp_path / "link.json"
    bench_link(str(checkpoints.target), str(checkpoints.head), torch.float64, device, ["abc"], 24, 20, file)
    record = json.loads(file.read_text())
    parts = {row["part"]: row for row in record["rounds"]}
    assert parts["link"]["count"] > 0
    assert 0 < parts["link"]["p50"] < parts["wall"]["p50"]
    assert parts["target"]["p50"] + parts["draft"]["p50"] < parts["wall"]["p99"]
    assert [row["payload"] for row in record["wire"]] == list(WIDTHS)
    for row, (width, dtype) in zip(record["wire"], WIDTHS.values(), strict=True):
        assert row["bytes_down"] > 4 * width * dtype.itemsize
        assert row["ratio_p50"] == pytest.approx(row["link_p50"] / row["echo_p50"])
    assert "70B" in capsys.readouterr().out


@pytest.mark.parametrize("knowing", [None, 0.9])
def test_the_load_is_the_same_text_in_all_modes_and_the_json_says_what_the_table_shows(
    checkpoints: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], knowing: float | None
) -> None:
    file, plot = tmp_path / "load.json", tmp_path / "load.svg"
    target, head = str(checkpoints.target), str(checkpoints.head)
    load = Load(target, head, "float64", [1, 3], max_tokens=24, repeats=1, knowing=knowing)
    bench_load(load, ["abc", "dea.", "fgh"], file, plot)
    record = json.loads(file.read_text())
    rows = record["rows"]
    assert [(row["sessions"], row["mode"]) for row in rows] == [(n, mode) for n in (1, 3) for mode in MODES]
    for row in rows:
        assert len(row["repeats"]) == 3
        repeat = row["repeats"][0]
        middle = sorted(each["tokens_per_s"] for each in row["repeats"])[1]
        assert middle == row["tokens_per_s"]
        assert row["identical"] == row["answers"] == 3 * row["sessions"] == 3 * len(repeat["rounds"])
        assert row["tokens_per_s"] > 0
        if row["mode"] in FIXED:
            # The last token of an answer needs no tree.
            assert row["tree_share"] > 0.5
            assert 1 < row["nodes"] <= 60
        if row["mode"] == "plain":
            assert row["tau"] is None
            assert row["ratio"] == 1
            assert row["tree_share"] == 0
            assert "trees_verified" not in repeat["counters"]["verify"]
    fixed = [row for row in rows if row["mode"] == "fixed 60"]
    assert all(row["tau"] > (3 if knowing else 1) for row in fixed)
    for summary in record["summary"]:
        (auto,) = (row for row in rows if (row["sessions"], row["mode"]) == (summary["sessions"], "auto"))
        median, least, most = summary["plain"]
        assert least <= median <= most
        assert median == pytest.approx(auto["ratio"])
        assert summary["best_fixed"] in FIXED
    assert record["settings"]["knowing"] == knowing
    for curve in record["cost"].values():
        assert curve == sorted(curve)
    assert record["cost"]["verify"]
    assert "fixed static" in capsys.readouterr().out
    assert "sessions" in plot.read_text()


def test_a_second_turn_computes_only_what_is_new_at_both_services(
    checkpoints: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.bench.turns.STORY", "abcdefghij" * 3)
    monkeypatch.setattr("services.bench.turns.SECOND", "abc")
    file = tmp_path / "turns.json"
    bench_turns(str(checkpoints.target), str(checkpoints.head), "float64", 120, 8, file)
    first, second = json.loads(file.read_text())["rows"]
    assert first["prefilled_by_the_target"] == first["prompt"]
    assert second["known_from_turn_1"] > 100
    # Whole pages of 16 are found again, and the newest token of a hit is computed anew.
    new = second["prompt"] - second["known_from_turn_1"]
    assert second["prefilled_by_the_target"] <= new + 16
    assert second["extended_by_the_head"] <= new + 16 + second["output"]


def test_prompts_come_from_all_question_sets_alike_or_from_a_few_of_our_own(tmp_path: Path) -> None:
    for task in ("alpha", "beta"):
        lines = [json.dumps({"turns": [f"{task} {i}"]}) for i in range(3)]
        (tmp_path / f"{task}.jsonl").write_text("\n".join(lines))
    assert some_prompts(tmp_path, 4) == ["alpha 0", "beta 0", "alpha 1", "beta 1"]
    assert some_prompts(None, 6) == [*PROMPTS, *PROMPTS[:2]]


def test_the_journal_is_measured_with_all_processes_that_take_part(
    checkpoints: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "journal.json"
    target, head = str(checkpoints.target), str(checkpoints.head)
    bench_journal(target, head, "float64", ["abc", "dea."], 12, file)
    record = json.loads(file.read_text())
    memory, redis = record["rows"]
    assert (memory["store"], redis["store"]) == ("memory", "redis")
    assert memory["redis"] == 0 < redis["redis"]
    for row in record["rows"]:
        assert row["all"] == pytest.approx(row["verify"] + row["draft"] + row["redis"])
        assert min(row["verify"], row["draft"]) > 0
    assert record["costs"].keys() == {"all", "draft and redis"}
    for cost in record["costs"].values():
        assert cost["low"] <= cost["mean"] <= cost["high"]
    assert "95 % confidence" in capsys.readouterr().out


@pytest.mark.parametrize("to", ["file", "collector"])
def test_tracing_is_measured_with_every_span_told_against_none(
    checkpoints: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], to: Any
) -> None:
    file = tmp_path / "tracing.json"
    target, head = str(checkpoints.target), str(checkpoints.head)
    bench_tracing(target, head, "float64", ["abc", "dea."], 12, to, file)
    record = json.loads(file.read_text())
    assert len(record["answers"]) == 2
    for pair in record["answers"]:
        assert pair["off"]["tokens"] == pair["on"]["tokens"] == 12
        assert min(pair["on"].values()) > 0
    assert record["costs"].keys() == {"processor time", "time of an answer"}
    assert record["spans"] > 2 * 12
    assert f"every request traced to a {to}" in capsys.readouterr().out


def test_the_gateway_is_measured_beside_the_same_calls_over_grpc(
    checkpoints: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "gateway.json"
    bench_gateway(str(checkpoints.target), requests=6, rounds=5, repeats=2, json_file=file)
    record = json.loads(file.read_text())
    order = [(parallel, way) for parallel in PARALLEL for way in ("gRPC", "HTTP")]
    for rows in (record["answers"], record["rounds"]):
        assert [(row["at_once"], row["over"]) for row in rows] == order
    for row in record["answers"]:
        assert row["count"] == 2 * 6
        assert row["requests_per_s"] > 0
        assert 0 < row["took_p50"] <= row["took_p99"]
    direct = {}
    for row in record["rounds"]:
        assert row["count"] == 2 * 5 * row["at_once"]
        # No round comes before it is due.
        assert 0 < row["late_p50"] <= row["late_p99"]
        assert row["gap_p50"] > 0
        base = direct.setdefault(row["at_once"], row)
        assert row["added_p50"] == pytest.approx(row["late_p50"] - base["late_p50"])
    assert "added p50" in capsys.readouterr().out


def test_goodput_is_that_of_the_time_in_which_all_sessions_run() -> None:
    """What the slow one says when the fast one has ended, with fewer beside it, does not count."""
    rounds = [Round(i, (1,) * i, 0, 1, 0, 0) for i in (1, 2, 3)]
    slow, fast = Answer(1.0, [2.0, 4.0, 9.0], rounds), Answer(1.0, [3.0, 4.0, 5.0], rounds)
    run = Run(1.0, [slow, fast], {})
    assert run.seconds == 4.0
    assert run.tokens_per_s == (1 + 2 + 1 + 2 + 3) / 4.0
    assert (fast.first_s, fast.time_per_token_s) == (2.0, 2.0 / 5)
