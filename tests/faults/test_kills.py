"""Processes end without notice, at every stage of a round: the streams go on with the same text."""

import asyncio
import random
from typing import Any

import pytest

from services.bench.stages import STAGES, Moment
from services.bench.streams import Stream
from services.bench.victims import PATIENCE_S, until
from services.types.errors import ErrorCode, WealdError
from services.types.replica import SIDES, ReplicaKind
from services.types.session import Cursor

pytestmark = pytest.mark.slow

STAGE = [(kind, stage) for kind, stages in STAGES.items() for stage in stages]


@pytest.mark.parametrize(("kind", "stage"), STAGE)
def test_streams_survive_replicas_that_die_at_a_stage_of_the_round(
    ground: Any, kind: ReplicaKind, stage: str
) -> None:
    streams = ground.begin(f"{kind} {stage}", 4, tokens=(120, 150))

    async def kill() -> None:
        for moment in Moment:
            victim = await ground.busiest(kind)
            assert await victim.die_at(stage, moment)
            await victim.start()

    async def scenario() -> None:
        moves = await ground.hear(streams, kill)
        assert {(move.kind, move.lost) for move in moves} >= {(kind, True)}
        await ground.assert_whole(streams)

    ground.run(scenario())


@pytest.mark.parametrize(("kind", "stage"), STAGE)
def test_streams_survive_both_sides_dying_at_once(ground: Any, kind: ReplicaKind, stage: str) -> None:
    streams = ground.begin(f"both {kind} {stage}", 6)

    async def kill() -> None:
        victims = [await ground.busiest(each) for each in SIDES]
        first, second = sorted(victims, key=lambda victim: victim.kind is not kind)
        assert await first.die_at(stage, random.Random(stage).choice(list(Moment)))
        await second.kill()
        await asyncio.gather(*(victim.start() for victim in victims))

    async def scenario() -> None:
        moves = await ground.hear(streams, kill)
        # Where the draft replica dies with it, nobody is left to tell of the verify replica.
        assert (ReplicaKind.DRAFT, True) in {(move.kind, move.lost) for move in moves}
        await ground.assert_whole(streams)

    ground.run(scenario())


@pytest.mark.parametrize("kind", SIDES)
def test_streams_survive_one_replica_after_the_other_dying(ground: Any, kind: ReplicaKind) -> None:
    streams = ground.begin(f"again {kind}", 4, tokens=(225, 240))

    async def kill() -> None:
        for _ in range(4):
            victim = await ground.busiest(kind)
            await victim.kill()
            await victim.start()
            await ground.progress(streams)

    async def scenario() -> None:
        moves = await ground.hear(streams, kill)
        assert len(moves) >= 4
        await ground.assert_whole(streams)

    ground.run(scenario())


@pytest.mark.parametrize("kind", SIDES)
def test_streams_wait_for_a_side_that_is_gone_altogether(ground: Any, kind: ReplicaKind) -> None:
    streams = ground.begin(f"gone {kind}", 4)
    victims = [victim for victim in ground.cluster.victims if victim.kind is kind]

    async def kill() -> None:
        await asyncio.gather(*(victim.kill() for victim in victims))
        await asyncio.sleep(1.0)
        await asyncio.gather(*(victim.start() for victim in victims))

    async def scenario() -> None:
        await ground.hear(streams, kill)
        await ground.assert_whole(streams)

    ground.run(scenario())


def test_a_stream_that_nobody_serves_in_time_ends_with_its_cursor_and_goes_on_by_it_later(
    ground: Any,
) -> None:
    (stream,) = ground.begin("in vain", 1)
    cluster = ground.cluster

    async def scenario() -> WealdError:
        hearing = asyncio.create_task(stream.hear(cluster.callers, stream.call(), within_s=3.0))
        await until(lambda: stream.delivered > 4, PATIENCE_S)
        await asyncio.gather(*(victim.kill() for victim in cluster.drafters))
        await hearing
        assert stream.error
        cursor = Cursor.behind(stream.id, stream.output)
        assert f"--resume {cursor}" in stream.error.message
        error = stream.error
        await ground.heal()
        later = Stream(stream.text)
        await later.hear(cluster.callers, later.by_id(), cursor)
        stream.continued(later)
        await ground.assert_whole([stream])
        return error

    assert ground.run(scenario()).code is ErrorCode.DEADLINE_EXCEEDED


def test_streams_go_on_without_the_store_and_the_journal_catches_up(ground: Any) -> None:
    streams = ground.begin("store", 4)
    late = ground.begin("late", 2)
    cluster = ground.cluster

    async def lose() -> None:
        await cluster.vault.kill()
        await ground.progress(streams)
        await ground.hear(late, lambda: asyncio.sleep(0))
        await cluster.vault.start()

    async def scenario() -> None:
        assert await ground.hear(streams, lose) == []
        await ground.assert_whole([*streams, *late])

    ground.run(scenario())


@pytest.mark.parametrize("kind", SIDES)
def test_streams_survive_a_replica_that_dies_while_the_store_is_away(ground: Any, kind: ReplicaKind) -> None:
    streams = ground.begin(f"store and {kind}", 4)
    cluster = ground.cluster

    async def lose() -> None:
        await cluster.vault.kill()
        victim = await ground.busiest(kind)
        await victim.kill()
        await until(lambda: all(stream.finished for stream in streams), PATIENCE_S)
        await cluster.vault.start()
        await victim.start()

    async def scenario() -> None:
        moves = await ground.hear(streams, lose)
        assert {(move.kind, move.lost) for move in moves} == {(kind, True)}
        await ground.assert_whole(streams)

    ground.run(scenario())


def test_sessions_go_on_by_their_id_alone_after_everything_died(ground: Any) -> None:
    streams = ground.begin("phoenix", 4)
    cluster = ground.cluster

    async def scenario() -> None:
        hearing = [asyncio.create_task(stream.hear(cluster.callers, stream.call())) for stream in streams]
        await until(lambda: all(stream.delivered >= 8 for stream in streams), PATIENCE_S)
        await asyncio.gather(*(victim.kill() for victim in cluster.victims), cluster.vault.kill())
        for task in hearing:
            task.cancel()
        await asyncio.gather(*hearing, return_exceptions=True)
        await ground.heal()
        for stream in streams:
            assert not stream.finished
            later = Stream(stream.text)
            await later.hear(cluster.callers, later.by_id(), Cursor.behind(stream.id, stream.output))
            stream.continued(later)
        await ground.assert_whole(streams)

    ground.run(scenario())


def test_what_a_vanished_caller_and_its_draft_replica_leave_behind_expires(ground: Any) -> None:
    streams = ground.begin("orphans", 4)

    async def scenario() -> None:
        callers = ground.cluster.callers
        hearing = [asyncio.create_task(stream.hear(callers, stream.call())) for stream in streams]
        await until(lambda: all(stream.delivered for stream in streams), PATIENCE_S)
        for victim in ground.cluster.drafters:
            await victim.kill()
        for task in hearing:
            task.cancel()
        await asyncio.gather(*hearing, return_exceptions=True)
        async with asyncio.timeout(PATIENCE_S):
            for victim in ground.cluster.verifiers:
                while not await victim.vacant():
                    await asyncio.sleep(0.05)

    ground.run(scenario())
