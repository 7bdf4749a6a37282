"""`weald bench calibration`: what the head's confidences are worth, as they are and as they are corrected."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from services.bench.questions import read_questions
from services.bench.report import write_json
from services.local.decoder import Step
from services.local.models import Models
from services.speculation.calibration import Band, Bin, Calibration, Reliability, observations
from services.types.configuration import DraftConfig
from services.types.sampling import SamplingParams
from services.types.session import Session

TREES = DraftConfig(levels=6, beam=10, budget=60)
"""The paper's: fixed, so that what is observed does not depend on what has been learnt."""
LOW, HIGH = 0.05, 0.95
PAPER = ((0.0, LOW, 0.04), (HIGH, 1.0, 0.98))
"""Confidences from and to, and the share accepted of them in EAGLE-2 (arXiv 2406.16858, section 3.2)."""
FEWEST = 10
"""Observations of a bin that is drawn."""
OVERALL = "overall"
_COLOURS = {"before": "tab:orange", "after": "tab:blue"}


class _Unlearnt(Calibration):
    """Of the drafter: it learns nothing, so that its confidences stay raw."""

    def observe(self, band: Band, level: int, confidence: float, accepted: bool) -> None:
        """Learn nothing."""


@dataclass(frozen=True, slots=True)
class Node:
    """A draft node that the target decided on."""

    level: int
    confidence: float
    """Raw."""
    accepted: bool


@dataclass(slots=True)
class Curves:
    """The reliability of the same nodes by their raw and by their corrected confidences."""

    before: Reliability = field(default_factory=Reliability)
    after: Reliability = field(default_factory=Reliability)

    def add(self, other: "Curves") -> None:
        """Take in all that others have seen."""
        self.before.add(other.before)
        self.after.add(other.after)

    def figures(self) -> dict[str, Any]:
        """What the table and the JSON show of them."""
        figures: dict[str, Any] = {
            "observations": round(self.before.count),
            "error_by_chance": _by_chance(self.before),
        }
        for when, curve in (("before", self.before), ("after", self.after)):
            bins = curve.bins()
            figures[when] = {
                "error": curve.error(),
                "shortfall": curve.shortfall,
                "accepted_below": _share([bin for bin in bins if bin.high <= LOW]),
                "accepted_above": _share([bin for bin in bins if bin.low >= HIGH]),
            }
        return figures


Cells = dict[tuple[float, str, int], Curves]
"""By temperature, task and level."""


def bench_calibration(
    models: Models,
    questions: Path,
    limit: int | None,
    max_tokens: int,
    temperatures: Sequence[float],
    coupled: bool,
    json_file: Path | None,
    plot: Path | None,
) -> None:
    """Answer every question at every temperature; print, write and draw how reliable confidences are.

    A confidence is corrected by what the rounds before its own have taught, other questions' among them.
    """
    tasks = read_questions(questions, limit)
    cells: Cells = {}
    calibration, trees, unlearnt = Calibration(), replace(TREES, coupled=coupled), _Unlearnt()
    settings = {
        "limit": limit,
        "max_tokens": max_tokens,
        "temperatures": list(temperatures),
        "trees": asdict(trees),
    }
    total = sum(len(prompts) for prompts in tasks.values()) * len(temperatures)
    with tqdm(total=total, unit="question", desc="bench calibration", dynamic_ncols=True) as bar:
        # The tasks by turns, as a server would meet them: none has the calibration of beginners to itself.
        for number, prompts in enumerate(zip_longest(*tasks.values())):
            for task, prompt in zip(tasks, prompts, strict=True):
                for temperature in temperatures if prompt is not None else ():
                    params = SamplingParams(max_tokens=max_tokens, temperature=temperature)
                    session = Session(f"{task}-{number}", tuple(models.chat(prompt)), params, number)
                    for step in models.decode(session, trees, unlearnt):
                        learn(calibration, cells, task, temperature, coupled, decided(step))
                    bar.update()
            if json_file:  # each time: a run cut short leaves some questions of every task
                write_json(
                    json_file, "calibration", settings, {"rows": _rows(cells), "levels": _levels(cells)}
                )
    if plot:
        draw(cells, plot)
    console = Console()
    for temperature in sorted({temperature for temperature, _, _ in cells}):
        console.print(_table(cells, temperature))
    if warning := calibration.badly_off():
        console.print(warning)


def decided(step: Step) -> list[Node]:
    """The nodes that a step of a whole tree decided on."""
    tree, outcome = step.tree, step.outcome
    if tree is None:
        return []
    # A tree is cut at the depth that the text has room for: its first nodes stood in the step.
    nodes = (1 << outcome.verified) - 1
    finished = len(outcome.tokens) == len(outcome.accepted)
    return [
        Node(tree.depths[node], tree.confidences[node], accepted)
        for node, accepted in observations(tree, nodes, outcome.accepted, finished)
    ]


def learn(
    calibration: Calibration,
    cells: Cells,
    task: str,
    temperature: float,
    coupled: bool,
    nodes: Sequence[Node],
) -> None:
    """Count one round's nodes by what the calibration makes of them, and only then teach them to it."""
    band = Band.of(temperature, coupled)
    for node, corrected in _corrected(calibration, band, nodes):
        curves = cells.setdefault((temperature, task, node.level), Curves())
        curves.before.observe(node.confidence, node.accepted)
        curves.after.observe(corrected, node.accepted)
    for node in nodes:
        calibration.observe(band, node.level, node.confidence, node.accepted)


