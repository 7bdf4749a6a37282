"""`weald train-head`: an EAGLE head for any target."""

from pathlib import Path
from typing import Annotated, Any

import typer

from services.types.errors import invalid


def _schedule(help: str) -> Any:
    return typer.Option(help=help, rich_help_panel="Schedule")


def train_head(
    target: Annotated[str, typer.Option(help="smollm2-135m, a directory, a .gguf file, or a hub name.")],
    out: Annotated[Path, typer.Option(help="Where the head, its curve and the state to resume from go.")],
    corpus: Annotated[
        list[Path] | None,
        typer.Option(help="Dialogues (.jsonl, .jsonl.gz), text files, or a directory of them. Repeatable."),
    ] = None,
    self_distill: Annotated[
        int, typer.Option(help="Dialogues the target writes with itself before training.")
    ] = 0,
    draft_vocab_size: Annotated[
        int, typer.Option(help="Most frequent tokens the head proposes; 0 for all.")
    ] = 8192,
    max_length: Annotated[int, typer.Option(help="Tokens of a sequence at most.")] = 512,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, and so on.")] = "auto",
    epochs: Annotated[int, _schedule("Passes over the corpus.")] = 4,
    batch_tokens: Annotated[int, _schedule("Tokens of a step, padding included.")] = 2048,
    learning_rate: Annotated[float, _schedule("After warm-up; it falls by a cosine.")] = 1.5e-3,
    unroll: Annotated[
        int, _schedule("Passes per step: the first on true features, the others on predicted ones.")
    ] = 2,
    seed: Annotated[int, _schedule("Of shuffling, noise and self-distillation.")] = 0,
) -> None:
    """Train a draft head; the same command resumes an interrupted run."""
    if not corpus and not self_distill:
        raise invalid("there is nothing to learn from: give --corpus, --self-distill, or both")

    from services.local.models import quiet, usable_device
    from services.training.run import train
    from services.training.trainer import TrainingConfig

    config = TrainingConfig(epochs, batch_tokens, learning_rate, unroll=unroll, seed=seed)
    with quiet():
        train(
            target,
            corpus or [],
            self_distill,
            out,
            draft_vocab_size,
            max_length,
            usable_device(device),
            config,
        )
