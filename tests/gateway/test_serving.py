"""A worker serves where it says, and ends when it is told to."""

import asyncio
import socket
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from services.gateway import serving
from services.gateway.app import Settings
from services.gateway.serving import listen, run
from services.types.errors import ErrorCode, WealdError

PATIENCE_S = 30.0
"""For what comes within a second unless something is broken."""


def test_an_address_that_cannot_be_used_is_refused() -> None:
    with listen("127.0.0.1", 0) as taken:
        for host, port in (("127.0.0.1", taken.getsockname()[1]), ("192.0.2.1", 0), ("no.such.host.", 0)):
            with pytest.raises(WealdError, match=f"cannot listen at {host}") as refused:
                listen(host, port)
            assert refused.value.code is ErrorCode.INVALID_ARGUMENT


def test_addresses_of_both_kinds_can_be_listened_at() -> None:
    for host, family in (("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6), ("[::1]", socket.AF_INET6)):
        with listen(host, 0) as listener:
            assert listener.family is family
            assert listener.getsockname()[1] > 0


def test_a_worker_answers_once_it_says_so_and_until_it_is_told_to_end(checkpoints: Any) -> None:
    settings = Settings("tiny", "tiny", checkpoints.target, endpoints=("127.0.0.1:1",))

    async def scenario() -> None:
        stopping, port = asyncio.Event(), asyncio.get_running_loop().create_future()
        with listen("127.0.0.1", 0) as listener:
            running = asyncio.create_task(run(settings, listener, PATIENCE_S, port.set_result, stopping))
            async with asyncio.timeout(PATIENCE_S):
                url = f"http://127.0.0.1:{await port}"
                async with httpx.AsyncClient(base_url=url) as client:
                    assert (await client.get("/health")).status_code == 200
                    assert (await client.get("/ready")).status_code == 503
                    stopping.set()
                    await running
                    with pytest.raises(httpx.ConnectError):
                        await client.get("/health")

    asyncio.run(scenario())


def test_a_target_without_a_tokenizer_is_refused_before_anything_is_served(tmp_path: Any) -> None:
    async def scenario() -> None:
        with listen("127.0.0.1", 0) as listener:
            settings = Settings("tiny", "tiny", tmp_path, endpoints=("127.0.0.1:1",))
            await run(settings, listener, 0.0, lambda port: pytest.fail("it is not ready"), asyncio.Event())

    with pytest.raises(WealdError) as refused:
        asyncio.run(scenario())
    assert refused.value.code is ErrorCode.INCOMPATIBLE_CHECKPOINT


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the kernel has no such timeout")
def test_a_reader_that_has_stopped_is_cut_off_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "UNREAD_S", 1)
    left = asyncio.Event()

    async def flood(scope: Scope, receive: Receive, send: Send) -> None:
        async def write() -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while True:
                await send({"type": "http.response.body", "body": b"x" * 10_000, "more_body": True})

        writing = asyncio.create_task(write())
        while (await receive())["type"] != "http.disconnect":
            pass
        writing.cancel()
        left.set()

    async def scenario() -> None:
        with listen("127.0.0.1", 0) as listener:
            server = uvicorn.Server(uvicorn.Config(flood, lifespan="off", ws="none", log_config=None))
            serving = asyncio.create_task(server.serve([listener]))
            with socket.create_connection(listener.getsockname()) as reader:
                reader.sendall(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
                async with asyncio.timeout(PATIENCE_S):
                    await left.wait()
            server.should_exit = True
            await serving

    asyncio.run(scenario())