def draw(cells: Cells, file: Path) -> None:
    """A panel for each temperature: reliability over all tasks, thin lines for each, and the paper's claim.

    The suffix of the file tells how.
    """
    temperatures = sorted({temperature for temperature, _, _ in cells})
    figure = Figure(figsize=(5.5 * len(temperatures), 5), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(temperatures), squeeze=False)[0]
    for axes, temperature in zip(panels, temperatures, strict=True):
        _panel(axes, cells, temperature)
    figure.savefig(file)


def _panel(axes: Axes, cells: Cells, temperature: float) -> None:
    axes.plot([0, 1], [0, 1], "--", color="0.6", linewidth=1, label="as sure as the target")
    for task, curves in _by_task(cells, temperature).items():
        whole = task == OVERALL
        for when, curve in (("before", curves.before), ("after", curves.after)):
            bins = [bin for bin in curve.bins() if bin.count >= FEWEST]
            axes.plot(
                [bin.confidence for bin in bins],
                [bin.accepted for bin in bins],
                ".-" if whole else "-",
                color=_COLOURS[when],
                linewidth=2 if whole else 0.6,
                alpha=1 if whole else 0.4,
                label=f"{when} correction, error {100 * curve.error():.2f} %" if whole else None,
            )
            for bin in bins if whole else ():
                axes.plot([bin.confidence] * 2, _interval(bin), color=_COLOURS[when], linewidth=1, alpha=0.6)
    for i, (low, high, share) in enumerate(PAPER):
        axes.errorbar(
            (low + high) / 2,
            share,
            xerr=(high - low) / 2,
            fmt="D",
            color="black",
            markersize=5,
            label="" if i else "EAGLE-2 paper",
        )
    axes.set_title(f"temperature {temperature:g}")
    axes.set_xlabel("confidence")
    axes.set_ylabel("share accepted")
    axes.set_aspect("equal")
    axes.legend(loc="upper left", frameon=False, fontsize="small")


def _corrected(calibration: Calibration, band: Band, nodes: Sequence[Node]) -> Iterator[tuple[Node, float]]:
    for level in sorted({node.level for node in nodes}):
        members = [node for node in nodes if node.level == level]
        raw = torch.tensor([[[node.confidence for node in members]]]).log()
        corrected = calibration.correct([band], level, raw).exp()
        yield from zip(members, corrected.flatten().tolist(), strict=True)


def _by_task(cells: Cells, temperature: float) -> dict[str, Curves]:
    """Of all levels together, by task and overall."""
    tasks: dict[str, Curves] = {}
    overall = Curves()
    for (of, task, _), curves in sorted(cells.items()):
        if of == temperature:
            tasks.setdefault(task, Curves()).add(curves)
            overall.add(curves)
    return tasks | {OVERALL: overall}


def _by_chance(curve: Reliability) -> float:
    """The error that is to be expected of so many observations even if the confidences are right."""
    spreads = (math.sqrt(bin.count * bin.confidence * (1 - bin.confidence)) for bin in curve.bins())
    return math.sqrt(2 / math.pi) * sum(spreads) / max(curve.count, 1.0)


def _interval(bin: Bin) -> tuple[float, float]:
    """Shares between which the true one lies with 95 % (Wilson's interval)."""
    n, share, z = bin.count, bin.accepted, 1.96
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return middle - half, middle + half


def _rows(cells: Cells) -> list[dict[str, Any]]:
    return [
        {"temperature": temperature, "task": task}
        | curves.figures()
        | {
            "curve_before": [asdict(bin) for bin in curves.before.bins()],
            "curve_after": [asdict(bin) for bin in curves.after.bins()],
        }
        for temperature in sorted({temperature for temperature, _, _ in cells})
        for task, curves in _by_task(cells, temperature).items()
    ]


def _levels(cells: Cells) -> list[dict[str, Any]]:
    levels: dict[tuple[float, int], Curves] = {}
    for (temperature, _, level), curves in sorted(cells.items()):
        levels.setdefault((temperature, level), Curves()).add(curves)
    return [
        {"temperature": temperature, "level": level} | curves.figures()
        for (temperature, level), curves in sorted(levels.items())
    ]


def _share(bins: Sequence[Bin]) -> float | None:
    """Share accepted of all nodes in these bins."""
    count = sum(bin.count for bin in bins)
    return sum(bin.count * bin.accepted for bin in bins) / count if count else None


def _table(cells: Cells, temperature: float) -> Table:
    title = f"temperature {temperature:g}, % before → after correction"
    table = Table(title=title, title_justify="left")
    table.add_column("task", no_wrap=True)
    for name in ("nodes", "error", "by chance", "accepted below 0.05", "accepted above 0.95"):
        table.add_column(name, justify="right")
    for task, curves in _by_task(cells, temperature).items():
        row = curves.figures()
        before, after = row["before"], row["after"]
        table.add_row(
            task,
            str(row["observations"]),
            f"{100 * before['error']:.2f} → {100 * after['error']:.2f}",
            f"{100 * row['error_by_chance']:.2f}",
            f"{_percent(before['accepted_below'])} → {_percent(after['accepted_below'])}",
            f"{_percent(before['accepted_above'])} → {_percent(after['accepted_above'])}",
        )
    return table


def _percent(share: float | None) -> str:
    return "none" if share is None else f"{100 * share:.1f}"
