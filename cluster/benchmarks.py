"""The benchmarks of a cluster: `weald bench scale` and `weald bench ray`."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from services.cli.bench import Json
from services.cli.options import Dtype, Head, Model
from services.types.errors import invalid


def scale(
    plot: Annotated[
        Path | None, typer.Option(help="Draw loads and replicas over time here: an .svg or a .png.")
    ] = None,
    json: Json = None,
) -> None:
    """Let load rise and fall on a Ray of its own: each side scales by its own load, and no request fails."""
    if find_spec("httpx") is None:
        raise invalid("the benchmark calls the gateway by the Python package httpx; run: pip install httpx")
    from cluster.bench_scale import bench_scale

    if not bench_scale(3, json, plot):
        raise typer.Exit(1)


def ray(
    questions: Annotated[Path | None, typer.Option(help="A directory of question sets.")] = None,
    model: Model = "smollm2-135m",
    speculative_model: Head = None,
    answers: Annotated[int, typer.Option(min=2, help="Answers compared.")] = 20,
    max_tokens: Annotated[int, typer.Option(min=1, help="Output tokens of an answer.")] = 64,
    dtype: Dtype = "float32",
    json: Json = None,
) -> None:
    """Processor time per token on Ray against plain processes, over all processes of each."""
    from cluster.bench_ray import bench_ray
    from services.bench.questions import some_prompts

    prompts = some_prompts(questions, answers)
    bench_ray(model, speculative_model, dtype, prompts, max_tokens, json)
