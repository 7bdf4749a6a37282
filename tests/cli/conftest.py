"""A tiny random model with a head, saved as checkpoints, and the command line to run them with."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner, Result

from services.cli.app import app
from services.engine.head import EagleHead
from services.gateway.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = "{% for m in messages %}<|user|>{{ m.content }}{% endfor %}<|answer|>"
SPECIAL = ("<|end|>", "<|user|>", "<|answer|>")
LETTERS = "abcdefghijĠ."


@dataclass(frozen=True)
class Checkpoints:
    """Where the tiny model lies."""

    target: Path
    head: Path

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return Tokenizer.load(self.target)

    def options(self, *more: object) -> list[str]:
        """Options that name model and head, in float64: near-ties must not tell modes apart."""
        named = ("--model", self.target, "--speculative-model", self.head, "--dtype", "float64")
        return [str(option) for option in (*named, *more)]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """A Llama of 15 tokens and an undecided head, so that its wide trees often hold what comes next."""
    directory = tmp_path_factory.mktemp("checkpoints")
    target, head = directory / "target", directory / "head"
    names = [*SPECIAL, *LETTERS]
    core = tokenizers.Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    config = LlamaConfig(
        vocab_size=len(names),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.4,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = LlamaForCausalLM(config)
        model.save_pretrained(target)
        weights = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        config.initializer_range = 0.02
        EagleHead(config, *weights).save(head, torch.float32)
    core.save(str(target / "tokenizer.json"))
    (target / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return Checkpoints(target, head)


@pytest.fixture(scope="session")
def weald() -> Callable[..., Result]:
    """`weald(*arguments, input=…)` runs the command line in this process."""
    runner = CliRunner()

    def run(*arguments: object, input: str | bytes | None = None) -> Result:
        return runner.invoke(app, [str(a) for a in arguments], input=input)

    return run


@pytest.fixture(scope="session")
def generate(weald: Callable[..., Result], checkpoints: Checkpoints) -> Callable[..., dict[str, Any]]:
    """`generate(*arguments, input=…)` is the object that `weald generate --json` prints."""

    def run(*arguments: object, input: str | bytes | None = None) -> dict[str, Any]:
        finished = weald("generate", *checkpoints.options("--json", *arguments), input=input)
        assert finished.exit_code == 0, finished.output
        printed: dict[str, Any] = json.loads(finished.stdout)
        return printed

    return run


@pytest.fixture(scope="session")
def spawn() -> Callable[..., subprocess.CompletedProcess[str]]:
    """`spawn(*arguments)` runs the command as a process of its own."""

    def run(*arguments: object, prelude: str = "") -> subprocess.CompletedProcess[str]:
        script = f"from cluster.command import main; {prelude}main()"
        path = os.pathsep.join([str(ROOT), str(ROOT / "protos")])
        return subprocess.run(
            [sys.executable, "-c", script, *map(str, arguments)],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )

    return run
