"""Replicas that drain hand over what they have, and those that are full are waited for."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from services.bench.streams import Stream
from services.types.errors import ErrorCode
from services.types.replica import SIDES, ReplicaKind

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def limits() -> tuple[object, ...]:
    """A verify replica takes two sessions and lets two wait."""
    return "--max-num-seqs", 2, "--max-waiting", 2


@pytest.mark.parametrize("kind", SIDES)
def test_a_draining_replica_hands_over_its_sessions_and_ends(ground: Any, kind: ReplicaKind) -> None:
    streams = ground.begin(f"drained {kind}", 3)

    async def drain() -> None:
        victim = await ground.busiest(kind)
        victim.drain()
        assert await victim.ended() == 0
        assert not all(stream.ended for stream in streams)
        await victim.start()

    async def scenario() -> None:
        moves = await ground.hear(streams, drain)
        assert {(move.kind, move.lost) for move in moves} == {(kind, False)}
        await ground.assert_whole(streams)

    ground.run(scenario())


@pytest.mark.parametrize("kind", SIDES)
def test_a_draining_replica_that_is_the_last_one_finishes_its_sessions(
    ground: Any, kind: ReplicaKind
) -> None:
    streams = ground.begin(f"last {kind}", 3)

    async def drain() -> None:
        victim = await ground.busiest(kind)
        (other,) = [v for v in ground.cluster.victims if v.kind is kind and v is not victim]
        await other.kill()
        await ground.progress(streams)
        victim.drain()
        assert await victim.ended() == 0
        assert all(stream.ended for stream in streams)

    async def scenario() -> None:
        await ground.hear(streams, drain)
        await ground.assert_whole(streams)

    ground.run(scenario())


def test_sessions_that_have_begun_wait_where_the_queue_is_full_and_new_ones_may_be_refused(
    ground: Any,
) -> None:
    streams = ground.begin("full", 7)

    async def kill() -> None:
        victim = await ground.busiest(ReplicaKind.VERIFY)
        await victim.kill()

    async def scenario() -> None:
        moves = await ground.hear(streams, kill, begun=4)
        assert ReplicaKind.VERIFY in {move.kind for move in moves}
        await assert_served_or_refused(ground, streams)

    ground.run(scenario())


def test_a_full_queue_loses_nothing_when_both_sides_die(ground: Any) -> None:
    streams = ground.begin("full on both sides", 6)

    async def kill() -> None:
        victims = [await ground.busiest(kind) for kind in SIDES]
        await asyncio.gather(*(victim.kill() for victim in victims))
        await asyncio.gather(*(victim.start() for victim in victims))

    async def scenario() -> None:
        await ground.hear(streams, kill, begun=4)
        await assert_served_or_refused(ground, streams)

    ground.run(scenario())


async def assert_served_or_refused(ground: Any, streams: Sequence[Stream]) -> None:
    """Only what had not begun has been refused; the rest is whole."""
    refused = [stream for stream in streams if stream.error]
    assert {(s.error.code, s.delivered) for s in refused if s.error} <= {(ErrorCode.RESOURCE_EXHAUSTED, 0)}
    assert len(refused) < len(streams) / 2
    await ground.assert_whole([stream for stream in streams if stream not in refused])
