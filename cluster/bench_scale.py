"""`weald bench scale`: load rises and falls, and each side gets the replicas that its own load asks for."""

import asyncio
import math
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import httpx
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from ray import serve
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from cluster.app import NAME
from cluster.configuration import ClusterConfig, parse
from cluster.launch import described, local
from cluster.scaling import draft_load, verify_load
from services.bench.report import write_json
from services.bench.tiny import LETTERS, write_tiny
from services.gateway.tokenizer import Tokenizer
from services.local.models import load as load_models
from services.sessions.opening import opened
from services.sessions.store import Store
from services.types.errors import WealdError
from services.types.replica import SIDES, Replica, ReplicaKind
from services.types.sampling import SamplingParams
from services.types.session import Session
from services.wire.channel import connect
from services.wire.clients import DraftClient, VerifyClient

CONTEXT = 2048
TARGET_LOAD = {ReplicaKind.DRAFT: 0.3, ReplicaKind.VERIFY: 0.7}
UP_S, DOWN_S = 2.0, 6.0
"""How long more replicas must be wanted before they come, and fewer before one goes."""
EVERY_S = 0.5
"""Between two looks at the loads."""
STEADY_S = 4.0
"""A phase ends when the replicas have been as they should for so long."""
LEAST_S, MOST_S = 10.0, 90.0
"""A phase lasts so long at least, and when the replicas do not become as they should, at most."""
LAG_S = 10.0
"""Between a load and what Serve makes of it, besides `UP_S`, at most."""
ANSWER_S = 2.0
REQUEST_S = 120.0
_COLOURS = {ReplicaKind.DRAFT: "tab:green", ReplicaKind.VERIFY: "tab:blue"}


@dataclass(frozen=True)
class Phase:
    """Callers of one kind, each with a text of its own that it asks for again and again."""

    name: str
    callers: int
    prompt: int
    """Tokens."""
    output: int
    """Tokens."""
    speculative: bool
    pause_s: float
    """Of a caller between two requests."""
    draft: int
    """Replicas that there are to be at the end."""
    verify: int


def phases(most: int) -> tuple[Phase, ...]:
    """Load that rises on one side, then on the other, then falls.

    Long prompts fill the KV pages of verify replicas, and without trees there is nothing to draft for them.
    Many short texts fill the places of draft replicas and keep their head busy; a verify replica has room.

    Args:
        most: replicas that either side comes to, 2 or 3.
    """
    return (
        _few("few callers"),
        Phase("long prompts", 3 * most - 1, 1900, 100, False, 0.0, draft=1, verify=most),
        Phase("many texts", 8 * most, 6, 100, True, 0.0, draft=most, verify=1),
        _few("few again"),
    )


def _few(name: str) -> Phase:
    return Phase(name, 2, 6, 16, True, 2.0, draft=1, verify=1)


def _config(target: Path, head: Path, most: int) -> ClusterConfig:
    """A session with a long prompt takes a quarter of the pages of a verify replica."""

    def replicas(kind: ReplicaKind) -> dict[str, Any]:
        delays = {"upscale_delay_s": UP_S, "downscale_delay_s": DOWN_S}
        return {"min": 1, "max": most, "target_load": TARGET_LOAD[kind]} | delays

    small = {"num_cpus": 0.05}
    return parse(
        {
            "model": str(target),
            "speculative_model": str(head),
            "dtype": "float64",
            "verify": {
                "kv_cache_memory": "10MiB",
                "max_num_seqs": 64,
                "resources": small,
                "replicas": replicas(ReplicaKind.VERIFY),
            },
            "draft": {
                "speculative_budget": 8,
                "speculative_eagle_topk": 3,
                "speculative_num_steps": 3,
                "kv_cache_memory": "16MiB",
                "max_num_seqs": 32,
                "resources": small,
                "replicas": replicas(ReplicaKind.DRAFT),
            },
            "gateway": {"served_model_name": "tiny", "port": 0, "resources": small},
        }
    )


@dataclass(frozen=True)
class Text:
    """A request, and what the target says to it."""

    body: Mapping[str, Any]
    text: str


