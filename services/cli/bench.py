"""`weald bench …`: measurements that print a table and write it as JSON."""

from pathlib import Path
from typing import Annotated

import typer

bench = typer.Typer(name="bench", help="Measure, print a table, and write it as JSON.", no_args_is_help=True)

Model = Annotated[str, typer.Option(help="smollm2-135m, a directory, a .gguf file, or a hub name.")]
Json = Annotated[Path | None, typer.Option("--json", help="Write the figures and the environment here.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, and so on.")]
Dtype = Annotated[str, typer.Option(help="auto (bfloat16 on cuda, else float32), bfloat16, float32.")]


@bench.command()
def tau(
    questions: Annotated[Path, typer.Option(help="A directory of question sets, TASK.jsonl each.")],
    model: Model = "smollm2-135m",
    speculative_model: Annotated[
        str | None, typer.Option(help="The draft head; packaged models bring one.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Questions of each task; all if absent.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Output tokens of an answer at most.")] = 128,
    temperature: Annotated[list[float] | None, typer.Option(help="Repeatable; 0 and 1 if absent.")] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    json: Json = None,
) -> None:
    """τ and tokens/s of plain decoding, chains, static and dynamic trees on the same questions."""
    from services.bench.tau import bench_tau
    from services.local.models import load

    models = load(model, speculative_model, speculative=True, device=device, dtype=dtype)
    bench_tau(models, questions, limit, max_tokens, temperature or [0.0, 1.0], json)


@bench.command()
def step(
    model: Model = "smollm2-135m",
    context: Annotated[int, typer.Option(help="Tokens before the step.")] = 256,
    repeats: Annotated[int, typer.Option(help="Interleaved repetitions.")] = 7,
    device: Device = "auto",
    dtype: Dtype = "auto",
    json: Json = None,
) -> None:
    """One target step of ours by tree size, beside a step of transformers' generate."""
    from services.bench.step import bench_step
    from services.local.models import precision, quiet, usable_device

    placed = usable_device(device)
    with quiet():
        bench_step(model, precision(dtype, placed), placed, context, repeats, json)
