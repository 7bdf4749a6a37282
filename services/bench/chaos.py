"""`weald bench chaos`: streams go on while the processes that serve them are killed, frozen and cut off."""

import asyncio
import logging
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from services.bench.questions import PROMPTS
from services.bench.replicas import WHOLE_TREES
from services.bench.report import write_json
from services.bench.stages import STAGES, Moment
from services.bench.streams import Stream, Text, account, heard_all, undisturbed
from services.bench.tiny import LETTERS, write_tiny
from services.bench.victims import PATIENCE_S, POLL_S, Cluster, Victim, cluster
from services.local.models import Models, head_of, load
from services.sessions.journal import LAST_RETRY_S
from services.sessions.store import FINISHED_S
from services.types.errors import ErrorCode, WealdError
from services.types.messages import Round
from services.types.replica import SIDES, ReplicaKind
from services.types.sampling import SEED_BITS, SamplingParams
from services.types.session import Cursor, Record, Session

TEXTS = 24
"""Different texts; sessions of other ids say them again."""
CONTEXT = 512
EXPIRY_S = 2.0
"""So long a verify replica holds what a vanished drafter had there."""
HIT_WITHIN_S = 5.0
"""A replica that does not come to a stage in this time serves nobody; another try comes later."""
FROZEN_S = 10.0
"""Longer than it takes callers and drafters to notice, which is 8 s."""
CALM_S = 120.0
"""Once nothing disturbs them any more, all streams end in this time."""
GAP_S = 3.0
"""Between two disturbances at most; half as much on the average."""
ANY = "any moment"
REDIS = "redis"
BEGUN = 8
"""Tokens that each stream has when the whole cluster is killed."""
UNWRITTEN_S = 1.0
"""What a draft replica delivered so shortly before its death may not have reached the journal; the journal
tries a store that was away anew only `LAST_RETRY_S` after its return, at the latest."""

_MOVES = {
    (ReplicaKind.VERIFY, True): "verify replica lost",
    (ReplicaKind.VERIFY, False): "verify replica drained, sessions handed over",
    (ReplicaKind.DRAFT, True): "draft replica lost",
    (ReplicaKind.DRAFT, False): "draft replica drained, sessions handed over",
}

_log = logging.getLogger(__name__)

Act = Callable[[], Awaitable[bool]]
"""A disturbance; False when it found nobody to disturb, so that it has to be tried again."""


