"""`weald bench …`: measurements that print a table and write it as JSON."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import typer

from services.cli.options import Device, Dtype, Head, Model, listed, switch
from services.types.errors import invalid

bench = typer.Typer(name="bench", help="Measure, print a table, and write it as JSON.", no_args_is_help=True)

Json = Annotated[Path | None, typer.Option("--json", help="Write the figures and the environment here.")]


@bench.command()
def tau(
    questions: Annotated[Path, typer.Option(help="A directory of question sets, TASK.jsonl each.")],
    model: Model = "smollm2-135m",
    speculative_model: Head = None,
    limit: Annotated[int | None, typer.Option(help="Questions of each task; all if absent.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Output tokens of an answer at most.")] = 128,
    temperature: Annotated[str, typer.Option(help="Of the answers, like 0,0.7,1.")] = "0,1",
    top_p: Annotated[float, typer.Option(help="Of the answers above temperature 0.")] = 1.0,
    coupling: Annotated[str, typer.Option(help="Of trees above temperature 0: on, off, or on,off.")] = "on",
    modes: Annotated[
        str | None, typer.Option(help="Of the table, with commas between; all if absent.")
    ] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    json: Json = None,
    plot: Annotated[Path | None, typer.Option(help="Draw τ by temperature here.")] = None,
) -> None:
    """τ and tokens/s of plain decoding, chains, static and dynamic trees on the same questions."""
    from services.bench.tau import MODES, REFERENCE, bench_tau
    from services.local.models import load

    named = [*MODES, REFERENCE] if modes is None else modes.split(",")
    for unknown in {*named} - {*MODES, REFERENCE}:
        raise typer.BadParameter(f"there is no mode {unknown!r}; there are {', '.join(MODES)}, {REFERENCE}")
    temperatures, couplings = listed(temperature, float, "0,0.7,1"), listed(coupling, switch, "on,off")
    models = load(model, speculative_model, speculative=True, device=device, dtype=dtype)
    bench_tau(models, questions, limit, max_tokens, temperatures, top_p, couplings, named, json, plot)


@bench.command()
def calibration(
    questions: Annotated[Path, typer.Option(help="A directory of question sets, TASK.jsonl each.")],
    model: Model = "smollm2-135m",
    speculative_model: Head = None,
    limit: Annotated[int | None, typer.Option(help="Questions of each task; all if absent.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Output tokens of an answer at most.")] = 64,
    temperature: Annotated[str, typer.Option(help="Of the answers, like 0,0.7,1.")] = "0,1",
    coupling: Annotated[Literal["on", "off"], typer.Option(help="Of the trees.", metavar="on|off")] = "on",
    device: Device = "auto",
    dtype: Dtype = "auto",
    json: Json = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the reliability curves here.")] = None,
) -> None:
    """How often nodes are accepted, by the head's confidence, before and after correction."""
    from services.bench.calibration import bench_calibration
    from services.local.models import load

    temperatures = listed(temperature, float, "0,0.7,1")
    models = load(model, speculative_model, speculative=True, device=device, dtype=dtype)
    bench_calibration(models, questions, limit, max_tokens, temperatures, coupling == "on", json, plot)


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


@bench.command()
def link(
    questions: Annotated[Path | None, typer.Option(help="A directory of question sets.")] = None,
    model: Model = "smollm2-135m",
    speculative_model: Head = None,
    answers: Annotated[int, typer.Option(help="Answers whose rounds are measured.")] = 4,
    max_tokens: Annotated[int, typer.Option(help="Output tokens of an answer at most.")] = 64,
    rounds: Annotated[int, typer.Option(help="Rounds of each payload over the wire alone.")] = 500,
    device: Device = "auto",
    dtype: Dtype = "auto",
    json: Json = None,
) -> None:
    """What the wire costs a round, by the clocks of both ends, beside a raw gRPC echo of the same sizes."""
    from services.bench.link import bench_link
    from services.bench.questions import some_prompts
    from services.local.models import head_of, precision, quiet, usable_device

    placed = usable_device(device)
    head = head_of(model, speculative_model)
    prompts = some_prompts(questions, answers)
    with quiet():
        bench_link(model, head, precision(dtype, placed), placed, prompts, max_tokens, rounds, json)


@bench.command()
def turns(
    model: Model = "smollm2-135m",
    speculative_model: Head = None,
    tokens: Annotated[int, typer.Option(help="Tokens of the first turn.")] = 1000,
    max_tokens: Annotated[int, typer.Option(help="Output tokens of a turn at most.")] = 32,
    dtype: Dtype = "auto",
    json: Json = None,
) -> None:
    """What a second turn of a long chat computes anew, counted at both services."""
    from services.bench.turns import bench_turns

    bench_turns(model, speculative_model, dtype, tokens, max_tokens, json)


