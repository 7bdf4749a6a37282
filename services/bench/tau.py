"""`weald bench tau`: tokens per round and tokens per second of every tree shape, on the same questions."""

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from services.bench.questions import read_questions
from services.bench.report import write_json
from services.bench.stopwatch import watched
from services.local.decoder import Step
from services.local.generation import Generation, Result
from services.local.models import Models
from services.local.reference import decode_sampled
from services.speculation.calibration import Calibration
from services.speculation.coupling import Odds
from services.types.configuration import DraftConfig, TreeShape
from services.types.sampling import SamplingParams
from services.types.session import Session
from services.verify.verifier import Verifier, pages_for

STATIC_NODES = 26
"""Nodes of the fixed tree, root included; a dynamic tree of as many stands beside it."""
PLAIN, COUPLED = "plain", ", coupled"
MODES: dict[str, DraftConfig] = {
    "chain": DraftConfig(TreeShape.CHAIN),
    "static 26": DraftConfig(TreeShape.STATIC),
    "dynamic 26": DraftConfig(budget=STATIC_NODES),
    "dynamic 60": DraftConfig(budget=60),
}
REFERENCE = "p/q static 26"
"""The p/q rule on sampled candidates; it claims the distribution, not the text: nothing is compared."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer in one mode, and the seconds after its prefill."""

    result: Result
    steps: list[Step]
    head_s: float
    """Inside the head: its passes and its logits."""
    target_s: float
    """Inside the target's forward."""
    noise_s: float
    """Of drawing noise for trees."""
    total_s: float


@dataclass(slots=True)
class Tally:
    """Sums over the answers of one mode at one temperature."""

    answers: int = 0
    compared: int = 0
    identical: int = 0
    tokens: int = 0
    rounds: int = 0
    tree_rounds: int = 0
    tree_tokens: float = 0.0
    head_s: float = 0.0
    target_s: float = 0.0
    noise_s: float = 0.0
    total_s: float = 0.0
    accepted_at: list[int] = field(default_factory=list)
    """Rounds that accepted a node at depth 1, 2, …"""

    def add(self, answer: "Answer", plain: "Answer | None") -> None:
        """Count one answer; `plain` is the answer without trees, when the text must be the same."""
        self.answers += 1
        if plain is not None:
            self.compared += 1
            self.identical += answer.result.token_ids == plain.result.token_ids
        # The first token is the prefill's, in all modes alike; decoding is what differs.
        self.tokens += len(answer.result.token_ids) - 1
        self.rounds += answer.result.rounds
        self.head_s += answer.head_s
        self.target_s += answer.target_s
        self.noise_s += answer.noise_s
        self.total_s += answer.total_s
        for step in answer.steps:
            if step.outcome.verified > 1:
                self.tree_rounds += 1
                self.tree_tokens += len(step.outcome.tokens)
                for depth in range(len(step.outcome.accepted)):
                    self.accepted_at.extend([0] * (depth + 1 - len(self.accepted_at)))
                    self.accepted_at[depth] += 1

    def merge(self, other: "Tally") -> None:
        """Add another tally to this one."""
        self.accepted_at.extend([0] * (len(other.accepted_at) - len(self.accepted_at)))
        for depth, count in enumerate(other.accepted_at):
            self.accepted_at[depth] += count
        for name in self.__slots__:
            if name != "accepted_at":
                setattr(self, name, getattr(self, name) + getattr(other, name))

    def figures(self) -> dict[str, Any]:
        """What the table and the JSON show of it."""
        tau = self.tree_tokens / self.tree_rounds if self.tree_rounds else None
        return {
            "answers": self.answers,
            "identical": self.identical if self.compared else None,
            "tokens": self.tokens,
            "tau": tau,
            "tokens_per_s": self.tokens / self.total_s,
            "head_ms_per_round": 1e3 * self.head_s / max(1, self.rounds),
            "target_ms_per_round": 1e3 * self.target_s / max(1, self.rounds),
            "noise_share": self.noise_s / self.total_s,
            "other_share": 1 - (self.head_s + self.target_s) / self.total_s,
            "acceptance_by_depth": [count / max(1, self.tree_rounds) for count in self.accepted_at],
        }


Tallies = dict[tuple[float, str, str], Tally]
"""By temperature, task and mode."""


def bench_tau(
    models: Models,
    questions: Path,
    limit: int | None,
    max_tokens: int,
    temperatures: Sequence[float],
    top_p: float,
    couplings: Sequence[bool],
    modes: Sequence[str],
    json_file: Path | None,
    plot: Path | None,
) -> None:
    """Answer every question in every mode, one after the other, and print a table per temperature.

    Args:
        models: what answers.
        questions: a directory of question sets.
        limit: questions of each; None: all.
        max_tokens: of an answer.
        temperatures: at which each question is answered.
        top_p: of the answers above temperature 0.
        couplings: whether trees are coupled; above temperature 0 each mode is measured with each.
        modes: of `MODES`, besides plain decoding, and `REFERENCE`.
        json_file: where the figures go.
        plot: where τ by temperature is drawn; its suffix tells how.
    """
    tasks = read_questions(questions, limit)
    tallies: Tallies = {}
    calibrations: dict[str, Calibration] = defaultdict(Calibration)
    total = sum(len(prompts) for prompts in tasks.values()) * len(temperatures)
    with tqdm(total=total, unit="question", desc="bench tau", dynamic_ncols=True) as bar:
        # A task at a time, at all temperatures, and written each time: a run cut short leaves whole tasks.
        for task, prompts in tasks.items():
            for temperature in temperatures:
                for number, prompt in enumerate(prompts):
                    params = SamplingParams(
                        max_tokens=max_tokens, temperature=temperature, top_p=top_p if temperature else 1.0
                    )
                    session = Session(f"{task}-{number}", tuple(models.chat(prompt)), params, number)
                    answers = _answers(models, session, couplings, modes, calibrations)
                    _count(answers, session, task, tallies)
                    bar.update()
            if json_file:
                settings = {
                    "limit": limit,
                    "max_tokens": max_tokens,
                    "temperatures": list(temperatures),
                    "top_p": top_p,
                    "coupled": list(couplings),
                }
                write_json(json_file, "tau", settings, {"rows": _rows(_with_overall(tallies))})
    console = Console()
    for temperature in temperatures:
        console.print(_table(_with_overall(tallies), temperature, [*tasks, "overall"]))
    if plot:
        draw(_with_overall(tallies), plot)