@dataclass
class Toll:
    """What was done to the cluster."""

    kills: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By process and stage of the round."""
    others: Counter[str] = field(default_factory=Counter)
    """Freezes, drains and so on, by name."""
    outages: list[tuple[float, float]] = field(default_factory=list)
    """Seconds, when the store was away."""
    deaths: list[float] = field(default_factory=list)
    """Seconds, when a draft replica ended."""

    def missing(self) -> list[tuple[str, str]]:
        """Processes and stages that no kill has hit."""
        wanted = [(kind, stage) for kind, stages in STAGES.items() for stage in (*stages, ANY)]
        return [pair for pair in (*wanted, (REDIS, ANY)) if not self.kills[pair]]


class Chaos:
    """Disturbs a cluster while streams run on it; what it does is drawn from a seed."""

    def __init__(self, cluster: Cluster, texts: Sequence[Text], seed: int) -> None:
        """Nothing happens before `run`."""
        self.streams: list[Stream] = []
        self.toll = Toll()
        self.recoveries: Counter[str] = Counter()
        """By kind; those that streams tell of themselves are not among them."""
        self._cluster = cluster
        self._texts = texts
        self._rng = random.Random(seed)
        self._names = count()
        self._acts = self._all_acts()
        self._kinds = {name: [kind for kind in SIDES if kind in name] for name in self._acts}
        """Whom an act disturbs: of one kind one replica at a time, so that the other can serve."""
        self._bag: list[str] = []
        self._done: set[str] = set()
        self._acting: dict[asyncio.Task[bool], str] = {}
        self._fenced: Counter[str] = Counter()
        """Sessions that a draft replica lost to a later lease of another in its present life."""
        self._store_away = False
        self._calm = False

    async def run(self, streams: int, seconds: float, progress: Callable[[float], object]) -> None:
        """Let so many streams run for so long among disturbances, or longer, until each act came once.

        Raises:
            WealdError: a replica or a disturbance did not do what it should in time.
            TimeoutError: a stream did not end.
        """
        running = [asyncio.create_task(self._keep_streaming()) for _ in range(streams)]
        try:
            await self._disturb(seconds, progress)
            self._calm = True
            await heard_all(running, CALM_S)
            await self._kill_all(streams)
            await self._finish_records()
        finally:
            await _cancelled(running)

    async def orphans(self) -> list[str]:
        """What is left after the expiry: sessions or pages of replicas, and records that are not the text."""
        left = []
        await asyncio.sleep(EXPIRY_S)
        try:
            await self._cluster.vacant(PATIENCE_S)
        except TimeoutError:
            left += [victim.name for victim in self._cluster.victims if not await victim.vacant()]
        for stream in self._recent():
            record = await self._record(stream)
            if record is None:
                left += [] if self._never_known(stream) else [f"no record of {stream.id}"]
            elif (record.finish, record.session.output) != (stream.text.finish, stream.text.tokens):
                left.append(f"the record of {stream.id} with {len(record.session.output)} tokens")
        return left

    async def _keep_streaming(self) -> None:
        """One stream after another, until it is calm; one that fails has none behind it."""
        while not self._calm:
            stream = self._named(self._texts[len(self.streams) % len(self._texts)])
            self.streams.append(stream)
            without_store = False

            def heard(_: Round) -> None:
                nonlocal without_store
                without_store |= self._store_away

            await stream.hear(self._cluster.callers, stream.call(), heard=heard)
            self.recoveries["store lost"] += without_store
            if stream.error:
                return

    def _named(self, text: Text) -> Stream:
        return Stream(replace(text, session=replace(text.session, id=f"chaos-{next(self._names)}")))

    async def _disturb(self, seconds: float, progress: Callable[[float], object]) -> None:
        """Acts from shuffled bags, some at once; when time is over, only those that never came to pass."""
        begun = time.monotonic()
        try:
            while (
                (over := time.monotonic() - begun) < seconds or self._acting or self._acts.keys() - self._done
            ):
                progress(over)
                self._settle()
                if over > 2 * seconds + PATIENCE_S:
                    raise WealdError(
                        ErrorCode.DEADLINE_EXCEEDED,
                        f"these never came to pass: {', '.join(self._acts.keys() - self._done)}",
                    )
                if name := self._next(late=over > seconds):
                    _log.info("%s", name)
                    self._acting[asyncio.create_task(_awaited(self._acts[name]))] = name
                await asyncio.sleep(
                    self._rng.uniform(0.0, GAP_S if over < seconds else 0.5) if name else POLL_S
                )
        finally:
            await _cancelled(self._acting)

    def _settle(self) -> None:
        """Take note of the acts that are over. Raises what they raise."""
        for task in [task for task in self._acting if task.done()]:
            name, done = self._acting.pop(task), task.result()
            _log.info("%s: %s", name, "done" if done else "found nobody")
            if done:
                self._done.add(name)

    def _next(self, late: bool) -> str | None:
        """The name of the next act; None when none is left for now."""
        wanted = self._acts.keys() - self._done if late else self._acts.keys()
        self._bag = [name for name in self._bag if name in wanted] or self._rng.sample(
            sorted(wanted), len(wanted)
        )
        acting = set(self._acting.values())
        kinds = {kind for name in acting for kind in self._kinds[name]}
        for name in self._bag:
            if name not in acting and kinds.isdisjoint(self._kinds[name]):
                self._bag.remove(name)
                return name
        return None

    def _all_acts(self) -> dict[str, Act]:
        acts: dict[str, Act] = {"lose the store": self._lose_store, "kill draft and verify": self._kill_both}
        for kind, stages in STAGES.items():
            acts |= {f"kill {kind} at {stage}": partial(self._kill_at, kind, stage) for stage in stages}
            for name in ("kill", "freeze", "drain", "cut"):
                acts[f"{name} {kind}"] = partial(getattr(self, f"_{name}"), kind)
        return acts

    async def _kill_at(self, kind: ReplicaKind, stage: str) -> bool:
        victim = self._one(kind)
        hit = await self._hit(victim, stage)
        if hit:
            await self._restart(victim)
        return hit

    async def _kill_both(self) -> bool:
        both = [self._one(kind) for kind in SIDES]
        stages = [self._rng.choice(list(STAGES[victim.kind])) for victim in both]
        hits = await asyncio.gather(*map(self._hit, both, stages))
        self.toll.others["both sides killed at once"] += all(hits)
        for victim, hit in zip(both, hits, strict=True):
            if hit:
                await self._restart(victim)
        return all(hits)

    async def _kill(self, kind: ReplicaKind) -> bool:
        victim = self._one(kind)
        await self._reap(victim)
        await victim.kill()
        self._killed(victim, ANY)
        await self._restart(victim)
        return True

    async def _freeze(self, kind: ReplicaKind) -> bool:
        """A frozen replica is given up by the others; a draft replica that wakes up then is fenced."""
        victim = self._one(kind)
        if not await victim.freeze_at(self._rng.choice(list(STAGES[kind])), self._moment(), HIT_WITHIN_S):
            return False
        self.toll.others[f"{kind} replicas frozen"] += 1
        await asyncio.sleep(FROZEN_S)
        victim.thaw()
        await self._rest(1.0)
        return True

    async def _drain(self, kind: ReplicaKind) -> bool:
        victim = self._one(kind)
        await self._reap(victim)
        victim.drain()
        if status := await victim.ended():
            raise WealdError(ErrorCode.INTERNAL, f"{victim.name} was drained and ended with {status}")
        self.toll.others[f"{kind} replicas drained"] += 1
        self._ended(victim)
        await self._restart(victim)
        return True

    async def _cut(self, kind: ReplicaKind) -> bool:
        proxy, delay_s = self._one(kind).proxy, self._rng.uniform(0.02, 0.2)
        what = self._rng.choice(("dropped", "cut without a word", "delayed"))
        match what:
            case "dropped":
                proxy.drop()
            case "delayed":
                proxy.delay_s = delay_s
            case _:
                proxy.blackhole()
        self.toll.others[f"links to {kind} replicas {what}"] += 1
        await self._rest(2.0)
        proxy.restore()
        return True

    async def _lose_store(self) -> bool:
        self._store_away = True
        away = time.monotonic()
        await self._cluster.vault.kill()
        self.toll.kills[REDIS, ANY] += 1
        await self._rest(3.0)
        await self._cluster.vault.start()
        self._store_away = False
        self.toll.outages.append((away, time.monotonic()))
        return True

    def _one(self, kind: ReplicaKind) -> Victim:
        return self._rng.choice([victim for victim in self._cluster.victims if victim.kind is kind])

    async def _hit(self, victim: Victim, stage: str) -> bool:
        await self._reap(victim)
        hit = await victim.die_at(stage, self._moment(), HIT_WITHIN_S)
        if hit:
            self._killed(victim, stage)
        return hit

    def _killed(self, victim: Victim, stage: str) -> None:
        self.toll.kills[victim.kind, stage] += 1
        self._ended(victim)

    def _ended(self, victim: Victim) -> None:
        if victim.kind is ReplicaKind.DRAFT:
            self.toll.deaths.append(time.monotonic())
            self.recoveries["fenced"] += self._fenced.pop(victim.name, 0)

    async def _reap(self, victim: Victim) -> None:
        """Take down what a draft replica has counted, before that is lost with it."""
        if victim.kind is ReplicaKind.DRAFT:
            try:
                self._fenced[victim.name] = (await victim.status()).counters.get("fenced_sessions", 0)
            except WealdError:
                return  # its link is cut; what is counted is the least

    async def _restart(self, victim: Victim) -> None:
        await self._rest(1.0)
        await victim.start()

    async def _rest(self, most_s: float) -> None:
        await asyncio.sleep(self._rng.uniform(0.0, most_s))

    def _moment(self) -> Moment:
        return self._rng.choice(list(Moment))

    async def _kill_all(self, count: int) -> None:
        """Kill everything at once while streams run, start it again, and go on with every session's id."""
        cluster = self._cluster
        streams = [self._named(text) for text in sorted(self._texts, key=lambda t: -len(t.tokens))[:count]]
        self.streams += streams
        hearing = [asyncio.create_task(stream.hear(cluster.callers, stream.call())) for stream in streams]
        try:
            async with asyncio.timeout(PATIENCE_S):
                while any(stream.delivered < BEGUN for stream in streams):
                    await asyncio.sleep(POLL_S)
            for drafter in cluster.drafters:
                await self._reap(drafter)
            await asyncio.gather(*(victim.kill() for victim in cluster.victims), cluster.vault.kill())
        finally:
            await _cancelled(hearing)
        self.toll.others["whole clusters killed at once"] += 1
        for victim in cluster.victims:
            self._ended(victim)
        await cluster.vault.start()
        await asyncio.gather(*(victim.start() for victim in cluster.victims))
        await cluster.listed()
        await self._resume([stream for stream in streams if not stream.finished])

    async def _finish_records(self) -> None:
        """Go on with what a draft replica took to its grave unwritten, though its caller had it all."""
        left = []
        for stream in self._recent():
            record = await self._record(stream)
            if record and not record.finish and self._unwritten(stream):
                left.append(stream)
        await self._resume(left)

    async def _resume(self, streams: Sequence[Stream]) -> None:
        """Go on with sessions of which only the id is known, and how far their callers were."""
        await heard_all([asyncio.create_task(self._resume_one(stream)) for stream in streams], PATIENCE_S)

    async def _resume_one(self, stream: Stream) -> None:
        again = Stream(stream.text)
        await again.hear(self._cluster.callers, again.by_id(), Cursor.behind(stream.id, stream.output))
        stream.continued(again)
        self.recoveries["resumed by id from the journal"] += 1

    def _recent(self) -> list[Stream]:
        """Finished streams whose records have not expired."""
        oldest = time.monotonic() - FINISHED_S / 2
        return [stream for stream in self.streams if stream.finished and stream.ended > oldest]

    async def _record(self, stream: Stream) -> Record | None:
        """The record of a finished stream, whose last tokens have a moment to arrive; None without one."""
        for _ in range(20):
            try:
                record = await self._cluster.store.load(stream.id)
            except WealdError as error:
                if error.code is ErrorCode.UNKNOWN_SESSION:
                    return None
                raise
            if record.finish:
                break
            await asyncio.sleep(0.05)
        return record

    def _unwritten(self, stream: Stream) -> bool:
        """Whether a draft replica ended so soon behind a stream that the journal may lack its last tokens."""
        away = [end for start, end in self.toll.outages if start - UNWRITTEN_S < stream.ended < end]
        written = max((end + LAST_RETRY_S for end in away), default=stream.ended) + UNWRITTEN_S
        return any(stream.ended - UNWRITTEN_S < death < written for death in self.toll.deaths)

    def _never_known(self, stream: Stream) -> bool:
        """Whether a session can have come and gone, with its draft replica, while the store was away."""
        met = any(start < stream.ended and stream.begun < end for start, end in self.toll.outages)
        return met and self._unwritten(stream)


