"""`weald bench load`: tokens per second of many sessions, with trees that pay, fixed trees and none."""

import asyncio
import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from services.bench.knowing import PROGRAM
from services.bench.replicas import WITHIN_S, Replica, replica, until_linked
from services.bench.report import write_json
from services.engine.checkpoints import resolve
from services.gateway.tokenizer import Tokenizer
from services.types.configuration import DraftConfig, TreeShape, sized
from services.types.messages import Call, Round
from services.types.sampling import SamplingParams
from services.wire.channel import connect
from services.wire.clients import DraftClient, VerifyClient

AUTO, PLAIN = "auto", "plain"
FIXED = {"fixed 60": DraftConfig(), "fixed static": DraftConfig(TreeShape.STATIC)}
"""The paper's trees, and those of EAGLE-1."""
MODES: Mapping[str, DraftConfig | None] = {
    AUTO: sized(TreeShape.DYNAMIC, "auto", 10, "auto"),
    **FIXED,
    PLAIN: None,
}
OFTENER, FEW = 3, 8
"""Fewer sessions than so many are measured oftener, up to so many times: short runs are noisier."""
FIRST = 4
"""Tokens after which both services have the prompt in their caches: one round with a tree."""
LEAD_IN = 16
"""Tokens of the run of auto before each one that counts: it learns what others have changed meanwhile."""
_COLOURS = dict(zip(MODES, ("tab:blue", "tab:red", "tab:orange", "tab:gray"), strict=True))


@dataclass(frozen=True, slots=True)
class Load:
    """What is measured."""

    model: str
    speculative_model: str | None
    dtype: str
    sessions: Sequence[int]
    """How many at once; each is measured."""
    max_tokens: int
    """Tokens of every answer, whatever they say."""
    repeats: int
    """At least."""
    knowing: float | None
    """How often the first child of a node is right, of a drafter that knows the texts; None: the head."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One session, seen by its caller; times are seconds of one clock."""

    began: float
    """When it was called."""
    came: Sequence[float]
    """When each round did."""
    rounds: Sequence[Round]

    @property
    def first_s(self) -> float:
        """From the call to the first token."""
        return self.came[0] - self.began

    @property
    def tokens(self) -> tuple[int, ...]:
        """All of them."""
        return tuple(token for round in self.rounds for token in round.tokens)

    @property
    def time_per_token_s(self) -> float:
        """Seconds per token after the first."""
        return (self.came[-1] - self.came[0]) / max(1, len(self.tokens) - 1)


@dataclass(frozen=True, slots=True)
class Run:
    """Sessions of one mode that began at the same time."""

    began: float
    answers: Sequence[Answer]
    counters: Mapping[str, Mapping[str, int]]
    """What the verify and the draft replica counted meanwhile."""

    @property
    def seconds(self) -> float:
        """As long as all sessions run: from the first call until an answer ends."""
        return min(answer.came[-1] for answer in self.answers) - self.began

    @property
    def tokens_per_s(self) -> float:
        """Of all sessions, as long as all run: where some are faster, fewer are left in the end."""
        rounds = (pair for answer in self.answers for pair in zip(answer.came, answer.rounds, strict=True))
        end = self.began + self.seconds
        return sum(len(round.tokens) for came, round in rounds if came <= end) / self.seconds

    def figures(self, plain: "Run") -> dict[str, Any]:
        """What the JSON has of it, beside the plain run of the same repeat."""
        return {
            "seconds": self.seconds,
            "tokens_per_s": self.tokens_per_s,
            "ratio": self.tokens_per_s / plain.tokens_per_s,
            **_figures([self]),
            "identical": _identical(self, plain),
            "answers": len(self.answers),
            "rounds": [len(answer.rounds) for answer in self.answers],
            "tree_rounds": [sum(round.verified > 1 for round in answer.rounds) for answer in self.answers],
            "counters": self.counters,
        }


def bench_load(load: Load, prompts: Sequence[str], json_file: Path | None, plot: Path | None) -> None:
    """Start a verify and a draft replica, and let so many sessions at once generate in every mode.

    Args:
        load: what is measured.
        prompts: of the sessions, over and over where they are too few.
        json_file: where the figures go.
        plot: where tokens per second by sessions are drawn; its suffix tells how.
    """
    tokenizer = Tokenizer.load(resolve(load.model))
    chats = [tuple(tokenizer.chat([{"role": "user", "content": text}])) for text in prompts]
    with (
        replica("verify", "--model", load.model, "--dtype", load.dtype, "--port", 0) as verifier,
        _drafter(load, verifier.address, chats) as drafter,
    ):
        figures = asyncio.run(_measure(load, verifier.address, drafter.address, chats))
    if json_file:
        modes = {mode: config and asdict(config) for mode, config in MODES.items()}
        write_json(json_file, "load", asdict(load) | {"lead_in": LEAD_IN, "modes": modes}, figures)
    if plot:
        draw(figures["rows"], plot)
    console = Console()
    console.print(_table(figures["rows"]))
    console.print(_summary_table(figures["summary"]))


