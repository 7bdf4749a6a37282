"""A service beside its Serve replica, played by coroutines; no Ray runs here."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster import serving
from cluster.serving import Serving, check_progress, outlast, ready
from services.sessions.embedded import embedded
from services.sessions.opening import opened
from services.types.errors import WealdError, invalid
from services.types.replica import Replica, ReplicaKind


async def waits(told: Callable[[int], None], stopping: asyncio.Event) -> None:
    """Serves at a port until it is to end."""
    told(7)
    await stopping.wait()


def test_a_service_is_healthy_from_its_start_to_its_end() -> None:
    async def scenario() -> None:
        service = await Serving.started(waits)
        assert service.port == 7
        service.check()
        await service.stop()
        with pytest.raises(WealdError, match="has ended"):
            service.check()

    asyncio.run(scenario())


def test_what_ends_a_service_is_told_at_its_start_and_by_its_health() -> None:
    async def refuses(told: Callable[[int], None], stopping: asyncio.Event) -> None:
        raise invalid("no such model")

    async def breaks(told: Callable[[int], None], stopping: asyncio.Event) -> None:
        told(7)
        await asyncio.sleep(0)
        raise invalid("a rank is gone")

    async def scenario() -> None:
        with pytest.raises(WealdError, match="no such model"):
            await Serving.started(refuses)
        service = await Serving.started(breaks)
        await asyncio.sleep(0.01)
        with pytest.raises(WealdError, match="a rank is gone"):
            service.check()

    asyncio.run(scenario())


def test_only_what_takes_too_long_hangs() -> None:
    check_progress("a step", None, 1.0)
    check_progress("a step", time.monotonic(), 1000.0)
    with pytest.raises(WealdError, match="a step has taken 5 s; the model hangs"):
        check_progress("a step", time.monotonic() - 5, 4.0)


def test_a_replica_waits_for_what_it_needs_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "POLL_S", 0.001)
    asked = iter([False, False, True])

    async def third() -> bool:
        return next(asked)

    async def never() -> bool:
        return False

    asyncio.run(ready(third))
    assert list(asked) == []
    monkeypatch.setattr(serving, "READY_S", 0.01)
    asyncio.run(ready(never))


@pytest.mark.parametrize(
    ("others", "lingers"),
    [("", False), ("b", True), ("a", False), ("ab", False)],
    ids=["alone", "where another target takes over", "where the same goes on", "where both are"],
)
def test_a_replica_outlasts_the_gateways_of_its_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: str, lingers: bool
) -> None:
    monkeypatch.setattr(serving, "LINGER_S", 0.75)

    async def scenario(store_url: str) -> float:
        async with opened(store_url) as store:
            for index, target in enumerate("a" + others):
                replica = Replica(ReplicaKind.DRAFT, f"{target}:{index}", target.encode(), target)
                await store.register(replica, 60.0)
            began = time.monotonic()
            await outlast(store_url, ReplicaKind.DRAFT, b"a")
            return time.monotonic() - began

    with embedded(tmp_path) as redis:
        took = asyncio.run(scenario(redis.file.as_uri()))
    assert (took >= 0.75) == lingers
