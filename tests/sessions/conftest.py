"""Stores of both kinds, with nothing in them, and the real Redis behind one of them."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from redis import Redis

from services.sessions.embedded import EmbeddedRedis, embedded
from services.sessions.memory import MemoryStore
from services.sessions.redis import RedisStore
from services.sessions.store import FINISHED_S, UNFINISHED_S, Store
from services.types.sampling import SamplingParams
from services.types.session import MOVES, FinishReason, Record, Session


@dataclass(frozen=True)
class Stores:
    """One kind of store, and its time."""

    opened: Callable[..., AbstractAsyncContextManager[Store]]
    """`opened(unfinished_s=…, finished_s=…)`."""
    pass_time: Callable[[float], Awaitable[None]]
    """Until so many seconds have passed."""


@asynccontextmanager
async def in_redis(
    url: str, unfinished_s: float = UNFINISHED_S, finished_s: float = FINISHED_S
) -> AsyncIterator[Store]:
    """A store in Redis, closed at the end."""
    store = RedisStore(url, unfinished_s, finished_s)
    try:
        yield store
    finally:
        await store.close()


@asynccontextmanager
async def in_memory(
    clock: Callable[[], float], unfinished_s: float = UNFINISHED_S, finished_s: float = FINISHED_S
) -> AsyncIterator[Store]:
    """A store in memory with a clock of the test."""
    yield MemoryStore(unfinished_s, finished_s, clock)


@pytest.fixture(scope="session")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    """A Redis that all tests share."""
    with embedded(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture(scope="session")
def in_raw(redis: EmbeddedRedis) -> Iterator[Any]:
    """Redis' own client, to look behind the store and to wipe it."""
    with Redis.from_url(redis.url, protocol=2) as client:
        yield client


@pytest.fixture(scope="session")
def opened_in_redis() -> Callable[..., AbstractAsyncContextManager[Store]]:
    """`opened_in_redis(url, unfinished_s=…, finished_s=…)` is a store in the Redis of a URL."""
    return in_redis


@pytest.fixture(scope="session")
def wiped(redis: EmbeddedRedis, in_raw: Any) -> Callable[[], str]:
    """`wiped()` is the URL of the Redis, with nothing in it any more."""

    def wipe() -> str:
        in_raw.flushall()
        return redis.url

    return wipe


@pytest.fixture
def url(wiped: Callable[[], str]) -> str:
    """The URL of a Redis that has nothing in it."""
    return wiped()


@pytest.fixture(params=["memory", "redis"])
def stores(request: pytest.FixtureRequest) -> Stores:
    """Both kinds of store, one after the other."""
    if request.param == "redis":
        return Stores(partial(in_redis, request.getfixturevalue("url")), asyncio.sleep)
    now = 0.0

    async def pass_time(seconds: float) -> None:
        nonlocal now
        now += seconds

    return Stores(partial(in_memory, lambda: now), pass_time)


def record_of(
    id: str,
    prompt: tuple[int, ...] = (1, 2, 3),
    output: tuple[int, ...] = (),
    epoch: int = MOVES,
    finish: FinishReason | None = None,
    params: SamplingParams | None = None,
    seed: int = 7,
) -> Record:
    """What a draft replica knows of a session."""
    session = Session(id, prompt, params or SamplingParams(max_tokens=64), seed, output)
    return Record(session, b"\x00fingerprint\xff", epoch, finish)


@pytest.fixture(scope="session")
def record() -> Callable[..., Record]:
    """`record(id, **more)` is a session as it begins."""
    return record_of