def _texts(target: Path, phases: Sequence[Phase]) -> dict[Phase, list[Text]]:
    """A text for each caller, by plain decoding in this process."""
    models = load_models(str(target), None, speculative=False, device="cpu", dtype="float64")
    tokenizer, rng = Tokenizer.load(target), random.Random(0)
    made: dict[Phase, list[Text]] = {}
    for phase in phases:
        made[phase] = []
        for caller in range(phase.callers):
            prompt = "".join(rng.choices(LETTERS[:10], k=phase.prompt))
            params = SamplingParams(max_tokens=phase.output, ignore_eos=True)
            session = Session("plain", tuple(tokenizer.encode(prompt)), params, caller)
            tokens = [token for step in models.decode(session, None) for token in step.outcome.tokens]
            body = {
                "model": "tiny",
                "prompt": prompt,
                "max_tokens": phase.output,
                "ignore_eos": True,
                "seed": caller,
                "speculative": phase.speculative,
            }
            made[phase].append(Text(body, tokenizer.decode(tokens)))
    return made


@dataclass
class Answers:
    """Of one phase."""

    requests: int = 0
    failed: list[str] = field(default_factory=list)
    """Why."""
    changed: int = 0
    """Texts that are not the target's."""


class Callers:
    """Ask as long as the context lasts; at its end every answer has come."""

    def __init__(self, url: str, phase: Phase, texts: Sequence[Text]) -> None:
        self.answers = Answers()
        self._url = f"{url}/v1/completions"
        self._pause_s = phase.pause_s
        self._texts = texts
        self._leaving = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._client = httpx.AsyncClient(timeout=REQUEST_S, trust_env=False)
        self._tasks = [asyncio.create_task(self._ask(text)) for text in self._texts]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._leaving.set()
        await asyncio.gather(*self._tasks)
        await self._client.aclose()

    async def _ask(self, text: Text) -> None:
        while not self._leaving.is_set():
            self.answers.requests += 1
            try:
                response = await self._client.post(self._url, json=text.body)
                if response.is_error:
                    self.answers.failed.append(response.text)
                elif response.json()["choices"][0]["text"] != text.text:
                    self.answers.changed += 1
            except (httpx.HTTPError, KeyError, ValueError) as error:
                self.answers.failed.append(f"{type(error).__name__}: {error}")
            with suppress(TimeoutError):
                await asyncio.wait_for(self._leaving.wait(), self._pause_s)


@dataclass(frozen=True)
class Side:
    """The replicas of one kind at one moment."""

    load: float
    """Of all together; 1.0 is what one can take."""
    wanted: int
    """Replicas that run or start."""
    running: int
    """Replicas that serve and take sessions."""


Sides = dict[ReplicaKind, Side]


class Observer:
    """Asks the replicas for what their loads are made of."""

    def __init__(self, store: Store, config: ClusterConfig) -> None:
        self._store = store
        self._config = config
        self._counters: dict[str, tuple[float, Mapping[str, int]]] = {}
        """When the replica at an address was asked last, and what it had counted."""

    async def look(self) -> Sides:
        """Both sides now."""
        states = await asyncio.to_thread(serve.status)
        sides = {}
        for kind in SIDES:
            counts = states.applications[NAME].deployments[kind.capitalize()].replica_states
            listed = [one for one in await self._store.replicas(kind) if not one.draining]
            loads = await asyncio.gather(*map(self._load, listed))
            wanted = sum(count for state, count in counts.items() if state != "STOPPING")
            sides[kind] = Side(sum(loads), wanted, len(listed))
        return sides

    async def _load(self, replica: Replica) -> float:
        """As the replica itself tells Serve; 0.0 when it does not answer any more."""
        async with connect(replica.address) as channel:
            try:
                if replica.kind is ReplicaKind.DRAFT:
                    drafter = await DraftClient(channel).status(ANSWER_S)
                    seconds, drafted = self._since(replica.address, drafter.counters, ("draft_ns",))
                    busy = drafted["draft_ns"] / 1e9 / seconds
                    return draft_load(drafter.running, self._config.draft.max_num_seqs, busy)
                told = await VerifyClient(channel).status(ANSWER_S)
            except WealdError:
                return 0.0
        _, done = self._since(replica.address, told.counters, ("steps", "tokens_forwarded"))
        return verify_load(
            running=told.load.running,
            waiting=told.load.waiting,
            max_num_seqs=told.max_num_seqs,
            free_pages=told.load.free_pages,
            num_pages=told.num_pages,
            tokens_per_step=done["tokens_forwarded"] / max(done["steps"], 1),
            max_num_batched_tokens=told.max_num_batched_tokens,
        )

    def _since(
        self, address: str, counters: Mapping[str, int], names: Sequence[str]
    ) -> tuple[float, dict[str, int]]:
        """Seconds since the replica was asked last, and what it has counted meanwhile."""
        now = time.monotonic()
        then, before = self._counters.get(address, (now - EVERY_S, counters))
        self._counters[address] = now, counters
        return now - then, {name: counters.get(name, 0) - before.get(name, 0) for name in names}


