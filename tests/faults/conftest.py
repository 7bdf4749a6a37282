"""Real processes on a tiny float64 model, streams over them, and the account of what became of both."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest

from services.bench.replicas import WHOLE_TREES
from services.bench.streams import Account, Stream, account, heard_all, undisturbed
from services.bench.victims import PATIENCE_S, POLL_S, Cluster, Victim, cluster, until
from services.local.models import Models, load
from services.types.messages import DraftStatus, Moved, Round
from services.types.replica import ReplicaKind
from services.types.sampling import SamplingParams
from services.types.session import Session

EXPIRY_S = 0.2
RECORDED_S = 5.0
"""The journal is written behind the streams' back."""
VOCABULARY = 15
BEGUN = 5
"""A stream has begun with so many tokens."""

Result = TypeVar("Result")


@dataclass
class Ground:
    """A cluster, and one event loop for all that tests do on it."""

    runner: asyncio.Runner
    cluster: Cluster
    models: Models
    streams: list[Stream] = field(default_factory=list)
    """All that were begun."""

    def run(self, scenario: Coroutine[Any, Any, Result]) -> Result:
        """See a scenario to its end."""
        return self.runner.run(scenario)

    def begin(self, name: str, count: int, tokens: tuple[int, int] = (150, 200)) -> list[Stream]:
        """Sessions of so many tokens each, greedy and at temperature 1 in turn, which nobody hears yet."""
        rng = random.Random(name)
        sessions = []
        for i in range(count):
            params = SamplingParams(
                max_tokens=rng.randint(*tokens), temperature=float(i % 2), ignore_eos=True
            )
            prompt = tuple(rng.randrange(VOCABULARY) for _ in range(rng.randint(3, 12)))
            sessions.append(Session(f"{name} {i}", prompt, params, rng.getrandbits(64)))
        begun = [Stream(text) for text in undisturbed(self.models, sessions)]
        self.streams += begun
        return begun

    async def hear(
        self, streams: Sequence[Stream], disturb: Callable[[], Awaitable[object]], begun: int | None = None
    ) -> list[Moved]:
        """Hear the streams to their ends; disturb once so many of them, or all, have begun. Their moves."""
        going = asyncio.Event()

        def heard(_: Round) -> None:
            if sum(stream.delivered >= BEGUN for stream in streams) >= (begun or len(streams)):
                going.set()

        callers = self.cluster.callers
        hearing = [
            asyncio.create_task(stream.hear(callers, stream.call(), heard=heard)) for stream in streams
        ]
        try:
            async with asyncio.timeout(PATIENCE_S):
                await going.wait()
                await self.settle(streams)
                await disturb()
            await heard_all(hearing, PATIENCE_S)
        finally:
            for task in hearing:
                task.cancel()
            await asyncio.gather(*hearing, return_exceptions=True)
        return [move for stream in streams for move in stream.moves]

    async def settle(self, streams: Sequence[Stream]) -> None:
        """Wait for the records of those that have ended: with its replica dies what it had yet to write."""
        for stream in streams:
            if stream.ended:
                await self.assert_recorded(stream)

    async def progress(self, streams: Sequence[Stream]) -> None:
        """Wait until each has had more tokens, or has ended."""
        had = [stream.delivered for stream in streams]
        await until(
            lambda: all(s.ended or s.delivered > n for s, n in zip(streams, had, strict=True)), PATIENCE_S
        )

    async def busiest(self, kind: ReplicaKind) -> Victim:
        """The replica of a kind that serves the most sessions, at least one."""
        victims = self.cluster.verifiers if kind is ReplicaKind.VERIFY else self.cluster.drafters
        counts = {victim: await _sessions(victim) for victim in victims if victim.running}
        victim = max(counts, key=lambda victim: counts[victim])
        assert counts[victim]
        return victim

    async def assert_whole(self, streams: Sequence[Stream]) -> None:
        """Each stream is its undisturbed text and so is its record, and no replica holds anything."""
        assert [stream.error for stream in streams if stream.error] == []
        total = account(streams)
        assert total == Account(len(streams), len(streams), sum(len(s.text.tokens) for s in streams))
        for stream in streams:
            await self.assert_recorded(stream)
        await self.cluster.vacant(PATIENCE_S)

    async def assert_recorded(self, stream: Stream) -> None:
        """The journal has the whole text and its end, so that nobody holds a lease any more."""
        async with asyncio.timeout(RECORDED_S):
            while (record := await self.cluster.store.load(stream.id)).finish is None:
                await asyncio.sleep(POLL_S)
        assert (record.session.output, record.finish) == (stream.text.tokens, stream.text.finish)

    async def heal(self) -> None:
        """Make everything run again, as a test found it."""
        for victim in self.cluster.victims:
            victim.proxy.restore()
            victim.orders.withdraw()
            if victim.frozen:
                victim.thaw()
        if not self.cluster.vault.running:
            await self.cluster.vault.start()
        for victim in self.cluster.victims:
            if not victim.running:
                await victim.start()
        await self.cluster.listed()


async def _sessions(victim: Victim) -> int:
    status = await victim.status()
    return status.running if isinstance(status, DraftStatus) else status.load.running + status.load.waiting


@pytest.fixture(scope="session")
def models(checkpoints: Any) -> Models:
    """The tiny target, for the undisturbed texts."""
    return load(str(checkpoints.target), None, speculative=False, device="cpu", dtype="float64")


@pytest.fixture(scope="module")
def limits() -> tuple[object, ...]:
    """Further arguments of the verify replicas."""
    return ()


@pytest.fixture(scope="module")
def shared_ground(
    checkpoints: Any, models: Models, limits: tuple[object, ...], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Ground]:
    """Two verify and two draft replicas and a Redis, for all tests of a module."""
    named = ("--model", checkpoints.target, "--dtype", "float64", "--kv-cache-memory", "8MiB")
    draft = (*named, "--speculative-model", checkpoints.head, *WHOLE_TREES)
    running = cluster(tmp_path_factory.mktemp("cluster"), (*named, "--expiry", EXPIRY_S, *limits), draft)
    with asyncio.Runner() as runner:
        found = runner.run(running.__aenter__())
        try:
            yield Ground(runner, found, models)
        finally:
            runner.run(running.__aexit__(None, None, None))


@pytest.fixture
def ground(shared_ground: Ground) -> Iterator[Ground]:
    """The module's cluster, made whole again after each test."""
    try:
        yield shared_ground
    finally:
        shared_ground.run(shared_ground.heal())