def _count(answers: Iterator[tuple[str, Answer]], session: Session, task: str, tallies: Tallies) -> None:
    """Add the answers to one question in every mode, plain decoding first, to the tallies of its task."""
    plain: Answer | None = None
    for mode, answer in answers:
        plain = plain or answer
        tally = tallies.setdefault((session.params.temperature, task, mode), Tally())
        tally.add(answer, None if mode == REFERENCE else plain)


def _with_overall(tallies: Tallies) -> Tallies:
    """The tallies, and those of all tasks together."""
    overall: Tallies = {}
    for (temperature, _, mode), tally in tallies.items():
        overall.setdefault((temperature, "overall", mode), Tally()).merge(tally)
    return tallies | overall


def _rows(tallies: Tallies) -> list[dict[str, Any]]:
    return [
        {"temperature": temperature, "task": task, "mode": mode} | tally.figures()
        for (temperature, task, mode), tally in tallies.items()
    ]


def _answers(
    models: Models,
    session: Session,
    couplings: Sequence[bool],
    modes: Sequence[str],
    calibrations: Mapping[str, Calibration],
) -> Iterator[tuple[str, Answer]]:
    """The session's answer in every mode, plain decoding first."""
    sampled = session.params.temperature > 0
    yield PLAIN, _answer(models, session, models.decode(session, None))
    for mode in (mode for mode in MODES if mode in modes):
        for coupled in couplings if sampled else (False,):
            name, config = mode + COUPLED * coupled, replace(MODES[mode], coupled=coupled)
            yield name, _answer(models, session, models.decode(session, config, calibrations[name]))
    if sampled and REFERENCE in modes and models.head:
        pages = pages_for(len(session.prompt) + session.params.max_tokens)
        verifier = Verifier(models.target, num_pages=pages)
        decoding = decode_sampled(verifier, models.head, DraftConfig(TreeShape.STATIC), session)
        yield REFERENCE, _answer(models, session, decoding)


def _answer(models: Models, session: Session, decoding: Iterator[Step]) -> Answer:
    generation = Generation(models.tokenizer, session.seed)
    first = next(decoding)
    generation.add(first)
    steps = [first]
    with (
        watched(models.target, "forward") as target,
        watched(models.head, "forward", "logits") as head,
        watched(Odds, "noise") as noise,
    ):
        started = time.perf_counter()
        for step in decoding:
            generation.add(step)
            steps.append(step)
        total = time.perf_counter() - started
    return Answer(generation.result(), steps, head.seconds, target.seconds, noise.seconds, total)


def _table(tallies: Tallies, temperature: float, tasks: Sequence[str]) -> Table:
    table = Table(title=f"temperature {temperature:g}", title_justify="left")
    figures = ("τ", "tokens/s", "× plain", "identical", "head ms", "target ms", "noise", "other")
    for name in ("task", "mode", *figures):
        words = name in ("task", "mode")
        table.add_column(name, justify="left" if words else "right", no_wrap=words)
    for task in tasks:
        plain = tallies[temperature, task, PLAIN].figures()["tokens_per_s"]
        rows = {mode: t.figures() for (at, of, mode), t in tallies.items() if (at, of) == (temperature, task)}
        for mode, row in rows.items():
            table.add_row(
                task,
                mode,
                "" if row["tau"] is None else f"{row['tau']:.2f}",
                f"{row['tokens_per_s']:.1f}",
                f"{row['tokens_per_s'] / plain:.2f}",
                "" if row["identical"] is None else f"{row['identical']}/{row['answers']}",
                f"{row['head_ms_per_round']:.1f}",
                f"{row['target_ms_per_round']:.1f}",
                f"{row['noise_share']:.1%}" if row["noise_share"] else "",
                f"{row['other_share']:.1%}",
            )
        table.add_section()
    return table


def draw(tallies: Tallies, file: Path) -> None:
    """τ by temperature over all tasks, a line for each mode; at 0 coupled trees are what others are."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    figures = {(at, mode): t.figures()["tau"] for (at, task, mode), t in tallies.items() if task == "overall"}
    for mode in dict.fromkeys(mode for _, mode in figures):
        plain = mode.removesuffix(COUPLED)
        points = [(at, tau) for (at, of), tau in figures.items() if of == mode or (of == plain and not at)]
        if all(tau is not None for _, tau in points):
            axes.plot(
                *zip(*sorted(points), strict=True), "-" if COUPLED in mode else "--", marker=".", label=mode
            )
    axes.set_xlabel("temperature")
    axes.set_ylabel("τ, tokens per round")
    axes.legend(frameon=False, fontsize="small")
    figure.savefig(file)