@dataclass(frozen=True)
class Sample:
    """What was seen, `at` seconds from the beginning."""

    at: float
    sides: Sides


@dataclass(frozen=True)
class Course:
    """How a phase went."""

    phase: Phase
    answers: Answers
    samples: Sequence[Sample]
    """The first is of its beginning."""
    steady: bool
    """Whether the replicas became as they should."""

    def reached(self, kind: ReplicaKind) -> float | None:
        """Seconds until its replicas became as many as at the end; None when they were so all the time."""
        last = self.samples[-1].sides[kind].running
        others = [i for i, sample in enumerate(self.samples) if sample.sides[kind].running != last]
        return self.samples[others[-1] + 1].at - self.samples[0].at if others else None

    def row(self) -> dict[str, Any]:
        """For the table."""
        end = self.samples[-1].sides
        row = {
            "phase": self.phase.name,
            "callers": self.phase.callers,
            "requests": self.answers.requests,
            "failed": len(self.answers.failed),
            "changed": self.answers.changed,
        }
        for kind in SIDES:
            row |= {f"{kind}_replicas": end[kind].running, f"{kind}_after_s": self.reached(kind)}
        return row

    def problems(self) -> list[str]:
        """What did not go as it should."""
        name = self.phase.name
        found = [f"{name}: {why}" for why in self.answers.failed]
        if self.answers.changed:
            found.append(f"{name}: {self.answers.changed} texts are not the target's")
        if not self.steady:
            found.append(
                f"{name}: there were to be {self.phase.draft} draft and {self.phase.verify} verify replicas"
            )
        return found


def unasked(samples: Sequence[Sample]) -> list[str]:
    """Where replicas of one side came that its own load had not asked for at any time of the last seconds."""
    found = []
    for kind, aimed in TARGET_LOAD.items():
        for i, (before, after) in enumerate(pairwise(samples)):
            latest = [one.sides[kind].load for one in samples[: i + 2] if one.at > after.at - UP_S - LAG_S]
            if after.sides[kind].wanted > max(before.sides[kind].wanted, math.ceil(max(latest) / aimed)):
                found.append(f"{after.at:.0f} s: a {kind} replica came that its load had not asked for")
    return found


def bench_scale(most: int, json_file: Path | None, plot: Path | None) -> bool:
    """Let the load of a tiny target on a Ray of its own rise and fall.

    Args:
        most: replicas that either side comes to, 2 or 3.
        json_file: where the figures go.
        plot: where loads and replicas over time are drawn; its suffix tells how.

    Returns:
        Whether each side had the replicas that its own load asks for, and every text was the target's.

    Raises:
        WealdError: as `cluster.launch.local` does.
    """
    with tempfile.TemporaryDirectory(prefix="weald-scale-") as directory:
        target, head = write_tiny(Path(directory), CONTEXT, 4)
        texts = _texts(target, phases(most))
        with local(_config(target, head, most)) as url:
            courses = asyncio.run(_run(url, texts))
    rows, problems = [course.row() for course in courses], [why for one in courses for why in one.problems()]
    problems += unasked([sample for course in courses for sample in course.samples])
    if json_file:
        figures = {"rows": rows, "problems": problems, "samples": [_flat(one) for one in courses]}
        settings = {"phases": [asdict(phase) for phase in texts], "upscale_delay_s": UP_S}
        settings |= {"downscale_delay_s": DOWN_S, "target_load": TARGET_LOAD}
        write_json(json_file, "scale", settings, figures)
    if plot:
        draw(courses, plot)
    console = Console()
    console.print(_table(rows))
    for problem in problems:
        console.print(f"[red]{problem}")
    return not problems


