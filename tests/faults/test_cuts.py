"""Replicas are frozen, links dropped, cut off or slow: the streams go on with the same text."""

import asyncio
from typing import Any

import pytest

from services.bench.stages import Moment
from services.bench.victims import PATIENCE_S, until
from services.types.replica import SIDES, ReplicaKind

pytestmark = pytest.mark.slow


def test_a_draft_replica_that_was_frozen_is_fenced_when_it_wakes_up(ground: Any) -> None:
    streams = ground.begin("frozen draft", 4)

    async def freeze() -> None:
        victim = await ground.busiest(ReplicaKind.DRAFT)
        before = (await victim.status()).counters.get("fenced_sessions", 0)
        assert await victim.freeze_at("journal", Moment.START)
        await until(lambda: all(stream.finished for stream in streams), PATIENCE_S)
        victim.thaw()
        async with asyncio.timeout(PATIENCE_S):
            while (await victim.status()).counters.get("fenced_sessions", 0) == before:
                await asyncio.sleep(0.05)

    async def scenario() -> None:
        moves = await ground.hear(streams, freeze)
        assert {(move.kind, move.lost) for move in moves} == {(ReplicaKind.DRAFT, True)}
        await ground.assert_whole(streams)

    ground.run(scenario())


def test_sessions_leave_a_frozen_verify_replica_and_nothing_of_them_stays_there(ground: Any) -> None:
    streams = ground.begin("frozen verify", 4)

    async def freeze() -> None:
        victim = await ground.busiest(ReplicaKind.VERIFY)
        assert await victim.freeze_at("forward", Moment.START)
        await until(lambda: all(stream.finished for stream in streams), PATIENCE_S)
        victim.thaw()

    async def scenario() -> None:
        moves = await ground.hear(streams, freeze)
        assert {(move.kind, move.lost) for move in moves} == {(ReplicaKind.VERIFY, True)}
        await ground.assert_whole(streams)

    ground.run(scenario())


@pytest.mark.parametrize("kind", SIDES)
def test_streams_survive_a_link_that_is_dropped_again_and_again(ground: Any, kind: ReplicaKind) -> None:
    streams = ground.begin(f"dropped {kind}", 4)

    async def drop() -> None:
        for _ in range(3):
            victim = await ground.busiest(kind)
            victim.proxy.drop()
            await ground.progress(streams)
            victim.proxy.restore()

    async def scenario() -> None:
        moves = await ground.hear(streams, drop)
        assert {(move.kind, move.lost) for move in moves} == {(kind, True)}
        await ground.assert_whole(streams)

    ground.run(scenario())


@pytest.mark.parametrize("kind", SIDES)
def test_streams_leave_a_link_that_is_cut_without_a_word(ground: Any, kind: ReplicaKind) -> None:
    streams = ground.begin(f"cut {kind}", 4)

    async def cut() -> None:
        victim = await ground.busiest(kind)
        victim.proxy.blackhole()
        await until(lambda: all(stream.finished for stream in streams), PATIENCE_S)
        victim.proxy.restore()

    async def scenario() -> None:
        moves = await ground.hear(streams, cut)
        assert {(move.kind, move.lost) for move in moves} == {(kind, True)}
        await ground.assert_whole(streams)

    ground.run(scenario())


def test_a_short_silence_of_the_links_and_slow_ones_are_waited_for(ground: Any) -> None:
    streams = ground.begin("slow", 4)
    proxies = [victim.proxy for victim in ground.cluster.victims]

    async def slow() -> None:
        for proxy in proxies:
            proxy.blackhole()
        await asyncio.sleep(0.5)
        for proxy in proxies:
            proxy.restore()
            proxy.delay_s = 0.02

    async def scenario() -> None:
        assert await ground.hear(streams, slow) == []
        await ground.assert_whole(streams)

    ground.run(scenario())