@contextmanager
def _drafter(load: Load, verifier: str, chats: Sequence[tuple[int, ...]]) -> Iterator[Replica]:
    """The draft replica: with the head, or in its place one that knows what is said."""
    head = ("--speculative-model", load.speculative_model) if load.speculative_model else ()
    named = ("draft", "--model", load.model, *head, "--dtype", load.dtype, "--port", 0)
    with tempfile.TemporaryDirectory(prefix="weald-load-") as directory:
        with replica(*named, "--verify", verifier) as drafter:
            if load.knowing is None:
                yield drafter
                return
            texts = asyncio.run(_texts(drafter.address, chats, load.max_tokens))
        file = Path(directory) / "texts.json"
        file.write_text(json.dumps(texts))
        with replica(load.model, verifier, file, load.knowing, program=PROGRAM) as drafter:
            yield drafter


async def _texts(drafter: str, chats: Sequence[tuple[int, ...]], max_tokens: int) -> list[tuple[int, ...]]:
    """Each prompt and what is said to it: in half precision it can depend on how many rows a step has."""
    texts = []
    async with connect(drafter) as channel:
        client, different = DraftClient(channel), list(dict.fromkeys(chats))
        await until_linked(client)
        for mode in (PLAIN, *FIXED):
            calls = [_call(f"{mode} {i}", chat, max_tokens, mode) for i, chat in enumerate(different)]
            answers = await asyncio.gather(*(_generate(client, call) for call in calls))
            texts += [chat + answer.tokens for chat, answer in zip(different, answers, strict=True)]
    return list(dict.fromkeys(texts))


