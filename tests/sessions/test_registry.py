"""Replicas say that they live, and others learn who does; the seconds of these tests pass at once."""

import asyncio
import selectors
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.sessions.memory import MemoryStore
from services.sessions.redis import ANSWER_S
from services.sessions.registry import DEREGISTER_WITHIN_S, HEARTBEAT_S, MISSES, TTL_S, Directory, announce
from services.types.errors import ErrorCode, WealdError
from services.types.replica import Replica, ReplicaKind

VERIFY = ReplicaKind.VERIFY
LATE_S = 0.01
"""Behind a heartbeat, so that it is certain which came first."""


class Skipping(selectors.DefaultSelector):
    """Where the event loop would wait, its time passes at once."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        assert ready or timeout is not None, "everything waits for something that never comes"
        if not ready:
            self.now_s += timeout
        return ready


def run(scenario: Coroutine[Any, Any, None]) -> None:
    def loop() -> asyncio.AbstractEventLoop:
        selector = Skipping()
        loop = asyncio.SelectorEventLoop(selector)
        loop.time = lambda: selector.now_s
        return loop

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(scenario)


class Remote(MemoryStore):
    """A store that can be lost or slow."""

    def __init__(self) -> None:
        super().__init__(clock=asyncio.get_running_loop().time)
        self.lost = False
        self.slow_s = 0.0

    async def register(self, replica: Replica, ttl_s: float) -> None:
        await self._reach()
        await super().register(replica, ttl_s)

    async def deregister(self, kind: ReplicaKind, address: str) -> None:
        await self._reach()
        await super().deregister(kind, address)

    async def replicas(self, kind: ReplicaKind) -> list[Replica]:
        await self._reach()
        return await super().replicas(kind)

    async def forget(self) -> None:
        for replica in await super().replicas(VERIFY):
            await super().deregister(VERIFY, replica.address)

    async def _reach(self) -> None:
        lost = self.lost
        await asyncio.sleep(self.slow_s)
        if lost:
            raise WealdError(ErrorCode.UNAVAILABLE, "the store is away")


def verifier(address: str, **said: Any) -> Replica:
    return Replica(VERIFY, address, b"mark", "model", **said)


@asynccontextmanager
async def task(coroutine: Coroutine[Any, Any, None]) -> AsyncIterator[asyncio.Task[None]]:
    running = asyncio.create_task(coroutine)
    try:
        yield running
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def announced(store: MemoryStore, address: str) -> Any:
    return task(announce(store, lambda: verifier(address)))


def addresses(replicas: list[Replica]) -> list[str]:
    return [replica.address for replica in replicas]


def test_a_replica_is_listed_at_once_and_as_it_says_of_itself_with_each_heartbeat() -> None:
    async def scenario() -> None:
        store, now = Remote(), verifier("a:1", sessions=3)
        async with task(announce(store, lambda: now)):
            await asyncio.sleep(LATE_S)
            assert await store.replicas(VERIFY) == [now]
            now = verifier("a:1", sessions=4, draining=True)
            await asyncio.sleep(HEARTBEAT_S)
            assert await store.replicas(VERIFY) == [now]
            assert await store.replicas(ReplicaKind.DRAFT) == []

    run(scenario())


def test_a_replica_that_ends_is_listed_no_longer_and_others_stay() -> None:
    async def scenario() -> None:
        store = Remote()
        async with announced(store, "a:1"):
            async with announced(store, "b:1"):
                await asyncio.sleep(LATE_S)
                assert addresses(await store.replicas(VERIFY)) == ["a:1", "b:1"]
            assert addresses(await store.replicas(VERIFY)) == ["a:1"]

    run(scenario())


def test_a_replica_that_is_killed_drops_out_after_its_time_and_others_stay() -> None:
    async def scenario() -> None:
        store, killed = Remote(), verifier("b:1")
        async with announced(store, "a:1"):
            await store.register(killed, TTL_S)
            await asyncio.sleep(TTL_S - LATE_S)
            assert addresses(await store.replicas(VERIFY)) == ["a:1", "b:1"]
            await asyncio.sleep(2 * LATE_S)
            assert addresses(await store.replicas(VERIFY)) == ["a:1"]

    run(scenario())


def test_several_heartbeats_may_be_late() -> None:
    async def scenario() -> None:
        store = Remote()
        async with announced(store, "a:1"):
            await asyncio.sleep(LATE_S)
            store.slow_s = 3 * HEARTBEAT_S
            for _ in range(10):
                await asyncio.sleep(HEARTBEAT_S)
                assert addresses(await MemoryStore.replicas(store, VERIFY)) == ["a:1"]

    run(scenario())


@pytest.mark.parametrize("trouble", [{"slow_s": 1e6}, {"lost": True}])
def test_the_end_of_a_replica_does_not_wait_for_a_lost_store(trouble: dict[str, Any]) -> None:
    async def scenario() -> None:
        store, now = Remote(), asyncio.get_running_loop().time
        async with announced(store, "a:1") as running:
            await asyncio.sleep(LATE_S)
            vars(store).update(trouble)
            ending = now()
        assert running.cancelled()
        assert now() - ending <= DEREGISTER_WITHIN_S

    run(scenario())


def test_a_lost_store_and_its_return_are_told_once_by_each_who_asks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        store = Remote()
        directory = Directory(store, VERIFY)
        async with announced(store, "a:1"), task(directory.run()):
            for store.lost in (True, False, True, False):
                await asyncio.sleep(20 * HEARTBEAT_S)

    run(scenario())
    assert Counter(message.split(";")[0] for message in caplog.messages) == {
        "cannot register with the store": 2,
        "cannot look for verify replicas in the store": 2,
        "the store is back": 4,
    }


def test_a_directory_tells_after_each_answer_who_lives() -> None:
    async def scenario() -> None:
        store, told = Remote(), list[list[str]]()
        directory = Directory(store, VERIFY, lambda replicas: told.append(addresses(replicas)))
        async with task(directory.run()), announced(store, "b:1"):
            await asyncio.sleep(HEARTBEAT_S + LATE_S)
            assert told == [[], ["b:1"]]
            async with announced(store, "a:1"):
                await asyncio.sleep(HEARTBEAT_S)
                assert told[2:] == [["a:1", "b:1"]]
                assert addresses(directory.replicas) == told[-1]

    run(scenario())


def test_a_directory_lists_a_replica_that_is_gone_no_longer_than_it_takes_to_be_sure() -> None:
    async def scenario() -> None:
        store = Remote()
        directory = Directory(store, VERIFY)
        async with announced(store, "a:1"), task(directory.run()):
            async with announced(store, "b:1"):
                await asyncio.sleep(HEARTBEAT_S + LATE_S)
            assert addresses(directory.replicas) == ["a:1", "b:1"]
            await asyncio.sleep(MISSES * HEARTBEAT_S)
            assert addresses(directory.replicas) == ["a:1"]
            async with announced(store, "b:1"):
                await asyncio.sleep(HEARTBEAT_S)
                assert addresses(directory.replicas) == ["a:1", "b:1"]

    run(scenario())


def test_while_the_store_is_lost_the_last_list_stands() -> None:
    async def scenario() -> None:
        store = Remote()
        directory = Directory(store, VERIFY)
        async with announced(store, "a:1"), task(directory.run()):
            await asyncio.sleep(HEARTBEAT_S + LATE_S)
            store.lost = True
            await asyncio.sleep(100 * TTL_S)
            assert addresses(directory.replicas) == ["a:1"]

    run(scenario())


@given(
    away_s=st.floats(0, 3 * TTL_S), phases_s=st.tuples(*[st.floats(0, HEARTBEAT_S)] * 2), hangs=st.booleans()
)
def test_a_store_that_comes_back_empty_takes_no_living_replica_from_the_list(
    away_s: float, phases_s: tuple[float, float], hangs: bool
) -> None:
    async def scenario() -> None:
        store, told = Remote(), list[list[str]]()
        directory = Directory(store, VERIFY, lambda replicas: told.append(addresses(replicas)))
        async with announced(store, "a:1"):
            await asyncio.sleep(phases_s[0])
            async with announced(store, "b:1"):
                await asyncio.sleep(phases_s[1])
                async with task(directory.run()):
                    await asyncio.sleep(HEARTBEAT_S + LATE_S)
                    told.clear()
                    store.lost, store.slow_s = True, ANSWER_S if hangs else 0
                    await asyncio.sleep(away_s)
                    await store.forget()
                    store.lost, store.slow_s = False, 0
                    await asyncio.sleep(10 * TTL_S)
        assert told
        assert all(each == ["a:1", "b:1"] for each in told)

    run(scenario())


def test_who_needs_a_replica_waits_for_the_first_answer_and_no_longer() -> None:
    async def scenario() -> None:
        store = Remote()
        directory = Directory(store, VERIFY)
        store.lost = True
        async with task(directory.run()), announced(store, "a:1"):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(directory.first(), 10 * HEARTBEAT_S)
            store.lost = False
            assert await directory.first() == directory.replicas
            store.lost = True
            await asyncio.sleep(2 * HEARTBEAT_S)
            assert await directory.first() == directory.replicas

    run(scenario())
