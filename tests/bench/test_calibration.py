import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.bench import calibration as module
from services.bench.calibration import OVERALL, Cells, Curves, Node, bench_calibration, decided, draw, learn
from services.engine.head import EagleHead
from services.engine.target import Target
from services.local.models import load
from services.speculation.calibration import LEAST, Calibration
from services.types.configuration import DraftConfig
from services.types.sampling import SamplingParams
from services.types.session import FinishReason, Session


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    """Two tasks of two questions and of one."""
    directory = tmp_path / "questions"
    directory.mkdir()
    for task, texts in (("alpha", ("abc", "dea.")), ("beta", ("fgh",))):
        lines = [json.dumps({"turns": [text]}) for text in texts]
        (directory / f"{task}.jsonl").write_text("\n".join(lines) + "\n")
    return directory


def test_the_json_the_table_and_the_figure_show_what_the_trees_of_all_questions_were_worth(
    questions: Path,
    tmp_path: Path,
    checkpoints: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(module, "TREES", DraftConfig(levels=3, beam=4, budget=40))
    models = load(
        str(checkpoints.target), str(checkpoints.head), speculative=True, device="cpu", dtype="float64"
    )
    file, plot = tmp_path / "calibration.json", tmp_path / "calibration.svg"
    bench_calibration(models, questions, None, 24, [0.0, 1.0], True, file, plot)
    record = json.loads(file.read_text())
    assert record["benchmark"] == "calibration"
    assert record["settings"]["trees"]["budget"] == 40
    rows = {(row["temperature"], row["task"]): row for row in record["rows"]}
    assert [*rows] == [(t, task) for t in (0.0, 1.0) for task in ("alpha", "beta", OVERALL)]
    for temperature in (0.0, 1.0):
        whole = rows[temperature, OVERALL]
        parts = [rows[temperature, task] for task in ("alpha", "beta")]
        by_level = [row for row in record["levels"] if row["temperature"] == temperature]
        for rest in (parts, by_level):
            assert sum(row["observations"] for row in rest) == whole["observations"] > 0
        assert sum(bin["count"] for bin in whole["curve_before"]) == whole["observations"]
        assert [row["level"] for row in by_level] == sorted({row["level"] for row in by_level})
        assert 0 < whole["before"]["error"] < 1
        assert whole["error_by_chance"] < min(part["error_by_chance"] for part in parts)
    assert plot.read_text().lstrip().startswith("<?xml")
    assert "overall" in capsys.readouterr().out


def test_what_a_step_decided_says_what_the_target_accepted(
    target: Callable[..., Target], head: Callable[..., EagleHead], run: Callable[..., Any]
) -> None:
    """On real steps: per round and level, every accepted node once, and never two siblings."""
    steps = _steps(target, head, run)
    finishes: Counter[str] = Counter()
    for step in steps:
        nodes = decided(step)
        if step.tree is None:
            assert nodes == []
            continue
        depths = [node.level for node in nodes if node.accepted]
        assert depths == list(range(1, len(step.outcome.accepted) + 1))
        deepest = max((node.level for node in nodes), default=0)
        drawn = len(step.outcome.tokens)
        assert deepest <= drawn
        if step.outcome.finish is FinishReason.STOP:
            finishes["by a node" if len(step.outcome.accepted) == drawn else "by the bonus token"] += 1
    assert finishes["by a node"]
    assert finishes["by the bonus token"]


def _steps(
    target: Callable[..., Target], head: Callable[..., EagleHead], run: Callable[..., Any]
) -> list[Any]:
    from services.draft.drafter import Drafter

    served = target("llama")
    drafter = Drafter(head(served), DraftConfig(levels=4, beam=8, budget=64), num_pages=2000)
    sessions = [
        Session(f"s{i}", (1, 5 + i % 50, 9), SamplingParams(max_tokens=24, temperature=1.0), i)
        for i in range(24)
    ]
    return list(run(served, sessions, drafter, 2000).steps)


def test_a_round_is_corrected_by_the_rounds_before_it_alone() -> None:
    def rounds(last: bool) -> Cells:
        calibration, cells = Calibration(), Cells()
        for i in range(2 * LEAST):
            learn(calibration, cells, "alpha", 0.0, False, [Node(1, 0.5, i % 4 == 0)])
        learn(calibration, cells, "beta", 0.0, False, [Node(1, 0.5, last)] * 40)
        return cells

    one, other = rounds(True), rounds(False)
    assert [bin.confidence for bin in one[0.0, "beta", 1].after.bins()] == [
        bin.confidence for bin in other[0.0, "beta", 1].after.bins()
    ]
    (late,) = one[0.0, "beta", 1].after.bins()
    assert late.confidence == pytest.approx(0.25, abs=0.03)
    early = one[0.0, "alpha", 1].after.bins()
    assert sum(bin.count for bin in early if bin.low <= 0.5 < bin.high) == LEAST


def test_chance_alone_makes_the_error_that_a_head_shows_which_is_right() -> None:
    rng = random.Random(5)
    curves = Curves()
    for _ in range(4000):
        confidence = rng.random() ** 3
        curves.before.observe(confidence, rng.random() < confidence)
    figures = curves.figures()
    # A mean of 18 bins' distances: between half and twice what is expected with near certainty.
    assert 0.5 < figures["before"]["error"] / figures["error_by_chance"] < 2


def test_a_figure_has_a_panel_for_each_temperature(tmp_path: Path) -> None:
    calibration, cells = Calibration(), Cells()
    for temperature in (0.0, 0.7, 1.0):
        for i in range(60):
            learn(
                calibration,
                cells,
                "alpha",
                temperature,
                False,
                [Node(1, 0.97, i % 9 > 0), Node(1, 0.02, i % 9 == 0)],
            )
    for suffix in ("svg", "png"):
        draw(cells, tmp_path / f"figure.{suffix}")
    drawn = (tmp_path / "figure.svg").read_text()
    assert all(f"temperature {temperature:g}" in drawn for temperature in (0.0, 0.7, 1.0))
