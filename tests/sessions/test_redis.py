"""The store in Redis where Redis restarts, forgets, refuses, freezes or is not there."""

import asyncio
import contextlib
import signal
import socket
import ssl
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import trustme
from redis.crc import key_slot

from services.sessions.embedded import EmbeddedRedis, embedded
from services.sessions.store import Append, Store
from services.types.errors import ErrorCode, WealdError
from services.types.replica import Replica, ReplicaKind
from services.types.sampling import SamplingParams
from services.types.session import MOVES, FinishReason

Make = Callable[..., Any]

PATIENCE_S = 60.0
"""For what ends within seconds unless it waits for ever."""
SESSION_BYTES = 20_000
"""What a session of 2,000 tokens may cost."""
REPLICA = Replica(ReplicaKind.VERIFY, "a:1", b"f", "smollm2-135m")


def every_call(store: Store, record: Make) -> list[Awaitable[object]]:
    """One call of each kind."""
    return [
        store.create(record("new")),
        store.load("a"),
        store.lease("a"),
        store.append([Append("a", MOVES, 0, (4,))]),
        store.register(REPLICA, 60.0),
        store.deregister(REPLICA.kind, REPLICA.address),
        store.replicas(REPLICA.kind),
    ]


async def unavailable(call: Awaitable[object]) -> WealdError:
    """The error of a call that cannot reach the store."""
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(WealdError) as failure:
            await call
    assert failure.value.code is ErrorCode.UNAVAILABLE
    return failure.value


