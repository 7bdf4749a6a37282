import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from services.engine.target import Target
from services.training import distill as module
from services.training.distill import distill, template_around_user


@pytest.fixture(autouse=True)
def short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns of a few tokens; openings of letters that the tiny tokenizer knows."""
    monkeypatch.setattr(module, "MAX_USER_TOKENS", 6)
    monkeypatch.setattr(module, "MAX_ANSWER_TOKENS", 8)
    monkeypatch.setattr(module, "OPENINGS", ("", "abc"))


@pytest.fixture
def target(checkpoints: Any) -> Target:
    """The tiny target in float64."""
    return Target.load(checkpoints.target, torch.float64, torch.device("cpu"))


def read(file: Path) -> list[dict[str, Any]]:
    """The dialogues of a corpus."""
    with gzip.open(file, "rt") as lines:
        return [json.loads(line) for line in lines]


def test_dialogues_have_the_shape_of_the_chat_template(
    checkpoints: Any, target: Target, tmp_path: Path
) -> None:
    distill(target, checkpoints.tokenizer, 5, tmp_path / "d.jsonl.gz", rows=2)
    dialogues = read(tmp_path / "d.jsonl.gz")
    before, between = template_around_user(checkpoints.tokenizer)
    assert len(dialogues) == 5
    for dialogue in dialogues:
        prompt = dialogue["ids"][: dialogue["prompt_len"]]
        assert prompt[: len(before)] == before
        assert prompt[-len(between) :] == between
        assert 1 <= len(dialogue["ids"]) - dialogue["prompt_len"] <= 8


def test_a_dialogue_is_the_same_however_many_are_written_at_once_and_after_an_interruption(
    checkpoints: Any, target: Target, tmp_path: Path
) -> None:
    distill(target, checkpoints.tokenizer, 6, tmp_path / "whole.jsonl.gz", rows=6)
    distill(target, checkpoints.tokenizer, 4, tmp_path / "parts.jsonl.gz", rows=3)
    distill(target, checkpoints.tokenizer, 6, tmp_path / "parts.jsonl.gz", rows=1)
    assert read(tmp_path / "whole.jsonl.gz") == read(tmp_path / "parts.jsonl.gz")


def test_another_seed_writes_other_dialogues(checkpoints: Any, target: Target, tmp_path: Path) -> None:
    for seed in (0, 1):
        distill(target, checkpoints.tokenizer, 4, tmp_path / f"{seed}.jsonl.gz", seed=seed)
    assert read(tmp_path / "0.jsonl.gz") != read(tmp_path / "1.jsonl.gz")
