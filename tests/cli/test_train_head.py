import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from typer.testing import Result


def test_a_head_trained_by_the_command_drafts_for_its_target(
    weald: Callable[..., Result], checkpoints: Any, tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_text("abc dea. fgh. abcabc dede. " * 60)
    options = ("--target", checkpoints.target, "--corpus", tmp_path / "text.txt", "--out", tmp_path / "head")
    small = ("--max-length", 24, "--batch-tokens", 256, "--epochs", 1, "--device", "cpu")
    trained = weald("train-head", *options, *small, "--draft-vocab-size", 8)
    assert trained.exit_code == 0, trained.output
    assert json.loads((tmp_path / "head" / "config.json").read_text())["draft_vocab_size"] == 8
    texts = []
    for mode in ("on", "off"):
        models = ("--model", checkpoints.target, "--speculative-model", tmp_path / "head")
        prompt = ("--prompt", "abc", "--temperature", 0, "--max-tokens", 20, "--dtype", "float64")
        told = weald("generate", *models, *prompt, "--speculative", mode, "--json")
        assert told.exit_code == 0, told.output
        texts.append(json.loads(told.stdout)["token_ids"])
    assert texts[0] == texts[1]


def test_a_target_without_data_teaches_a_head_by_talking_to_itself(
    weald: Callable[..., Result], checkpoints: Any, tmp_path: Path
) -> None:
    options = ("--target", checkpoints.target, "--self-distill", 6, "--out", tmp_path)
    trained = weald("train-head", *options, "--batch-tokens", 60, "--epochs", 1, "--device", "cpu")
    assert trained.exit_code == 0, trained.output
    assert json.loads((tmp_path / "training.json").read_text())["sequences"] == 6


def test_nothing_to_learn_from_is_refused_before_anything_is_loaded(weald: Callable[..., Result]) -> None:
    refused = weald("train-head", "--target", "nowhere", "--out", "nowhere")
    assert refused.exit_code == 1
    assert "give --corpus, --self-distill, or both" in refused.stderr