async def _awaited(act: Act) -> bool:
    return await act()


async def _cancelled(tasks: Collection[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def bench_chaos(
    model: str | None,
    head: str | None,
    dtype: str,
    seed: int,
    seconds: float,
    streams: int,
    max_tokens: int,
    json_file: Path | None,
) -> bool:
    """Disturb a cluster on this machine while so many streams run, and print what became of them.

    Args:
        model: as `checkpoints.resolve` takes it; None for a tiny random one, in float64.
        head: likewise; None for the one packaged with the model.
        dtype: as `precision` takes it.
        seed: what the disturbances are drawn from.
        seconds: how long they last, or longer until each has come once.
        streams: sessions at once.
        max_tokens: of the longest text.
        json_file: where the figures go, if anywhere.

    Returns:
        Whether every stream finished with its text, every kill came, and nothing was left behind.

    Raises:
        WealdError: something did not do what it should in time; the logs of the processes are kept then.
    """
    console = Console()
    directory = Path(tempfile.mkdtemp(prefix="weald-chaos-"))
    console.print(f"seed {seed}; the logs are in {directory} until all is well")
    if model:
        target, drafting, exact = model, head_of(model, head), dtype
    else:
        target, drafting = map(str, write_tiny(directory, CONTEXT))
        exact = "float64"
    texts = _texts(load(target, drafting, speculative=False, device="cpu", dtype=exact), seed, max_tokens)
    named = ("--model", target, "--dtype", exact, *(() if model else ("--kv-cache-memory", "16MiB")))
    verify = (*named, "--expiry", EXPIRY_S)
    draft = (*named, "--speculative-model", drafting, *WHOLE_TREES)
    with _logged(directory / "chaos.log"), _bar(seconds) as progress:
        chaos, orphans = asyncio.run(_run(directory, verify, draft, texts, seed, streams, seconds, progress))
    figures = _figures(chaos, orphans)
    if json_file:
        settings = {
            "model": model or "tiny",
            "dtype": exact,
            "seed": seed,
            "seconds": seconds,
            "streams": streams,
        }
        write_json(json_file, "chaos", settings, figures)
    console.print(_table(figures))
    for what in figures["failures"]:
        console.print(f"[red]{what}")
    if not figures["failures"]:
        shutil.rmtree(directory)
    return not figures["failures"]


async def _run(
    directory: Path,
    verify: Sequence[object],
    draft: Sequence[object],
    texts: Sequence[Text],
    seed: int,
    streams: int,
    seconds: float,
    progress: Callable[[Chaos, float], object],
) -> tuple[Chaos, list[str]]:
    async with cluster(directory, verify, draft) as running:
        chaos = Chaos(running, texts, seed)
        await chaos.run(streams, seconds, partial(progress, chaos))
        return chaos, await chaos.orphans()


def _texts(models: Models, seed: int, max_tokens: int) -> list[Text]:
    """Texts of various lengths, greedy and at temperature 1 in turn; every fourth may end by itself."""
    rng = random.Random(seed)
    sessions = []
    for i in range(TEXTS):
        # Different beginnings, so that sessions do not all go where one prefix is cached.
        name = "".join(rng.choices(LETTERS[:10], k=6))
        params = SamplingParams(
            max_tokens=rng.randint(max_tokens // 4, max_tokens),
            temperature=float(i % 2),
            ignore_eos=i % 8 < 6,
        )
        prompt = tuple(models.chat(f"{name}. {PROMPTS[i % len(PROMPTS)]}"))
        sessions.append(Session(f"text {i}", prompt, params, rng.getrandbits(SEED_BITS)))
    return undisturbed(models, sessions)


@contextmanager
def _logged(file: Path) -> Iterator[None]:
    """What this process logs goes to a file, so that it leaves the bar alone."""
    handler = logging.FileHandler(file)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    logger = logging.getLogger("services")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)
        handler.close()


@contextmanager
def _bar(seconds: float) -> Iterator[Callable[[Chaos, float], None]]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[said]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        bar = bars.add_task("bench chaos", total=seconds, said="")

        def progress(chaos: Chaos, over_s: float) -> None:
            ended = sum(stream.ended > 0 for stream in chaos.streams)
            said = f"{chaos.toll.kills.total()} kills, {ended} streams ended"
            bars.update(bar, completed=min(over_s, seconds), said=said)

        yield progress


def _figures(chaos: Chaos, orphans: Sequence[str]) -> dict[str, Any]:
    """What the table shows, and what is wrong."""
    result = account(chaos.streams)
    recoveries = Counter(dict.fromkeys(_MOVES.values(), 0))
    for stream in chaos.streams:
        recoveries.update(_MOVES[move.kind, move.lost] for move in stream.moves)
    pauses = sorted(pause for stream in chaos.streams for pause in stream.pauses)
    failures = [f"no kill of {process} at {stage}" for process, stage in chaos.toll.missing()]
    failures += [f"{stream.id}: {stream.error}" for stream in chaos.streams if stream.error]
    failures += [f"left behind: {orphan}" for orphan in orphans]
    if not result.sound:
        failures.append("not every stream is the undisturbed text")
    return {
        "kills": [
            {"process": process, "stage": stage, "kills": kills}
            for (process, stage), kills in sorted(chaos.toll.kills.items())
        ],
        "other_disturbances": dict(sorted(chaos.toll.others.items())),
        "recoveries": dict(recoveries + Counter()) | dict(chaos.recoveries),
        "streams": asdict(result),
        "pauses": len(pauses),
        "pause_p50_s": pauses[len(pauses) // 2] if pauses else None,
        "pause_p99_s": pauses[min(len(pauses) - 1, round(0.99 * len(pauses)))] if pauses else None,
        "failures": failures,
    }


def _table(figures: dict[str, Any]) -> Table:
    table = Table(title="chaos", title_justify="left", show_header=False)
    table.add_column()
    table.add_column()
    table.add_column(justify="right")
    for row in figures["kills"]:
        table.add_row(f"{row['process']} killed", row["stage"], str(row["kills"]))
    for section in ("other_disturbances", "recoveries", "streams"):
        table.add_section()
        for what, times in figures[section].items():
            table.add_row(section.replace("_", " "), what, str(times))
    table.add_section()
    for percentile in ("p50", "p99"):
        pause = figures[f"pause_{percentile}_s"]
        table.add_row("pause", percentile, "" if pause is None else f"{pause:.2f} s")
    return table