def _table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title="replicas at the end of each phase", title_justify="left")
    table.add_column("phase")
    for name in ("callers", "requests", "failed", "changed", *SIDES):
        table.add_column(name, justify="right")
    for row in rows:
        counts = [str(row[name]) for name in ("callers", "requests", "failed", "changed")]
        replicas = []
        for kind in SIDES:
            after = row[f"{kind}_after_s"]
            count = str(row[f"{kind}_replicas"])
            replicas.append(count if after is None else f"{count} in {after:.0f} s")
        table.add_row(row["phase"], *counts, *replicas)
    return table


async def _run(url: str, texts: Mapping[Phase, Sequence[Text]]) -> list[Course]:
    config = await asyncio.to_thread(described)
    courses, began = [], time.monotonic()
    async with AsyncExitStack() as stack:
        observer = Observer(await stack.enter_async_context(opened(config.store)), config)
        bar = stack.enter_context(tqdm(total=len(texts), desc="bench scale", unit="phase"))
        for phase, said in texts.items():
            courses.append(await _phase(url, phase, said, observer, began, bar))
            bar.update()
    return courses


async def _phase(
    url: str, phase: Phase, texts: Sequence[Text], observer: Observer, began: float, bar: tqdm
) -> Course:
    """Until the replicas have been as they should for a while."""
    samples: list[Sample] = []
    steady_since = None
    async with Callers(url, phase, texts) as callers:
        while True:
            sides, now = await observer.look(), time.monotonic() - began
            samples.append(Sample(now, sides))
            bar.set_postfix_str(
                f"{phase.name}, " + ", ".join(f"{side.running} {kind}" for kind, side in sides.items())
            )
            right = all(side.running == side.wanted == getattr(phase, kind) for kind, side in sides.items())
            steady_since = (now if steady_since is None else steady_since) if right else None
            over = now - samples[0].at
            steady = steady_since is not None and now - steady_since >= STEADY_S
            if (steady and over >= LEAST_S) or over >= MOST_S:
                break
            await asyncio.sleep(EVERY_S)
    return Course(phase, callers.answers, samples, steady)


def _flat(course: Course) -> list[dict[str, Any]]:
    return [
        {"at_s": round(sample.at, 2)}
        | {kind: asdict(side) | {"load": round(side.load, 3)} for kind, side in sample.sides.items()}
        for sample in course.samples
    ]


def draw(courses: Sequence[Course], file: Path) -> None:
    """Loads and replicas of both sides over time, the phases shaded; the suffix of the file tells how."""
    figure = Figure(figsize=(11, 5), layout="constrained")
    FigureCanvasAgg(figure)
    samples = [sample for course in courses for sample in course.samples]
    times = [sample.at for sample in samples]
    drawn = figure.subplots(len(SIDES), 1, sharex=True)
    for kind, axes in zip(SIDES, drawn, strict=True):
        sides = [sample.sides[kind] for sample in samples]
        colour = _COLOURS[kind]
        axes.plot(
            times,
            [side.load / TARGET_LOAD[kind] for side in sides],
            color="tab:orange",
            label=f"load, as replicas\nthat are {TARGET_LOAD[kind]:.0%} full",
        )
        axes.step(times, [side.running for side in sides], where="post", color=colour, label="running")
        axes.step(times, [side.wanted for side in sides], "--", where="post", color=colour, label="wanted")
        axes.set_ylabel(f"{kind} replicas")
        axes.set_ylim(bottom=0)
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize="small")
        ends = [course.samples[0].at for course in courses[1:]] + [times[-1]]
        for i, (course, end) in enumerate(zip(courses, ends, strict=True)):
            start = course.samples[0].at
            axes.axvspan(start, end, color="0.5", alpha=0.15 * (i % 2), linewidth=0)
            if axes is drawn[0]:
                named = f"{course.phase.callers} callers:\n{course.phase.name}"
                axes.text(
                    (start + end) / 2,
                    1.02,
                    named,
                    transform=axes.get_xaxis_transform(),
                    ha="center",
                    fontsize="small",
                )
    drawn[-1].set_xlabel("seconds")
    figure.savefig(file)
