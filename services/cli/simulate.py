"""`weald simulate`: both services in virtual time, on machines that are not at hand."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from services.cli.options import Device, Dtype, Head, Model, listed

simulate = typer.Typer(
    name="simulate", help="Loads and machines that are not at hand.", invoke_without_command=True
)


@simulate.callback()
def run(
    context: typer.Context,
    shape: Annotated[
        Literal["all", "smollm2", "8b", "70b"],
        typer.Option(help="SmolLM2 on two cores, 8B on one H100, 70B on eight."),
    ] = "all",
    sessions: Annotated[
        str, typer.Option(help="How many sessions at once, like 1,2,4.")
    ] = "1,2,4,8,16,32,64,128,256",
    rate: Annotated[
        float | None,
        typer.Option(
            min=1e-6, help="Sessions that arrive in a second, by chance; no more run than --sessions."
        ),
    ] = None,
    trees: Annotated[
        Literal["published", "recorded"],
        typer.Option(help="Of 8b and 70b: drawn from the published τ, or those of SmolLM2's head."),
    ] = "published",
    traces: Annotated[
        Path | None, typer.Option(help="Recorded traces; those that come with Weald if absent.")
    ] = None,
    draft_replicas: Annotated[int, typer.Option(min=1)] = 1,
    verify_replicas: Annotated[int, typer.Option(min=1)] = 1,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="On average.")] = 512,
    max_tokens: Annotated[int, typer.Option(min=2, help="Of an answer, on average.")] = 128,
    load: Annotated[Path | None, typer.Option(help="JSON of weald bench load, to be reproduced.")] = None,
    seed: Annotated[int, typer.Option(help="Of lengths, arrivals and drawn traces.")] = 0,
    json: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
    plots: Annotated[Path | None, typer.Option(help="A directory for simulate-SHAPE.svg.")] = None,
) -> None:
    """Goodput, latency and utilisation of every way to draft, by the product's own scheduler."""
    if context.invoked_subcommand:
        return
    from services.bench.simulate import SHAPES, Load, bench_simulate

    counts = listed(sessions, int, "1,2,4")
    asked = Load(prompt_tokens, max_tokens, rate, seed)
    chosen = SHAPES if shape == "all" else (shape,)
    replicas = {"drafters": draft_replicas, "verifiers": verify_replicas}
    bench_simulate(chosen, trees, traces, asked, counts, replicas, load, json, plots)


@simulate.command()
def record(
    questions: Annotated[Path, typer.Option(help="A directory of question sets, TASK.jsonl each.")],
    out: Annotated[Path, typer.Option(help="Where the traces go, FILE.npz.")],
    model: Model = "smollm2-135m",
    speculative_model: Head = None,
    limit: Annotated[int, typer.Option(min=1, help="Questions of each task.")] = 4,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer at most.")] = 48,
    temperature: Annotated[str, typer.Option(help="Of the answers, like 0,0.7,1.")] = "0,1",
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Record what a head proposes at every position of answers, and what the target accepts of it."""
    from services.bench.traces import record as record_traces
    from services.local.models import load as load_models
    from services.local.models import quiet

    temperatures = listed(temperature, float, "0,0.7,1")
    models = load_models(model, speculative_model, speculative=True, device=device, dtype=dtype)
    with quiet():
        record_traces(models, questions, limit, max_tokens, temperatures, out)
