"""Nobody gets in without a key, and nobody takes up more than a share, not even by leaving or by waiting."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from services.gateway import limits
from services.gateway.errors import answered
from services.gateway.limits import Limits, Places, authorised, bounded, identified
from services.types.errors import ErrorCode, WealdError

PATIENCE_S = 30.0
"""For what comes within milliseconds unless something is broken."""
JSON = {"content-type": "application/json"}


class Work:
    """An application whose requests say what becomes of them, and end when they are told to."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.running = self.cancelled = self.finished = 0
        self.may_end = asyncio.Event()
        self.begin_at_once = False
        self.flood = b""
        """Sent over and over, until the request may end."""
        self.linger = False
        """Whether there is something to do behind the last byte."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body, wait, and answer."""
        message = await receive()
        self.bodies.append(message["body"])
        self.running += 1
        try:
            start = {"type": "http.response.start", "status": 200, "headers": []}
            if self.begin_at_once or self.flood:
                await send(start)
            while self.flood and not self.may_end.is_set():
                await send({"type": "http.response.body", "body": self.flood, "more_body": True})
                await asyncio.sleep(0)
            await self.may_end.wait()
            if not (self.begin_at_once or self.flood):
                await send(start)
            await send({"type": "http.response.body", "body": b"done"})
            if self.linger:
                await asyncio.sleep(0.05)
            self.finished += 1
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1


def called(app: ASGIApp, *requests: dict[str, Any]) -> list[httpx.Response]:
    """The answers to requests, one after the other."""

    async def scenario() -> list[httpx.Response]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as client:
            return [await client.request(**{"method": "POST", "url": "/"} | request) for request in requests]

    return asyncio.run(scenario())


def at_once() -> Work:
    work = Work()
    work.may_end.set()
    return work


@asynccontextmanager
async def served(app: ASGIApp) -> AsyncIterator[int]:
    """The application behind a real server; its port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(
            app, lifespan="off", ws="none", log_config=None, timeout_graceful_shutdown=int(PATIENCE_S)
        )
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve([listener]))
        await until(lambda: server.started)
        yield listener.getsockname()[1]
        server.should_exit = True
        await serving


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.005)


async def post(port: int, body: bytes = b"{}", declared: int | None = None) -> Any:
    """A connection on which a request has been sent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    length = len(body) if declared is None else declared
    head = (
        f"POST / HTTP/1.1\r\nhost: gateway\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n"
    )
    writer.write(head.encode() + b"\r\n" + body)
    await writer.drain()
    return reader, writer


async def hang_up(writer: asyncio.StreamWriter) -> None:
    writer.close()
    await writer.wait_closed()


def test_every_answer_has_an_id_the_clients_own_where_it_is_a_plain_word() -> None:
    app = identified(answered(authorised(at_once(), ["key"])))
    with_ids = called(
        app, *[{"headers": {"x-request-id": id}} for id in ("mine-1.2:3", "a b", "x" * 129, "")]
    )
    assert with_ids[0].headers["x-request-id"] == "mine-1.2:3"
    ids = [response.headers["x-request-id"] for response in with_ids[1:]]
    assert len(set(ids)) == 3
    assert all(len(id) == 32 for id in ids)
    assert all(response.status_code == 401 for response in with_ids)


@pytest.mark.parametrize("header", ["Bearer first", "bearer second", "Bearer  second ", "Bearer schlüssel"])
def test_any_of_the_keys_lets_in(header: str) -> None:
    app = answered(authorised(at_once(), ["first", "second", "schlüssel"]))
    assert called(app, {"headers": {"authorization": header.encode("latin-1")}})[0].status_code == 200


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer third", "Basic first", "first", "Bearer firs"]
)
def test_no_key_another_key_or_another_scheme_does_not(header: str | None) -> None:
    headers = {} if header is None else {"authorization": header}
    response = called(answered(authorised(at_once(), ["first"])), {"headers": headers})[0]
    assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer")
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")


