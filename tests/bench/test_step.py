import json
from pathlib import Path
from typing import Any

import pytest
import torch

from services.bench import step as module
from services.bench.step import bench_step


def test_a_step_of_every_tree_size_is_timed_beside_transformers_own(
    checkpoints: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(module, "NODES", (1, 4))
    monkeypatch.setattr(module, "STEPS", 3)
    monkeypatch.setattr(module, "FIRST_LEAF", 1)
    bench_step(str(checkpoints.target), torch.float32, torch.device("cpu"), 8, 2, tmp_path / "step.json")
    rows = json.loads((tmp_path / "step.json").read_text())["rows"]
    assert [row["step"] for row in rows] == ["transformers generate", "weald, nodes: 1", "weald, nodes: 4"]
    assert rows[0]["ratio"] == 1
    assert all(row["ms"] > 0 for row in rows)
    assert "weald, nodes: 4" in capsys.readouterr().out