async def _measure(
    load: Load, verifier: str, drafter: str, chats: Sequence[tuple[int, ...]]
) -> dict[str, Any]:
    rows, summary = [], []
    async with connect(drafter) as drafts, connect(verifier) as verifies:
        callers = _Callers(DraftClient(drafts), VerifyClient(verifies), chats)
        await until_linked(callers.drafts)
        # Both services find every prompt in their caches from here on, whatever the mode.
        await callers.run("fixed 60", len(chats), 0, FIRST)
        repeats = {count: load.repeats * min(OFTENER, -(-FEW // count)) for count in load.sessions}
        with tqdm(total=sum(repeats.values()) * len(MODES), desc="bench load", unit="run") as bar:
            for count in load.sessions:
                runs: dict[str, list[Run]] = {mode: [] for mode in MODES}
                for repeat in range(repeats[count]):
                    first = repeat % len(MODES)
                    for mode in (*MODES, *MODES)[first : first + len(MODES)]:
                        if mode == AUTO:
                            await callers.run(mode, count, repeat, min(LEAD_IN, load.max_tokens))
                        runs[mode].append(await callers.run(mode, count, repeat, load.max_tokens))
                        bar.update()
                rows += [_row(count, mode, runs[mode], runs[PLAIN]) for mode in MODES]
                summary.append(_summary(count, runs))
        verify, draft = await callers.verifies.status(WITHIN_S), await callers.drafts.status(WITHIN_S)
        curves = {"verify": sorted(verify.cost.items()), "draft": sorted(draft.cost.items())}
    return {"rows": rows, "summary": summary, "cost": curves}


class _Callers:
    """Call both services, many at once."""

    def __init__(self, drafts: DraftClient, verifies: VerifyClient, chats: Sequence[tuple[int, ...]]) -> None:
        self.drafts = drafts
        self.verifies = verifies
        self._chats = chats
        self._runs = 0

    async def run(self, mode: str, count: int, repeat: int, max_tokens: int) -> Run:
        """Let so many sessions begin now, and wait for all; a repeat has the same prompts in every mode."""
        self._runs += 1
        chats = [self._chats[(repeat * count + i) % len(self._chats)] for i in range(count)]
        calls = [_call(f"load-{self._runs}-{i}", chat, max_tokens, mode) for i, chat in enumerate(chats)]
        before = await self._counters()
        began = time.perf_counter()
        answers = await asyncio.gather(*(_generate(self.drafts, call) for call in calls))
        after = await self._counters()
        counted = {side: dict(Counter(after[side]) - Counter(before[side])) for side in after}
        return Run(began, answers, counted)

    async def _counters(self) -> dict[str, Mapping[str, int]]:
        verify, draft = await self.verifies.status(WITHIN_S), await self.drafts.status(WITHIN_S)
        return {"verify": verify.counters, "draft": draft.counters}


def _call(session: str, chat: tuple[int, ...], max_tokens: int, mode: str) -> Call:
    """Of a session that neither ends early nor draws lots: all modes have the same to do."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, seed=0, ignore_eos=True)
    return Call(session, chat, (), params, mode != PLAIN, MODES[mode])


async def _generate(client: DraftClient, call: Call) -> Answer:
    began, came, rounds = time.perf_counter(), [], []
    async for event in client.generate(call):
        if isinstance(event, Round):
            came.append(time.perf_counter())
            rounds.append(event)
    return Answer(began, came, rounds)


def _row(sessions: int, mode: str, runs: Sequence[Run], plain: Sequence[Run]) -> dict[str, Any]:
    """What one mode did: of speeds the medians, of everything else all repeats together."""
    repeats = [run.figures(base) for run, base in zip(runs, plain, strict=True)]
    missed = sum(run.counters["verify"].get("missed_trees", 0) for run in runs)
    return {
        "sessions": sessions,
        "mode": mode,
        "tokens_per_s": statistics.median(figures["tokens_per_s"] for figures in repeats),
        "ratio": statistics.median(figures["ratio"] for figures in repeats),
        **_figures(runs),
        "identical": sum(figures["identical"] for figures in repeats),
        "answers": sum(figures["answers"] for figures in repeats),
        "missed_trees": missed,
        "repeats": repeats,
    }


def _figures(runs: Sequence[Run]) -> dict[str, float | None]:
    """Of the answers and rounds of some runs. A prefill's round is none that could have a tree."""
    answers = [answer for run in runs for answer in run.answers]
    rounds = [round for answer in answers for round in answer.rounds[1:]]
    trees = [round for round in rounds if round.verified > 1]
    return {
        "ms_per_token_p50": 1e3 * statistics.median(answer.time_per_token_s for answer in answers),
        "ms_to_first_p50": 1e3 * statistics.median(answer.first_s for answer in answers),
        "tau": statistics.fmean(len(round.tokens) for round in trees) if trees else None,
        "tree_share": len(trees) / len(rounds) if rounds else 0.0,
        "nodes": statistics.fmean(round.verified for round in trees) if trees else None,
        "draft_ms_p50": statistics.median(round.draft_ns for round in trees) / 1e6 if trees else None,
        "verify_ms_p50": statistics.median(round.verify_ns for round in trees) / 1e6 if trees else None,
    }


def _identical(run: Run, plain: Run) -> int:
    return sum(a.tokens == b.tokens for a, b in zip(run.answers, plain.answers, strict=True))


def _summary(sessions: int, runs: Mapping[str, Sequence[Run]]) -> dict[str, Any]:
    """Auto beside plain decoding and the best fixed trees: median of the repeats, least, most."""
    speeds = {mode: [run.tokens_per_s for run in of_mode] for mode, of_mode in runs.items()}
    best = max(FIXED, key=lambda mode: statistics.median(speeds[mode]))

    def against(other: str) -> tuple[float, float, float]:
        ratios = [a / b for a, b in zip(speeds[AUTO], speeds[other], strict=True)]
        return statistics.median(ratios), min(ratios), max(ratios)

    return {"sessions": sessions, "plain": against(PLAIN), "best_fixed": best, "fixed": against(best)}


def _table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title="through the services", title_justify="left")
    columns = ("tokens/s", "× plain", "ms/token", "first ms", "τ", "trees", "nodes", "identical", "missed")
    for name in ("sessions", "mode", *columns):
        table.add_column(name, justify="left" if name == "mode" else "right")
    for row in rows:
        table.add_row(
            str(row["sessions"]),
            row["mode"],
            f"{row['tokens_per_s']:.1f}",
            f"{row['ratio']:.2f}",
            f"{row['ms_per_token_p50']:.1f}",
            f"{row['ms_to_first_p50']:.0f}",
            "" if row["tau"] is None else f"{row['tau']:.2f}",
            f"{row['tree_share']:.0%}",
            "" if row["nodes"] is None else f"{row['nodes']:.1f}",
            f"{row['identical']}/{row['answers']}",
            str(row["missed_trees"]),
            end_section=row["mode"] == PLAIN,
        )
    return table


def _summary_table(summary: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title="auto, in tokens/s", title_justify="left")
    for name in ("sessions", "× plain", "× best fixed", "which is"):
        table.add_column(name, justify="left" if name == "which is" else "right")
    for row in summary:
        plain, fixed = ("{:.2f} ({:.2f} to {:.2f})".format(*row[against]) for against in ("plain", "fixed"))
        table.add_row(str(row["sessions"]), plain, fixed, row["best_fixed"])
    return table


def draw(rows: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Tokens per second by sessions, a line for each mode; the suffix of the file tells how."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for mode in MODES:
        points = [(row["sessions"], row["tokens_per_s"]) for row in rows if row["mode"] == mode]
        axes.plot(*zip(*points, strict=True), marker="o", label=mode, color=_COLOURS[mode])
    counts = sorted({row["sessions"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, map(str, counts))
    axes.set_xlabel("sessions")
    axes.set_ylabel("tokens/s")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    figure.savefig(file)