def free_port() -> int:
    """A port that nothing listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def frozen(redis: EmbeddedRedis) -> Iterator[None]:
    """Redis does nothing meanwhile."""
    redis.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        redis.process.send_signal(signal.SIGCONT)


@pytest.mark.parametrize("outputs", [1, 1000, 1999])
@pytest.mark.parametrize("at_once", [2, 3, 2000])
def test_a_session_of_2000_tokens_costs_little_however_it_was_written(
    outputs: int, at_once: int, url: str, in_raw: Any, opened_in_redis: Make, record: Make
) -> None:
    tokens = tuple(range(2**32 - 2000, 2**32))
    prompt, output = tokens[: 2000 - outputs], tokens[2000 - outputs :]
    params = SamplingParams(
        max_tokens=outputs,
        temperature=0.7,
        top_p=0.95,
        seed=2**64 - 1,
        logit_bias={50256: -100.0, 198: 1.5},
        stop_token_ids=(50256, 2, 0),
    )
    id = "0b0cb5de-7f4c-4a29-9a3b-0d3d8f6f0c55"

    async def scenario() -> None:
        async with opened_in_redis(url) as store:
            await store.create(record(id, prompt, params=params))
            for start in range(0, outputs, at_once):
                part = output[start : start + at_once]
                assert await store.append([Append(id, MOVES, start, part)]) == [start + len(part)]
            assert (await store.load(id)).session.tokens == tokens

    asyncio.run(scenario())
    keys = in_raw.keys("*")
    assert len(keys) == 2
    assert sum(in_raw.memory_usage(key, samples=0) for key in keys) <= SESSION_BYTES


def test_nothing_is_left_of_sessions_and_replicas_once_their_time_is_over(
    url: str, in_raw: Any, opened_in_redis: Make, record: Make
) -> None:
    async def scenario() -> None:
        async with opened_in_redis(url, unfinished_s=0.2, finished_s=0.1) as store:
            await store.create(record("open", output=(4,)))
            await store.create(record("over", output=(4,), finish=FinishReason.STOP))
            await store.register(REPLICA, 0.2)
            async with asyncio.timeout(PATIENCE_S):
                while in_raw.dbsize():
                    await asyncio.sleep(0.05)

    asyncio.run(scenario())


def test_replicas_that_come_and_go_leave_nothing_behind_though_nobody_asks_for_them(
    url: str, in_raw: Any, opened_in_redis: Make
) -> None:
    async def scenario() -> None:
        async with opened_in_redis(url) as store:
            for port in range(20):
                await store.register(Replica(ReplicaKind.DRAFT, f"a:{port}", b"f", "m"), 0.01)
                await asyncio.sleep(0.02)
            await store.register(Replica(ReplicaKind.DRAFT, "a:20", b"f", "m"), 60.0)

    asyncio.run(scenario())
    assert in_raw.hlen("weald:{replicas:draft}") == in_raw.zcard("weald:{replicas:draft}:expiry") == 1


@pytest.mark.parametrize("id", ["a", "", "}", "a}b", "{x}", "ä"])
def test_all_keys_of_a_session_are_kept_on_one_node_of_a_cluster(
    id: str, url: str, in_raw: Any, opened_in_redis: Make, record: Make
) -> None:
    async def scenario() -> None:
        async with opened_in_redis(url) as store:
            await store.create(record(id, output=(4,)))

    asyncio.run(scenario())
    keys = in_raw.keys("*")
    assert len(keys) == 2
    assert len({key_slot(key) for key in keys}) == 1


def test_more_calls_at_once_than_connections_all_succeed(
    url: str, opened_in_redis: Make, record: Make
) -> None:
    async def scenario() -> None:
        async with opened_in_redis(url) as store:
            ids = [f"s{number}" for number in range(300)]
            await asyncio.gather(*(store.create(record(id)) for id in ids))
            leased = await asyncio.gather(*(store.lease(id) for id in ids))
            appends = [Append(one.session.id, one.epoch, 0, (4, 5)) for one in leased]
            assert await store.append(appends) == [2] * 300

    asyncio.run(scenario())


def test_leases_taken_at_once_by_many_processes_are_all_different(
    url: str, opened_in_redis: Make, record: Make
) -> None:
    async def scenario() -> None:
        async with opened_in_redis(url) as first, opened_in_redis(url) as second:
            await first.create(record("a"))
            leased = await asyncio.gather(*(store.lease("a") for store in [first, second] * 20))
            assert len({one.epoch for one in leased}) == 40
            assert (await first.load("a")).epoch == max(one.epoch for one in leased)

    asyncio.run(scenario())


def test_an_error_of_one_session_touches_no_other(
    url: str, in_raw: Any, opened_in_redis: Make, record: Make
) -> None:
    async def scenario() -> Sequence[int | WealdError]:
        async with opened_in_redis(url) as store:
            for id in "abc":
                await store.create(record(id))
            in_raw.delete("weald:{session:b}")
            in_raw.set("weald:{session:b}", "of another application")
            results: list[int | WealdError] = await store.append(
                [Append(id, MOVES, position, (4,)) for id in "abc" for position in (0, 1)]
            )
            await unavailable(store.load("b"))
            return results

    results = asyncio.run(scenario())
    assert [result for result in results if isinstance(result, int)] == [1, 2, 1, 2]
    assert all(isinstance(result, WealdError) for result in results[2:4])


def test_what_another_version_wrote_is_not_taken_for_something_else(
    url: str, in_raw: Any, opened_in_redis: Make, record: Make
) -> None:
    async def scenario() -> None:
        async with opened_in_redis(url) as store:
            await store.create(record("a", output=(4,)))
            key = "weald:{session:a}"
            known = in_raw.hgetall(key)
            for name, text in (
                (b"params", known[b"params"].replace(b'"top_k"', b'"top_n"')),
                (b"params", known[b"params"][:-1] + b',"grammar":"yes"}'),
                (b"params", known[b"params"].replace(b'"max_tokens":64', b'"max_tokens":-1')),
                (b"params", b"[]"),
                (b"prompt", b"12345"),
                (b"finish", b"weary"),
                (b"seed", None),
            ):
                if text is None:
                    in_raw.hdel(key, name)
                else:
                    in_raw.hset(key, name, text)
                with pytest.raises(WealdError, match="session a") as failure:
                    await store.load("a")
                assert failure.value.code is ErrorCode.INTERNAL
                in_raw.hset(key, mapping=known)
            assert await store.load("a") == record("a", output=(4,))

    asyncio.run(scenario())


def test_replicas_of_a_newer_version_are_listed_too(url: str, in_raw: Any, opened_in_redis: Make) -> None:
    async def scenario() -> None:
        async with opened_in_redis(url) as store:
            await store.register(REPLICA, 60.0)
            key = "weald:{replicas:verify}"
            known = in_raw.hget(key, REPLICA.address)
            in_raw.hset(key, REPLICA.address, known[:-1] + b',"zone":"b"}')
            assert await store.replicas(ReplicaKind.VERIFY) == [REPLICA]
            in_raw.hset(key, REPLICA.address, b"{}")
            with pytest.raises(WealdError) as failure:
                await store.replicas(ReplicaKind.VERIFY)
            assert failure.value.code is ErrorCode.INTERNAL

    asyncio.run(scenario())


def test_a_redis_that_restarts_with_its_data_goes_on_with_the_stores_that_are_open(
    tmp_path: Path, opened_in_redis: Make, record: Make
) -> None:
    async def scenario() -> None:
        with embedded(tmp_path) as first:
            async with opened_in_redis(first.url) as store:
                await store.create(record("a"))
                await store.create(record("b", (7,) * 2000))
                leased = await store.lease("a")
                appends = [Append("a", leased.epoch, 0, (4, 5)), Append("b", MOVES, 0, (6,))]
                assert await store.append(appends) == [2, 1]
                await store.register(REPLICA, 60.0)
                before = [await store.load(id) for id in "ab"]

                first.process.kill()
                first.process.wait()
                for call in every_call(store, record):
                    await unavailable(call)
                with embedded(tmp_path) as second:
                    assert second.url == first.url
                    # The first exchange of all finds no script there.
                    assert await store.append(appends) == [2, 1]
                    assert [await store.load(id) for id in "ab"] == before
                    assert await store.append([Append("a", leased.epoch, 2, (8,))]) == [3]
                    assert await store.replicas(ReplicaKind.VERIFY) == [REPLICA]
                    assert (await store.lease("a")).epoch > leased.epoch

    asyncio.run(scenario())


def test_a_redis_that_restarts_without_its_data_knows_nothing_and_learns_it_again(
    tmp_path: Path, opened_in_redis: Make, record: Make
) -> None:
    async def scenario() -> None:
        with embedded(tmp_path) as first:
            async with opened_in_redis(first.url) as store:
                await store.create(record("a"))
                assert await store.append([Append("a", MOVES, 0, (4, 5))]) == [2]
        for path in (*tmp_path.glob("appendonly.aof"), *tmp_path.glob("appendonlydir/*")):
            path.unlink()
        with embedded(tmp_path) as second:
            assert second.url == first.url
            async with opened_in_redis(first.url) as store:
                (result,) = await store.append([Append("a", MOVES, 2, (6,))])
                assert isinstance(result, WealdError)
                assert result.code is ErrorCode.UNKNOWN_SESSION
                await store.create(record("a", output=(4, 5)))
                assert await store.append([Append("a", MOVES, 2, (6,))]) == [3]

    asyncio.run(scenario())


def test_scripts_that_redis_has_forgotten_are_sent_again_in_the_middle_of_a_run(
    url: str, in_raw: Any, opened_in_redis: Make, record: Make
) -> None:
    async def scenario() -> None:
        async with opened_in_redis(url) as store:
            await store.create(record("a"))
            await store.create(record("b"))
            for position in range(0, 12, 2):
                if position % 4 == 0:
                    in_raw.script_flush()
                appends = [
                    Append(id, MOVES, position + more, (4,)) for id in ("a", "x", "b") for more in (0, 1)
                ]
                results = await store.append(appends)
                assert [*results[:2], *results[4:]] == [position + 1, position + 2] * 2

    asyncio.run(scenario())


def test_an_open_store_outlives_the_loss_of_its_connections(
    url: str, in_raw: Any, opened_in_redis: Make, record: Make
) -> None:
    async def scenario() -> None:
        async with opened_in_redis(url) as store:
            await store.create(record("a"))
            for position in range(5):
                in_raw.client_kill_filter(_type="normal", skipme=True)
                await asyncio.sleep(0.05)
                assert await store.append([Append("a", MOVES, position, (4,))]) == [position + 1]

    asyncio.run(scenario())


def test_a_store_that_nobody_serves_is_unavailable(opened_in_redis: Make, record: Make) -> None:
    port = free_port()

    async def scenario() -> None:
        async with opened_in_redis(f"redis://:secret@127.0.0.1:{port}") as store:
            for call in every_call(store, record):
                error = await unavailable(call)
                assert f"127.0.0.1:{port}" in error.message
                assert "secret" not in "".join(traceback.format_exception(error))

    asyncio.run(scenario())


@pytest.mark.parametrize("user", ["", ":wrong-secret@", "someone:wrong-secret@"])
def test_a_wrong_password_is_told_without_repeating_it(
    user: str, redis: EmbeddedRedis, opened_in_redis: Make, record: Make
) -> None:
    address = f"127.0.0.1:{urlsplit(redis.url).port}"

    async def scenario() -> None:
        async with opened_in_redis(f"redis://{user}{address}") as store:
            for call in every_call(store, record):
                error = await unavailable(call)
                assert address in error.message
                assert "password" in error.message
                assert "secret" not in "".join(traceback.format_exception(error))

    asyncio.run(scenario())


def test_a_frozen_redis_is_unavailable_in_bounded_time_and_serves_again_once_it_wakes_up(
    url: str, redis: EmbeddedRedis, opened_in_redis: Make, record: Make
) -> None:
    async def scenario() -> None:
        async with opened_in_redis(url) as store:
            await store.create(record("a"))
            with frozen(redis):
                # More than there are connections, half of them in pipelines.
                appends = [store.append([Append("a", MOVES, 0, (4,))] * 5) for _ in range(30)]
                async with asyncio.TaskGroup() as tasks:
                    for call in every_call(store, record) + [store.load("a") for _ in range(30)] + appends:
                        tasks.create_task(unavailable(call))
            assert await store.append([Append("a", MOVES, 0, (4, 5))]) == [2]
            leased = await asyncio.gather(*(store.lease("a") for _ in range(50)))
            assert len({one.epoch for one in leased}) == 50

    asyncio.run(scenario())


def test_a_caller_that_gives_up_leaves_no_answer_for_the_next_one(
    url: str, redis: EmbeddedRedis, opened_in_redis: Make, record: Make
) -> None:
    async def scenario() -> None:
        async with opened_in_redis(url) as store:
            await store.create(record("a"))
            await store.create(record("b"))
            with frozen(redis):
                for _ in range(40):
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(0.01):
                            await asyncio.gather(store.load("a"), store.append([Append("a", MOVES, 0, (4,))]))
            for _ in range(20):
                assert (await store.load("b")).session.id == "b"
                assert await store.append([Append("b", MOVES, 0, (4, 5, 6))]) == [3]

    asyncio.run(scenario())


@asynccontextmanager
async def behind_tls(url: str, authority: trustme.CA) -> AsyncIterator[str]:
    """The address of a TLS endpoint in front of a Redis: that of the wheel is built without TLS."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    tasks: set[asyncio.Task[None]] = set()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(2**16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection("127.0.0.1", urlsplit(url).port)
        tasks.update(asyncio.create_task(pump(*pair)) for pair in ((reader, there[1]), (there[0], writer)))

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await asyncio.gather(*tasks)


def test_a_store_is_reached_by_tls_and_only_if_its_certificate_is_of_the_named_authority(
    url: str, tmp_path: Path, opened_in_redis: Make, record: Make
) -> None:
    authority, other = trustme.CA(), trustme.CA()
    for name, one in (("right", authority), ("wrong", other)):
        one.cert_pem.write_to_path(tmp_path / name)
    password = urlsplit(url).password

    async def scenario() -> None:
        async with behind_tls(url, authority) as address:
            secured = f"rediss://:{password}@{address}?ssl_ca_certs={tmp_path}"
            async with opened_in_redis(f"{secured}/right") as store:
                await store.create(record("a"))
                assert await store.append([Append("a", MOVES, 0, (4, 5))]) == [2]
                assert (await store.load("a")).session.output == (4, 5)
            async with opened_in_redis(f"{secured}/wrong") as store:
                error = await unavailable(store.load("a"))
                assert str(password) not in "".join(traceback.format_exception(error))
            async with opened_in_redis(f"redis://:{password}@{address}") as store:
                await unavailable(store.load("a"))

    asyncio.run(scenario())
