"""`weald simulate`: goodput and latency of both services at loads and on machines that are not at hand."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, Literal, cast

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from tqdm import tqdm

from services.bench.load import MODES as MEASURED
from services.bench.machines import Linear, Machine, OnPaper, fitted
from services.bench.paper import SERVED, plan
from services.bench.report import figures_table, write_json
from services.bench.rounds import COVERAGE
from services.bench.traces import PACKAGED, Guess, Trace, drawn, read
from services.bench.virtual import Job, Ledger, Setting, expanded, simulate
from services.types.configuration import DraftConfig, TreeShape, VerifyLimits, sized
from services.types.errors import invalid

Shape = Literal["smollm2", "8b", "70b"]
SHAPES: tuple[Shape, ...] = ("smollm2", "8b", "70b")
Source = Literal["recorded", "published"]
TWO_CORES = Linear(step_s=(35e-3, 2.8e-3, 9.7e-3), pass_s=(4e-3, 0.15e-3, 0.4e-3), link_s=1.2e-3, shared=True)
"""SmolLM2-135M in float32 where both services share two cores."""
DRAFT_CARD = "a small GPU"
"""What drafts for the GPU shapes, by the plan of `weald bench paper`."""
POSITIONS = 4096
"""Of a trace that is drawn."""
ENOUGH = 0.98
"""So much of the goodput of many draft replicas is to be had with those that are needed."""
MOST_DRAFTERS = 16
TURNS = 4
"""Jobs that follow each other at a time; the first and the last are not counted."""
LEAST_JOBS = 24
REPEATS = 5
"""Of a measured run, each with other answers."""
LATER_S = 1e4
"""When what is measured begins: after the lead-in."""
MANY = 1 << 30
AUTO = "auto"
_COLOURS = {AUTO: "tab:blue", "static": "tab:green", "plain": "tab:gray"}


@dataclass(frozen=True, slots=True)
class Hardware:
    """A shape with all that is needed to simulate it."""

    name: Shape
    machine: Machine
    guesses: Mapping[TreeShape, Sequence[Guess]]
    modes: Mapping[str, DraftConfig | None]
    limits: VerifyLimits


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked of it."""

    prompt: int
    """Tokens of a prompt, on average: lengths are even between half and one and a half times as many."""
    output: int
    """Tokens of an answer, likewise."""
    rate: float | None
    """Sessions that arrive in a second, by chance (Poisson); None: each begins when one before it ends."""
    seed: int