@bench.command()
def load(
    sessions: Annotated[str, typer.Option(help="How many sessions at once, like 1,2,4.")] = "1,2,4,8,16,32",
    questions: Annotated[Path | None, typer.Option(help="A directory of question sets.")] = None,
    model: Model = "smollm2-135m",
    speculative_model: Head = None,
    max_tokens: Annotated[int, typer.Option(min=2, help="Output tokens of every answer.")] = 64,
    repeats: Annotated[
        int, typer.Option(min=1, help="Interleaved repetitions, of which medians are shown.")
    ] = 3,
    knowing: Annotated[
        float | None,
        typer.Option(
            metavar="P",
            min=0,
            max=1,
            help="In place of the head, know the texts: the first child of a node is right this often.",
        ),
    ] = None,
    dtype: Dtype = "auto",
    json: Json = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw tokens/s by sessions here: an .svg or a .png.")
    ] = None,
) -> None:
    """Tokens/s of many sessions through the services: trees that pay, fixed trees and plain decoding."""
    from services.bench.load import Load, bench_load
    from services.bench.questions import some_prompts

    counts = listed(sessions, int, "1,2,4")
    if min(counts) < 1:
        raise typer.BadParameter("there is at least 1 session")
    prompts = some_prompts(questions, max(*counts, repeats))
    asked = Load(model, speculative_model, dtype, counts, max_tokens, repeats, knowing)
    bench_load(asked, prompts, json, plot)


@bench.command()
def journal(
    questions: Annotated[Path | None, typer.Option(help="A directory of question sets.")] = None,
    model: Model = "smollm2-135m",
    speculative_model: Head = None,
    answers: Annotated[int, typer.Option(min=2, help="Answers compared.")] = 40,
    max_tokens: Annotated[int, typer.Option(help="Output tokens of an answer.")] = 64,
    dtype: Dtype = "auto",
    json: Json = None,
) -> None:
    """Processor time per token with the journal in Redis against memory, over all processes."""
    from services.bench.journal import bench_journal
    from services.bench.questions import some_prompts

    prompts = some_prompts(questions, answers)
    bench_journal(model, speculative_model, dtype, prompts, max_tokens, json)


@bench.command()
def tracing(
    questions: Annotated[Path | None, typer.Option(help="A directory of question sets.")] = None,
    model: Model = "smollm2-135m",
    speculative_model: Head = None,
    answers: Annotated[int, typer.Option(min=2, help="Answers compared.")] = 160,
    max_tokens: Annotated[int, typer.Option(help="Output tokens of an answer.")] = 12,
    to: Annotated[
        Literal["file", "collector"], typer.Option(help="Where spans go.", metavar="file|collector")
    ] = "file",
    dtype: Dtype = "auto",
    json: Json = None,
) -> None:
    """Processor time and time of an answer with every request traced, against none."""
    from services.bench.questions import some_prompts
    from services.bench.tracing import bench_tracing

    prompts = some_prompts(questions, answers)
    bench_tracing(model, speculative_model, dtype, prompts, max_tokens, to, json)


@bench.command()
def gateway(
    model: Model = "smollm2-135m",
    requests: Annotated[int, typer.Option(min=1, help="Short answers of each repetition.")] = 200,
    rounds: Annotated[int, typer.Option(min=2, help="Rounds of each stream.")] = 100,
    repeats: Annotated[int, typer.Option(min=1, help="Interleaved repetitions.")] = 5,
    json: Json = None,
) -> None:
    """What the gateway costs a request and a round, against calling a played draft service over gRPC."""
    if find_spec("httpx") is None:
        raise invalid("the benchmark calls the gateway by the Python package httpx; run: pip install httpx")
    from services.bench.gateway import bench_gateway

    bench_gateway(model, requests, rounds, repeats, json)


@bench.command()
def guidellm(
    model: Model = "smollm2-135m",
    requests: Annotated[int, typer.Option(min=1, help="Of each stream.")] = 4,
    guidellm: Annotated[str, typer.Option(metavar="COMMAND", help="GuideLLM's command.")] = "guidellm",
    json: Json = None,
) -> None:
    """Let GuideLLM, a load generator, measure the gateway with draft trees and without."""
    from services.bench.guidellm import bench_guidellm

    bench_guidellm(model, requests, guidellm, json)


@bench.command()
def paper(
    context: Annotated[int, typer.Option(min=1, help="Tokens before the tree.")] = 2048,
    json: Json = None,
) -> None:
    """On paper, from data sheets: the draft card, tree and draft vocabulary for 8B and 70B targets."""
    from services.bench.paper import bench_paper
    from services.local.models import quiet

    with quiet():
        bench_paper(context, json)


@bench.command()
def chaos(
    model: Annotated[
        str | None,
        typer.Option(
            help="A target in place of a tiny random one in float64, where texts are equal to the last "
            "token; in float32 a near-tie can come out otherwise in another batch."
        ),
    ] = None,
    speculative_model: Head = None,
    seed: Annotated[
        int | None, typer.Option(help="Of the disturbances; a random one, told, if absent.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0, help="How long streams are disturbed.")] = 180,
    streams: Annotated[int, typer.Option(min=1, help="Sessions at once.")] = 8,
    max_tokens: Annotated[int, typer.Option(min=4, help="Output tokens of the longest text.")] = 200,
    dtype: Dtype = "auto",
    json: Json = None,
) -> None:
    """Kill, freeze and cut off replicas and Redis while streams run: no token may be lost or changed."""
    import secrets

    from services.bench.chaos import bench_chaos

    drawn = secrets.randbits(32) if seed is None else seed
    if not bench_chaos(model, speculative_model, dtype, drawn, seconds, streams, max_tokens, json):
        raise typer.Exit(1)
