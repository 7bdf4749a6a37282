"""`weald trace`: what became of a request, round by round."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from services.telemetry.file import read
from services.telemetry.names import Attribute, SpanName
from services.telemetry.pages import filled
from services.telemetry.requests import PARTS, Request, Round, requests
from services.types.errors import WealdError, invalid

COLOURS = {
    SpanName.EXTEND: "#7c3aed",
    SpanName.GROW: "#a855f7",
    SpanName.RERANK: "#d8b4fe",
    SpanName.LINK: "#f59e0b",
    SpanName.QUEUE: "#9ca3af",
    SpanName.FORWARD: "#2563eb",
    SpanName.ACCEPT: "#16a34a",
    SpanName.COMMIT: "#4ade80",
    SpanName.REPLY: "#14b8a6",
}
"""Of the parts of a round, in every picture."""
BAR = 40
"""Columns of a round's bar."""
PAGE = Path(__file__).with_name("trace.html")

trace = typer.Typer(name="trace", help="See what became of a request, round by round.", no_args_is_help=True)


@trace.command()
def show(
    what: Annotated[
        str, typer.Argument(metavar="FILE|ID", help="A trace file; or a trace, session or answer.")
    ],
    file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Where ID is looked for.", envvar="WEALD_TRACE_FILE"),
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write one self-contained page.")] = None,
    perfetto: Annotated[Path | None, typer.Option(help="Write JSON for ui.perfetto.dev.")] = None,
) -> None:
    """The latest request of a file, or the one that is named: rounds, trees, and where time went."""
    request = _found(what, file)
    text_of = texts(request)
    if html:
        html.write_text(page(request, text_of))
    if perfetto:
        perfetto.write_text(json.dumps({"traceEvents": events(request)}))
    console = Console()
    console.print(waterfall(request))
    console.print(summary(request))
    for line in happened(request):
        console.print(line)
    for written in filter(None, (html, perfetto)):
        console.print(f"written to {written}")


def _found(what: str, file: Path | None) -> Request:
    if Path(what).exists():
        return requests(read(Path(what)))[-1]
    if file is None:
        raise invalid(f"{what!r} is no file; say where it is to be looked for with --file")
    matching = [request for request in requests(read(file)) if request.named(what)]
    if not matching:
        raise invalid(f"{file} has no request whose trace, session or answer is called {what!r}")
    return matching[-1]


def texts(request: Request) -> Callable[[int], str]:
    """Token id → its text, where the trace holds tokens and their tokenizer is here."""
    models = [str(t.span.attributes[Attribute.MODEL]) for t in request.generations]
    if not models or not any(round.column(Attribute.TOKENS) for round in request.rounds):
        return str
    from services.engine.names import find_text
    from services.gateway.tokenizer import Tokenizer

    try:
        return Tokenizer.load(find_text(models[0])).text_of
    except WealdError:
        return str


def waterfall(request: Request) -> Table:
    """A line for each round: of which call, when, how long, its tree, and a bar of its parts."""
    table = Table(title=f"trace {request.id}, {len(request.processes)} processes", title_justify="left")
    for name in ("call", "round", "at ms", "ms", "nodes", "verified", "accepted"):
        table.add_column(name, justify="right")
    legend = Text.assemble(*((f"{part} ", colour) for part, colour in COLOURS.items()))
    table.add_column(legend, no_wrap=True)
    longest = max((round.wall_ns for round in request.rounds), default=1)
    for round in request.rounds:
        table.add_row(
            str(request.call(round) or ""),
            str(round.count(Attribute.ROUND)),
            f"{(round.span.begin_ns - request.begin_ns) / 1e6:.0f}",
            f"{round.wall_ns / 1e6:.1f}",
            str(round.count(Attribute.DRAFTED) or ""),
            str(round.count(Attribute.VERIFIED)),
            str(round.count(Attribute.ACCEPTED)),
            _bar(round, longest),
        )
    return table


def _bar(round: Round, longest: int) -> Text:
    """Its parts, to a scale on which the longest round fills the column."""
    bar, at, drawn = Text(), 0.0, 0
    for part, colour in COLOURS.items():
        at += round.lasted(part) * BAR / longest
        bar.append("█" * (int(at) - drawn), colour)
        drawn = int(at)
    return bar.append("·" * (int(round.wall_ns * BAR / longest) - drawn), "dim")


