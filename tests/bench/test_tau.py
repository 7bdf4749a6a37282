import json
from pathlib import Path
from typing import Any

import pytest

from services.bench import tau as module
from services.bench.questions import read_questions
from services.bench.tau import COUPLED, MODES, PLAIN, REFERENCE, bench_tau
from services.local.models import load
from services.types.configuration import DraftConfig, TreeShape
from services.types.errors import WealdError


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    """Two tasks of three questions."""
    for task in ("alpha", "beta"):
        lines = [json.dumps({"turns": [text, "unused"]}) for text in ("abc", "dea.", "fgh")]
        (tmp_path / f"{task}.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_questions_are_spread_evenly_over_each_set(questions: Path, tmp_path: Path) -> None:
    assert read_questions(questions, None)["alpha"] == ["abc", "dea.", "fgh"]
    assert read_questions(questions, 2) == {"alpha": ["abc", "dea."], "beta": ["abc", "dea."]}
    (tmp_path / "empty").mkdir()
    with pytest.raises(WealdError, match="no question sets"):
        read_questions(tmp_path / "empty", None)


def test_every_mode_answers_every_question_with_the_plain_text_and_the_json_says_what_the_table_shows(
    questions: Path,
    tmp_path: Path,
    checkpoints: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setitem(module.MODES, "dynamic 60", DraftConfig(levels=3, beam=4, budget=60))
    models = load(
        str(checkpoints.target), str(checkpoints.head), speculative=True, device="cpu", dtype="float64"
    )
    named, plot = [*MODES, REFERENCE], tmp_path / "tau.svg"
    bench_tau(models, questions, 2, 12, [0.0, 1.0], 0.9, [True, False], named, tmp_path / "tau.json", plot)
    record = json.loads((tmp_path / "tau.json").read_text())
    assert record["benchmark"] == "tau"
    assert record["environment"]["torch"]
    rows = {(r["temperature"], r["task"], r["mode"]): r for r in record["rows"]}
    for temperature in (0.0, 1.0):
        kinds = (COUPLED, "") if temperature else ("",)
        modes = [PLAIN, *(mode + kind for mode in MODES for kind in kinds)]
        last = [REFERENCE] if temperature else []
        assert [m for t, task, m in rows if (t, task) == (temperature, "overall")] == modes + last
        for mode in modes:
            row = rows[temperature, "overall", mode]
            assert row["identical"] == row["answers"] == 4
            assert (row["tau"] is None) == (mode == PLAIN)
            assert 0 < row["other_share"] < 1
            assert (row["noise_share"] > 0) is mode.endswith(COUPLED)
            parts = [rows[temperature, task, mode]["tokens"] for task in ("alpha", "beta")]
            assert row["tokens"] == sum(parts)
    assert rows[1.0, "overall", REFERENCE]["identical"] is None
    assert max(r["tau"] or 0 for r in rows.values()) > 1
    assert "temperature" in plot.read_text()
    printed = capsys.readouterr().out
    assert "dynamic 26" in printed
    assert "4/4" in printed


def test_the_dynamic_tree_beside_the_static_one_has_as_many_nodes() -> None:
    assert MODES["static 26"] == DraftConfig(TreeShape.STATIC)
    assert MODES["dynamic 26"].budget == 26
