import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from services.types.errors import ErrorCode, WealdError
from services.types.messages import Call, Started
from services.types.sampling import SamplingParams
from services.wire.channel import connect
from services.wire.clients import DraftClient, VerifyClient
from services.wire.errors import CODE_KEY, MAX_CHARACTERS, SHAPES, from_rpc_error

CALL = Call("s", (1,), (), SamplingParams())


def test_every_code_has_its_place_on_every_transport() -> None:
    assert SHAPES.keys() == set(ErrorCode)
    for shape in SHAPES.values():
        assert shape.status is not grpc.StatusCode.OK
        assert 400 <= shape.http < 600
        assert (shape.type == "server_error") == (shape.http >= 500)


def test_a_client_is_asked_to_change_only_what_it_can_change() -> None:
    blamed = {code for code, shape in SHAPES.items() if shape.type == "invalid_request_error"}
    assert blamed == {ErrorCode.INVALID_ARGUMENT, ErrorCode.CONTEXT_LENGTH_EXCEEDED, ErrorCode.CANCELLED}


@pytest.mark.parametrize("wait", [None, 0.1])
def test_every_error_comes_back_as_it_was_raised(loopback: Any, drafts: Any, wait: float | None) -> None:
    async def scenario() -> None:
        service = drafts()
        async with loopback(service) as (_, channel):
            client = DraftClient(channel)
            for code in ErrorCode:
                raised = WealdError(code, f"über {code}", retry_after_s=wait)
                service.error = raised
                with pytest.raises(WealdError) as unary:
                    await client.status(30)
                events = client.generate(CALL)
                assert await anext(events) == Started("s", 0, 0, "")
                with pytest.raises(WealdError) as stream:
                    await anext(events)
                for came in (unary.value, stream.value):
                    assert (came.code, came.message) == (raised.code, raised.message)
                    assert came.retry_after_s == wait

    asyncio.run(scenario())


def test_of_an_unexpected_exception_the_caller_learns_only_that_it_happened(
    loopback: Any, drafts: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> WealdError:
        async with loopback(drafts(KeyError("secret"))) as (_, channel):
            with pytest.raises(WealdError) as raised:
                await DraftClient(channel).status(30)
            return raised.value

    error = asyncio.run(scenario())
    assert (error.code, error.message) == (ErrorCode.INTERNAL, "the service failed; its log has the reason")
    (record,) = caplog.records
    assert "secret" in record.getMessage()
    assert record.exc_info is not None


def test_a_broken_invariant_is_logged_and_a_mistake_of_the_caller_is_not(
    loopback: Any, drafts: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        for code in (ErrorCode.INTERNAL, ErrorCode.INVALID_ARGUMENT):
            async with loopback(drafts(WealdError(code, f"it was {code}"))) as (_, channel):
                with pytest.raises(WealdError, match=f"it was {code}"):
                    await DraftClient(channel).status(30)

    asyncio.run(scenario())
    assert [(r.levelno, r.getMessage()) for r in caplog.records] == [(logging.ERROR, "it was internal")]


def test_a_sentence_too_long_for_a_header_is_cut_and_its_code_arrives(loopback: Any, drafts: Any) -> None:
    async def scenario() -> WealdError:
        error = WealdError(ErrorCode.INCOMPATIBLE_CHECKPOINT, "🌳" * 100_000, retry_after_s=2)
        async with loopback(drafts(error)) as (_, channel):
            with pytest.raises(WealdError) as raised:
                await DraftClient(channel).status(30)
            return raised.value

    error = asyncio.run(scenario())
    assert (error.code, error.retry_after_s) == (ErrorCode.INCOMPATIBLE_CHECKPOINT, 2)
    assert error.message == "🌳" * (MAX_CHARACTERS - 1) + "…"


def test_an_answer_that_does_not_come_in_time_says_so(loopback: Any, verifies: Any) -> None:
    class Silent(verifies):  # type: ignore[misc]
        async def Status(self, request: Any, context: Any) -> None:
            await asyncio.Event().wait()

    async def scenario() -> None:
        async with loopback(Silent()) as (_, channel):
            with pytest.raises(WealdError, match="did not answer in time") as raised:
                await VerifyClient(channel).status(0.05)
            assert raised.value.code is ErrorCode.DEADLINE_EXCEEDED

    asyncio.run(scenario())


def test_a_service_that_is_not_there_is_unavailable(loopback: Any, verifies: Any) -> None:
    async def requests() -> AsyncIterator[Any]:
        return
        yield

    async def scenario() -> None:
        async with loopback(verifies()) as (server, _):
            address = f"127.0.0.1:{server.port}"
        async with connect(address) as channel:
            client = VerifyClient(channel)
            for attempt in (client.status(30), anext(client.verify(requests()))):
                with pytest.raises(WealdError, match="cannot be reached") as raised:
                    await attempt
                assert raised.value.code is ErrorCode.UNAVAILABLE

    asyncio.run(scenario())


def test_the_wrong_service_at_an_address_is_named_as_such(loopback: Any, verifies: Any) -> None:
    async def scenario() -> None:
        async with loopback(verifies()) as (_, channel):
            with pytest.raises(WealdError, match="does not know the call") as raised:
                await DraftClient(channel).status(30)
            assert raised.value.code is ErrorCode.UNAVAILABLE

    asyncio.run(scenario())


@pytest.mark.parametrize("metadata", [(), ((CODE_KEY, "not known yet"),)])
@pytest.mark.parametrize("status", list(grpc.StatusCode))
def test_a_status_without_a_code_we_know_is_told_by_what_grpc_means_with_it(
    status: grpc.StatusCode, metadata: tuple[tuple[str, str], ...]
) -> None:
    error = from_rpc_error(grpc.aio.AioRpcError(status, None, grpc.aio.Metadata(*metadata), "details"))
    codes = {
        grpc.StatusCode.UNAVAILABLE: ErrorCode.UNAVAILABLE,
        grpc.StatusCode.UNIMPLEMENTED: ErrorCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED: ErrorCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED: ErrorCode.CANCELLED,
        grpc.StatusCode.RESOURCE_EXHAUSTED: ErrorCode.RESOURCE_EXHAUSTED,
    }
    assert error.code is codes.get(status, ErrorCode.INTERNAL)
    assert error.message.endswith("(details)")