def hardware(shape: Shape, source: Source, traces: Path, load: Load, most: int) -> Hardware:
    """What a shape is made of.

    Args:
        shape: name of it.
        source: of the trees: SmolLM2's own, or drawn from the τ that is published for the target.
        traces: file of recorded ones.
        load: for the length of contexts.
        most: sessions at once.

    Raises:
        WealdError: `INVALID_ARGUMENT` when the file holds no traces, or nothing is published of the target.
    """
    budget, machine, drew = 60, cast(Machine, TWO_CORES), None
    tokens = 2048
    if shape != "smollm2":
        served = SERVED[0] if shape == "8b" else SERVED[1]
        planned = plan(served, load.prompt + load.output // 2)
        choice = planned.chosen[DRAFT_CARD]
        machine, budget, tokens = OnPaper(planned, choice), served.budget, 1 << 14
        if source == "published":
            drew = drawn(served.tau, served.budget, COVERAGE[choice.vocabulary], POSITIONS, load.seed)
    elif source == "published":
        raise invalid("nothing is published of SmolLM2's head; simulate it with --trees recorded")
    answers = [drew] if drew else read(traces)
    limits = VerifyLimits(max(tokens, most), most, MANY)
    return Hardware(shape, machine, _joined(answers), modes(budget), limits)


def modes(budget: int) -> dict[str, DraftConfig | None]:
    """What is compared, by name: the product's own choice, the paper's tree, EAGLE-1's, and none."""
    return {
        AUTO: sized(TreeShape.DYNAMIC, "auto", 10, "auto"),
        f"fixed {budget}": DraftConfig(budget=budget),
        "static": DraftConfig(shape=TreeShape.STATIC),
        "plain": None,
    }


def _joined(answers: Sequence[Trace], temperature: float = 0.0) -> dict[TreeShape, list[Guess]]:
    """The positions of all answers at a temperature, one after the other."""
    return {
        shape: [g for a in answers if a.temperature == temperature for g in a.guesses[shape]]
        for shape in (TreeShape.DYNAMIC, TreeShape.STATIC)
    }


def jobs(load: Load, guesses: Sequence[Guess], count: int) -> list[Job]:
    """So many jobs, the same for every mode."""
    rng, now, made = Random(load.seed), 0.0, []
    for _ in range(count):
        if load.rate is not None:
            now += rng.expovariate(load.rate)
        prompt, output = (rng.randint(-(-mean // 2), mean + mean // 2) for mean in (load.prompt, load.output))
        start = rng.randrange(len(guesses))
        made.append(Job(prompt, max(2, output), guesses, start, None if load.rate is None else now))
    return made


def measure(
    shape: Hardware, mode: str, load: Load, sessions: int, setting: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Simulate one mode at one load; figures of the time in which as many sessions run as are to."""
    config = shape.modes[mode]
    kind = config.shape if config else TreeShape.DYNAMIC
    count = max(TURNS * sessions, LEAST_JOBS)
    made = jobs(load, shape.guesses[kind], count)
    run = Setting(shape.machine, config, shape.limits, **(setting or {}))
    ledger = simulate(run, made, sessions)
    ends = sorted(served.ended for served in ledger.served)
    began = sorted(served.began for served in ledger.served)
    # What comes before the first have made room, and after the last has begun, is not the load asked for.
    window = (
        (ends[min(sessions, count // TURNS) - 1], began[-1])
        if load.rate is None
        else (began[count // TURNS], began[-1])
    )
    return {"sessions": sessions, "mode": mode} | figures(ledger, window, run)


def figures(ledger: Ledger, window: tuple[float, float], run: Setting) -> dict[str, Any]:
    """What the table and the JSON show of a simulation between two times."""
    since, until = window
    seconds = until - since
    tokens = sum(n for at, n in ledger.tokens if since < at <= until)
    done = [served for served in ledger.served if since < served.ended <= until]
    per_token = [1e3 * served.time_per_token for served in done]
    first = [1e3 * (served.first - served.began) for served in done]
    rounds = [one for served in done for one in served.rounds]
    trees = [(nodes, accepted) for _, nodes, accepted in rounds if nodes]
    return {
        "tokens_per_s": tokens / seconds,
        "ms_per_token_p50": float(np.percentile(per_token, 50)),
        "ms_per_token_p99": float(np.percentile(per_token, 99)),
        "ms_to_first_p50": float(np.percentile(first, 50)),
        "ms_to_first_p99": float(np.percentile(first, 99)),
        "verify_busy": _busy(ledger.verifying, window) / run.verifiers,
        "draft_busy": _busy(ledger.drafting, window) / run.drafters,
        "with_trees": len(trees) / len(rounds) if rounds else 0.0,
        "tau": 1 + float(np.mean([accepted for _, accepted in trees])) if trees else None,
        "nodes": 1 + float(np.mean([nodes for nodes, _ in trees])) if trees else None,
    }


def _busy(log: Sequence[tuple[float, float]], window: tuple[float, float]) -> float:
    since, until = window
    return sum(max(0.0, min(end, until) - max(start, since)) for start, end in log) / (until - since)


def needed(shape: Hardware, load: Load, sessions: int, bar: Any) -> dict[str, Any]:
    """The fewest draft replicas with which one verify replica is about as good as with many."""
    rates: dict[int, float] = {}

    @cache
    def rate(drafters: int) -> float:
        found = measure(shape, AUTO, load, sessions, {"drafters": drafters})
        rates[drafters] = found["tokens_per_s"]
        bar.update()
        return rates[drafters]

    most = min(MOST_DRAFTERS, sessions)
    tried = [n for n in (1, 2, 3, 4, 6, 8, 12) if n < most]
    enough = next((n for n in tried if rate(n) >= ENOUGH * rate(most)), most)
    return {
        "sessions": sessions,
        "draft_replicas": enough,
        "tokens_per_s": rate(enough),
        "with_one": rate(1),
        "with_many": rate(most),
    }


def run_shape(
    shape: Hardware, load: Load, sessions: Sequence[int], setting: Mapping[str, Any]
) -> dict[str, Any]:
    """Every mode at every number of sessions, and how many draft replicas are needed."""
    total = len(sessions) * len(shape.modes)
    with tqdm(total=total, desc=f"simulate {shape.name}", unit="run") as bar:
        rows = []
        for count in sessions:
            for mode in shape.modes:
                rows.append(measure(shape, mode, load, count, setting))
                bar.update()
    for row in rows:
        same = {
            other["mode"]: other["tokens_per_s"] for other in rows if other["sessions"] == row["sessions"]
        }
        row["ratio"] = row["tokens_per_s"] / same["plain"]
    return {"rows": rows}


def bench_simulate(
    shapes: Sequence[Shape],
    source: Source,
    traces: Path | None,
    load: Load,
    sessions: Sequence[int],
    replicas: Mapping[str, int],
    measured: Path | None,
    json_file: Path | None,
    plots: Path | None,
) -> None:
    """Simulate shapes, print a table of each, write all figures, draw them."""
    console, found = Console(), dict[str, Any]()
    file = traces or PACKAGED
    for name in shapes:
        shape = hardware(name, source if name != "smollm2" else "recorded", file, load, max(sessions))
        found[name] = run_shape(shape, load, sessions, replicas)
        console.print(_table(name, found[name]["rows"]))
        if name != "smollm2" and replicas["verifiers"] == 1:
            with tqdm(desc=f"draft replicas for {name}", unit="run") as bar:
                found[name]["draft_replicas"] = [needed(shape, load, count, bar) for count in sessions]
            console.print(
                figures_table(f"draft replicas for one verify replica, {name}", found[name]["draft_replicas"])
            )
        if plots:
            draw(name, found[name]["rows"], plots / f"simulate-{name}.svg")
    if measured:
        found["reproduced"] = reproduce(measured, file)
        console.print(_reproduced(found["reproduced"]))
    if json_file:
        write_json(json_file, "simulate", asdict(load) | dict(replicas) | {"trees": source}, found)


def reproduce(file: Path, traces: Path) -> dict[str, Any]:
    """The load curve that `weald bench load` has measured, simulated: how far off it is.

    What a target step and a head pass take is fitted to what the same file says of these; who waits for whom,
    what is drafted and how much of it is accepted is simulated.

    Raises:
        WealdError: `INVALID_ARGUMENT` when the file is none of `weald bench load`.
    """
    record = json.loads(file.read_text())
    if record.get("benchmark") != "load" or "lead_in" not in record["settings"]:
        raise invalid(f"{file} is not of weald bench load; name the JSON that it has written")
    rows, settings = record["rows"], record["settings"]
    machine = calibrated(rows)
    guesses, compared = _joined(read(traces)), []
    for row in tqdm(rows, desc="reproduce", unit="run"):
        simulated = float(np.median([_again(row, settings, machine, guesses, i) for i in range(REPEATS)]))
        compared.append(
            {
                "sessions": row["sessions"],
                "mode": row["mode"],
                "measured": row["tokens_per_s"],
                "simulated": simulated,
                "error": simulated / row["tokens_per_s"] - 1,
            }
        )
    errors = [abs(row["error"]) for row in compared]
    return {
        "machine": asdict(machine),
        "mean_error": float(np.mean(errors)),
        "worst_error": max(errors),
        "rows": compared,
    }


def calibrated(rows: Sequence[Mapping[str, Any]]) -> Linear:
    """The machine of a measured load.

    Args:
        rows: of `weald bench load`.
    """
    steps, step_s, passes, pass_s = [], [], [], []
    for row in rows:
        config = MEASURED[row["mode"]]
        for repeat in row["repeats"]:
            counters = repeat["counters"]["verify"]
            rounds = counters.get("plain_steps", 0) + counters.get("trees_verified", 0)
            steps.append((counters["steps"], counters["tokens_forwarded"], rounds))
            step_s.append(counters["step_ns"] / 1e9)
        if config and not config.adaptive_levels:
            # Each session brings about τ entries, and what its tree expands.
            nodes = [row["tau"], *expanded(config)]
            passes.append((len(nodes), sum(nodes) * row["sessions"], len(nodes) * row["sessions"]))
            pass_s.append(row["draft_ms_p50"] / 1e3)
    step, node, seat = fitted(steps, step_s)
    itself, entry, each = fitted(passes, pass_s)
    return replace(TWO_CORES, step_s=(step, node, seat), pass_s=(itself, entry, each))


def _again(
    row: Mapping[str, Any],
    settings: Mapping[str, Any],
    machine: Machine,
    guesses: Mapping[TreeShape, Sequence[Guess]],
    seed: int,
) -> float:
    """Tokens per second of a measured run, simulated: sessions that begin together, behind a lead-in."""
    config, rng, sessions = MEASURED[row["mode"]], Random(seed), int(row["sessions"])
    positions = guesses[config.shape if config else TreeShape.DYNAMIC]
    prefilled = sum(repeat["counters"]["verify"].get("tokens_prefilled", 0) for repeat in row["repeats"])
    prompt = max(1, round(prefilled / row["answers"]))
    made = [
        Job(prompt, tokens, positions, rng.randrange(len(positions)), arrival)
        for tokens, arrival in ((settings["lead_in"], 0.0), (settings["max_tokens"], LATER_S))
        for _ in range(sessions)
    ]
    ledger = simulate(Setting(machine, config, VerifyLimits(max_waiting=MANY)), made)
    end = min(served.ended for served in ledger.served[sessions:])
    return sum(n for at, n in ledger.tokens if LATER_S < at <= end) / (end - LATER_S)


def _reproduced(found: Mapping[str, Any]) -> Any:
    title = (
        f"measured and simulated tokens/s: off by {found['mean_error']:.1%} on average, "
        f"{found['worst_error']:.1%} at most"
    )
    return figures_table(title, found["rows"])


def _table(name: str, rows: Sequence[dict[str, Any]]) -> Any:
    shown = [
        {
            "S": row["sessions"],
            "mode": row["mode"],
            "tokens/s": f"{row['tokens_per_s']:.0f}",
            "×": f"{row['ratio']:.2f}",
            "p50": f"{row['ms_per_token_p50']:.1f}",
            "p99": f"{row['ms_per_token_p99']:.1f}",
            "first": f"{row['ms_to_first_p50']:.0f}",
            "verify": f"{row['verify_busy']:.0%}",
            "draft": f"{row['draft_busy']:.0%}",
            "trees": f"{row['with_trees']:.0%}",
            "τ": "" if row["tau"] is None else f"{row['tau']:.2f}",
            "nodes": "" if row["nodes"] is None else f"{row['nodes']:.0f}",
        }
        for row in rows
    ]
    title = (
        f"{name}: S sessions; × plain; ms per token and to the first; share of time busy; rounds with trees"
    )
    return figures_table(title, shown)


def draw(name: str, rows: Sequence[dict[str, Any]], file: Path) -> None:
    """Goodput, time per token and utilisation against sessions; the suffix of the file tells how."""
    figure = Figure(figsize=(15, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    left, middle, right = figure.subplots(1, 3)
    for mode, chosen in _by_mode(rows):
        colour = _COLOURS.get(mode, "tab:orange")
        sessions = [row["sessions"] for row in chosen]
        left.plot(sessions, [row["tokens_per_s"] for row in chosen], ".-", color=colour, label=mode)
        middle.plot(sessions, [row["ms_per_token_p50"] for row in chosen], ".-", color=colour, label=mode)
        right.plot(
            sessions, [row["verify_busy"] for row in chosen], ".-", color=colour, label=f"verify, {mode}"
        )
        if mode != "plain":
            right.plot(
                sessions, [row["draft_busy"] for row in chosen], ".--", color=colour, label=f"draft, {mode}"
            )
    _labelled(left, "tokens/s", log=True)
    _labelled(middle, "ms per token, median", log=True)
    _labelled(right, "share of time computing", log=False)
    left.set_title(name)
    figure.savefig(file)


def _by_mode(rows: Sequence[dict[str, Any]]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    for mode in dict.fromkeys(row["mode"] for row in rows):
        yield mode, [row for row in rows if row["mode"] == mode]


def _labelled(axes: Axes, what: str, log: bool) -> None:
    axes.set_xscale("log", base=2)
    if log:
        axes.set_yscale("log")
    else:
        axes.set_ylim(0, 1.05)
    axes.set_xlabel("sessions at once")
    axes.set_ylabel(what)
    axes.legend(frameon=False, fontsize="small")