def summary(request: Request) -> Table:
    """Where the time of all rounds with a tree went, and the largest share of each part in any of them."""
    trees = [round for round in request.rounds if round.count(Attribute.DRAFTED)]
    table = Table(title=f"{len(trees)} rounds with a tree", title_justify="left")
    for name in ("part", "ms", "share", "at most"):
        table.add_column(name, justify="left" if name == "part" else "right")
    walls = [round.wall_ns for round in trees]
    rows = {str(part): [round.lasted(part) for round in trees] for part in PARTS}
    for name, lasted in (rows | {"left": [round.left_ns for round in trees]}).items():
        most = max((abs(ns) / max(wall, 1) for ns, wall in zip(lasted, walls, strict=True)), default=0.0)
        share = sum(lasted) / max(sum(walls), 1)
        table.add_row(name, f"{sum(lasted) / 1e6:.1f}", f"{share:.1%}", f"{most:.1%}")
    return table


def happened(request: Request) -> list[str]:
    """A line for each event, and for each span that failed."""
    lines = [
        f"{(event.at_ns - request.begin_ns) / 1e6:.0f} ms, {one.process}: {event.name} "
        + ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in event.attributes.items())
        for one, event in request.events
    ]
    failed = [one for one in request.told if one.span.error]
    return lines + [f"{one.process}: {one.span.name} failed: {one.span.error}" for one in failed]


def events(request: Request) -> list[dict[str, Any]]:
    """Spans as complete events of the Trace Event Format, a process for each that tells of them."""
    numbers = {process: number for number, process in enumerate(request.processes, 1)}
    named = [
        {"ph": "M", "name": "process_name", "pid": number, "args": {"name": process}}
        for process, number in numbers.items()
    ]
    complete = [
        {
            "ph": "X",
            "name": one.span.name,
            "cat": "weald",
            "pid": numbers[one.process],
            "tid": 1,
            "ts": one.span.begin_ns / 1e3,
            "dur": (one.span.end_ns - one.span.begin_ns) / 1e3,
            "args": {str(key): value for key, value in one.span.attributes.items()},
        }
        for one in request.told
    ]
    instant = [
        {
            "ph": "i",
            "s": "p",
            "name": event.name,
            "cat": "weald",
            "pid": numbers[one.process],
            "tid": 1,
            "ts": event.at_ns / 1e3,
            "args": {str(key): value for key, value in event.attributes.items()},
        }
        for one, event in request.events
    ]
    return [*named, *complete, *instant]


def page(request: Request, text_of: Callable[[int], str]) -> str:
    """One HTML page that needs nothing else."""
    data = {
        "trace": request.id,
        "begin": request.begin_ns,
        "processes": request.processes,
        "colours": COLOURS,
        "spans": [
            {
                "name": one.span.name,
                "process": request.processes.index(one.process),
                "begin": (one.span.begin_ns - request.begin_ns) / 1e6,
                "ms": (one.span.end_ns - one.span.begin_ns) / 1e6,
                "error": one.span.error,
                "events": [
                    {"name": event.name, "at": (event.at_ns - request.begin_ns) / 1e6}
                    for event in one.span.events
                ],
            }
            for one in request.told
        ],
        "happened": happened(request),
        "rounds": [_drawn(round, request, text_of) for round in request.rounds],
    }
    # No text may end the script that it stands in.
    return filled(PAGE, data=json.dumps(data, default=list).replace("<", "\\u003c"))


def _drawn(round: Round, request: Request, text_of: Callable[[int], str]) -> dict[str, Any]:
    tree = round.tree
    known = bool(round.column(Attribute.NODES))
    nodes = [
        {
            "text": text_of(tree.tokens[node]) if known else "",
            "parent": tree.parents[node],
            "confidence": tree.confidences[node],
            "value": tree.values[node],
            "verified": node in round.column(Attribute.STOOD),
            "accepted": node in round.column(Attribute.PATH),
        }
        for node in range(len(tree) if tree else 0)
        if tree
    ]
    return {
        "call": request.call(round),
        "number": round.count(Attribute.ROUND),
        "begin": (round.span.begin_ns - request.begin_ns) / 1e6,
        "ms": round.wall_ns / 1e6,
        "left": round.left_ns / 1e6,
        "text": "".join(text_of(token) for token in round.column(Attribute.TOKENS)),
        "parts": {part: round.lasted(part) / 1e6 for part in PARTS},
        "nodes": nodes,
    }