def test_probes_need_no_key() -> None:
    app = answered(authorised(at_once(), ["first"]))
    paths = ("/health", "/ready", "/version", "/metrics", "/v1/models", "/metrics/", "/openapi.json")
    statuses = [response.status_code for response in called(app, *[{"url": path} for path in paths])]
    assert statuses == [200] * 4 + [401] * 3


def bounds(work: Work, seen: list[tuple[int, int]] | None = None, **options: Any) -> ASGIApp:
    """The work within limits."""
    within = Limits(**options)
    return answered(bounded(work, within, Places(within, lambda *load: seen.append(load) if seen else None)))


@pytest.mark.parametrize("wrong", [{"running": 0}, {"waiting": -1}, {"body": 0}, {"within_s": 0.0}])
def test_limits_that_nobody_could_keep_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(WealdError, match="limits must be positive") as refused:
        Limits(**wrong)
    assert refused.value.code is ErrorCode.INVALID_ARGUMENT


def test_a_body_is_passed_on_whole_up_to_the_limit_and_refused_beyond_declared_or_not() -> None:
    async def pieces(size: int) -> AsyncIterator[bytes]:
        for _ in range(size // 10):
            yield b"x" * 10

    work = at_once()
    answers = called(
        bounds(work, body=100),
        *[{"content": b"x" * size, "headers": JSON} for size in (0, 100, 101, 10_000)],
        *[{"content": pieces(size), "headers": JSON} for size in (100, 110, 10_000)],
    )
    assert [answer.status_code for answer in answers] == [200, 200, 413, 413, 200, 413, 413]
    assert [len(body) for body in work.bodies] == [0, 100, 100]
    assert answers[2].json()["error"]["code"] == "request_too_large"


@pytest.mark.parametrize(
    "kind", [None, "text/plain", "application/x-www-form-urlencoded", "json", "a/b;c=\xff"]
)
def test_a_body_that_is_not_said_to_be_json_is_refused(kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind.encode("latin-1")}
    work = at_once()
    assert called(bounds(work), {"content": b"{}", "headers": headers})[0].status_code == 415
    assert not work.bodies


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON; charset=utf-8"])
def test_a_body_that_is_said_to_be_json_is_passed_on(kind: str) -> None:
    assert (
        called(bounds(at_once()), {"content": b"{}", "headers": {"content-type": kind}})[0].status_code == 200
    )


def test_a_body_that_does_not_come_is_not_waited_for_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BODY_WITHIN_S", 0.1)
    work = at_once()

    async def scenario() -> bytes:
        async with served(bounds(work)) as port:
            reader, writer = await post(port, b"{", declared=2)
            said = await reader.readuntil(b"\r\n")
            await hang_up(writer)
            return bytes(said)

    assert b" 408 " in asyncio.run(scenario())
    assert not work.bodies


def test_a_client_that_leaves_before_its_body_is_whole_starts_nothing() -> None:
    async def scenario() -> None:
        work = Work()
        async with served(bounds(work)) as port:
            _, writer = await post(port, b"{", declared=2)
            await hang_up(writer)
            work.may_end.set()
            reader, writer = await post(port)
            assert b" 200 " in await reader.readuntil(b"\r\n")
            await hang_up(writer)
            assert work.bodies == [b"{}"]

    asyncio.run(scenario())


def test_so_many_requests_run_so_many_wait_and_the_others_are_refused_at_once() -> None:
    async def scenario() -> None:
        work, loads = Work(), [(0, 0)]
        app = bounds(work, loads, running=2, waiting=3)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            waiting = [asyncio.create_task(client.post("/", json={})) for _ in range(5)]
            await until(lambda: loads[-1] == (2, 3))
            assert work.running == 2
            refused = await client.post("/", json={})
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            assert refused.json()["error"]["type"] == "rate_limit_exceeded"
            get = asyncio.create_task(client.get("/"))
            await until(lambda: work.running == 3)
            work.may_end.set()
            assert {answer.status_code for answer in await asyncio.gather(get, *waiting)} == {200}
        assert loads[-1] == (0, 0)
        assert max(running for running, _ in loads) == 2
        assert max(waiting for _, waiting in loads) == 3

    asyncio.run(scenario())


def test_places_are_given_in_order_and_come_back_from_those_who_fail_or_give_up() -> None:
    async def scenario() -> None:
        loads: list[tuple[int, int]] = []
        places = Places(Limits(running=1, waiting=4), lambda *load: loads.append(load))
        order: list[int] = []
        hold = asyncio.Event()

        async def take(number: int) -> None:
            async with places.one():
                order.append(number)
                await hold.wait()
                if number == 0:
                    raise ZeroDivisionError

        tasks = []
        for number in range(5):
            tasks.append(asyncio.create_task(take(number)))
            await asyncio.sleep(0)
        with pytest.raises(WealdError) as full:
            await take(5)
        assert full.value.code is ErrorCode.RESOURCE_EXHAUSTED
        tasks[2].cancel()
        await asyncio.gather(tasks[2], return_exceptions=True)
        assert loads[-1] == (1, 3)
        hold.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert order == [0, 1, 3, 4]
        assert loads[-1] == (0, 0)
        await take(6)

    asyncio.run(scenario())


def test_who_hangs_up_is_served_no_longer_whether_running_or_waiting() -> None:
    async def scenario() -> None:
        work, loads = Work(), [(0, 0)]
        async with served(bounds(work, loads, running=1)) as port:
            _, running = await post(port)
            await until(lambda: work.running == 1)
            _, waiting = await post(port)
            await until(lambda: loads[-1] == (1, 1))
            await hang_up(waiting)
            await until(lambda: loads[-1] == (1, 0))
            await hang_up(running)
            await until(lambda: loads[-1] == (0, 0))
            assert (work.cancelled, work.finished, len(work.bodies)) == (1, 0, 1)

    asyncio.run(scenario())


def test_work_behind_the_last_byte_is_done_although_the_client_has_left() -> None:
    async def scenario() -> None:
        work = at_once()
        work.linger = True
        async with served(bounds(work)) as port:
            reader, writer = await post(port)
            assert (await reader.readuntil(b"done")).endswith(b"done")
            await hang_up(writer)
            await until(lambda: not work.running)
            assert (work.cancelled, work.finished) == (0, 1)

    asyncio.run(scenario())


def test_a_request_that_takes_too_long_ends_with_an_error_or_is_cut_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "GRACE_S", 0.0)

    async def scenario() -> None:
        work = Work()
        async with served(bounds(work, within_s=0.1)) as port:
            reader, writer = await post(port)
            said = await reader.readuntil(b"}}")
            assert b" 504 " in said
            assert json.loads(said.rpartition(b"\r\n")[2])["error"]["code"] == "deadline_exceeded"
            await hang_up(writer)
            work.begin_at_once = True
            reader, writer = await post(port)
            said = await reader.read()
            assert b" 200 " in said
            assert b"done" not in said
            await hang_up(writer)
            assert (work.cancelled, work.running) == (2, 0)

    asyncio.run(scenario())


def test_a_client_that_does_not_read_holds_up_itself_alone_and_not_beyond_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "GRACE_S", 0.0)

    async def scenario() -> None:
        work = Work()
        work.flood = b"x" * 100_000
        async with served(bounds(work, within_s=1.0)) as port:
            _, slow = await post(port)
            slow.transport.pause_reading()
            await until(lambda: work.running == 1)
            reader, fast = await post(port)
            for _ in range(100):
                await reader.readexactly(100_000)
            assert work.running == 2
            await hang_up(fast)
            await until(lambda: not work.running)
            assert work.cancelled == 2
            slow.transport.abort()

    asyncio.run(scenario())
