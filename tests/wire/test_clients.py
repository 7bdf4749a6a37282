import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from services.types.errors import ErrorCode, WealdError
from services.types.messages import Call, Close, Failure, Features, Open, Request, Started
from services.types.sampling import SamplingParams
from services.types.session import Session
from services.wire.clients import DraftClient, VerifyClient

CALL = Call("s", (1,), (), SamplingParams())


def opening(id: str, epoch: int = 1, tokens: int = 1) -> Open:
    return Open(Session(id, (2**32 - 1,) * tokens, SamplingParams(), 0), epoch, b"", True, 0)


async def stream(*requests: Request) -> AsyncIterator[Request]:
    for request in requests:
        yield request


def test_statuses_arrive(loopback: Any, verifies: Any, drafts: Any) -> None:
    async def scenario() -> None:
        async with loopback(verifies()) as (_, channel):
            assert await VerifyClient(channel).status(30) == verifies.status
        async with loopback(drafts()) as (_, channel):
            assert await DraftClient(channel).status(30) == drafts.status

    asyncio.run(scenario())


def test_one_stream_carries_sessions_and_the_errors_of_each(loopback: Any, verifies: Any) -> None:
    async def scenario() -> list[Any]:
        async with loopback(verifies()) as (_, channel):
            requests = stream(opening("a"), opening(""), Close("b", 4), opening("c", 2))
            return [response async for response in VerifyClient(channel).verify(requests)]

    a, nameless, b, c = asyncio.run(scenario())
    assert isinstance(a, Features)
    assert isinstance(c, Features)
    assert (a.session, a.block.rows, c.session, c.block.rows) == ("a", 1, "c", 2)
    assert isinstance(nameless, Failure)
    assert isinstance(b, Failure)
    assert (nameless.epoch, nameless.error.code) == (1, ErrorCode.INVALID_ARGUMENT)
    assert (b.session, b.epoch, b.error.code) == ("b", 4, ErrorCode.UNKNOWN_SESSION)


@pytest.mark.parametrize(
    "large", [opening("s", tokens=1_000_000), opening("s", epoch=5)], ids=["request", "response"]
)
def test_a_message_over_the_limit_is_refused_with_what_to_do(
    loopback: Any, verifies: Any, large: Open
) -> None:
    async def scenario() -> WealdError:
        async with loopback(verifies()) as (_, channel):
            with pytest.raises(WealdError) as raised:
                await anext(VerifyClient(channel).verify(stream(large)))
            return raised.value

    error = asyncio.run(scenario())
    assert error.code is ErrorCode.INVALID_ARGUMENT
    assert error.message.startswith("a message is larger than the wire carries; send less at once")
    assert str(4 * 2**20) in error.message


def test_what_the_requests_raise_reaches_the_reader_of_the_responses(loopback: Any, verifies: Any) -> None:
    async def broken() -> AsyncIterator[Request]:
        yield opening("a")
        raise KeyError("of the requests")

    async def scenario() -> None:
        async with loopback(verifies()) as (_, channel):
            with pytest.raises(KeyError, match="of the requests"):
                async for _ in VerifyClient(channel).verify(broken()):
                    pass

    asyncio.run(scenario())


def test_a_channel_that_is_closed_ends_its_streams_with_an_error(loopback: Any, verifies: Any) -> None:
    async def endless() -> AsyncIterator[Request]:
        yield opening("a")
        await asyncio.Event().wait()

    async def scenario() -> None:
        async with loopback(verifies()) as (_, channel):
            responses = VerifyClient(channel).verify(endless())
            await anext(responses)
            await channel.close()
            with pytest.raises(WealdError, match="the call was cancelled") as raised:
                await anext(responses)
            assert raised.value.code is ErrorCode.CANCELLED

    asyncio.run(scenario())


def test_cancelling_the_reader_is_no_error_of_the_stream(loopback: Any, verifies: Any) -> None:
    async def endless() -> AsyncIterator[Request]:
        yield opening("a")
        await asyncio.Event().wait()

    async def scenario() -> None:
        async with loopback(verifies()) as (_, channel):
            arrived = asyncio.Event()

            async def read() -> None:
                async for _ in VerifyClient(channel).verify(endless()):
                    arrived.set()

            reader = asyncio.create_task(read())
            await arrived.wait()
            reader.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reader

    asyncio.run(scenario())


def test_closing_a_generation_ends_it_at_the_service(loopback: Any, drafts: Any) -> None:
    async def scenario() -> None:
        service = drafts()
        async with loopback(service) as (_, channel):
            events = DraftClient(channel).generate(CALL)
            assert await anext(events) == Started("s", 0, 0, "")
            assert not service.left.is_set()
            await events.aclose()
            async with asyncio.timeout(30):
                await service.left.wait()

    asyncio.run(scenario())
