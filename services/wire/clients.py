"""The two services as their callers see them: plain values in, plain values and `WealdError` out."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import suppress

import grpc

from services.types.errors import WealdError
from services.types.messages import Call, DraftStatus, Event, Request, Response, VerifyStatus
from services.wire import convert
from services.wire.channel import ask
from services.wire.errors import calling
from weald.v1 import draft_pb2, draft_pb2_grpc, verify_pb2, verify_pb2_grpc

_VerifyCall = grpc.aio.StreamStreamCall[verify_pb2.VerifyRequest, verify_pb2.VerifyResponse]
_BROKEN = (grpc.aio.AioRpcError, grpc.aio.BaseError, asyncio.InvalidStateError)


class VerifyClient:
    """A verify replica at the other end of a channel."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = verify_pb2_grpc.VerifyServiceStub(channel)

    async def verify(self, requests: AsyncIterator[Request]) -> AsyncGenerator[Response, None]:
        """The responses to a stream of requests; close the iterator to end the stream early.

        Raises:
            WealdError: when the stream breaks; what ends one session only is a `Failure` among the responses.
            Exception: what `requests` raises.
        """
        call = self._stub.Verify()
        sender = asyncio.create_task(_send(requests, call))
        try:
            with calling():
                async for message in call:
                    yield convert.response_from_proto(message)
        except WealdError:
            if sender.done() and (error := sender.exception()):
                raise error from None
            raise
        finally:
            call.cancel()
            sender.cancel()
            await asyncio.gather(sender, return_exceptions=True)

    async def status(self, within_s: float) -> VerifyStatus:
        """What the replica is and does. Raises `WealdError` as `ask` does."""
        message = await ask(self._stub.Status, verify_pb2.VerifyServiceStatusRequest(), within_s)
        return convert.verify_status_from_proto(message)


async def _send(requests: AsyncIterator[Request], call: _VerifyCall) -> None:
    """Write the requests. Why a stream broke is for its reader to say, so only their own errors count here.

    gRPC would iterate over the requests too, but hide what they raise, and at times why the stream broke.
    """
    try:
        async for request in requests:
            message = convert.request_to_proto(request)
            try:
                await call.write(message)
            except _BROKEN:
                return
        with suppress(*_BROKEN):
            await call.done_writing()
    except Exception:
        call.cancel()
        raise


class DraftClient:
    """A draft replica at the other end of a channel."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = draft_pb2_grpc.DraftServiceStub(channel)

    async def generate(self, call: Call, within_s: float | None = None) -> AsyncGenerator[Event, None]:
        """The events of a generation, within so many seconds; close the iterator to end it early.

        Raises:
            WealdError: what the service aborted with, `UNAVAILABLE`, or `DEADLINE_EXCEEDED`.
        """
        stream = self._stub.Generate(convert.call_to_proto(call), timeout=within_s)
        try:
            with calling():
                async for message in stream:
                    yield convert.event_from_proto(message)
        finally:
            stream.cancel()

    async def status(self, within_s: float) -> DraftStatus:
        """What the replica is and does. Raises `WealdError` as `ask` does."""
        message = await ask(self._stub.Status, draft_pb2.DraftServiceStatusRequest(), within_s)
        return convert.draft_status_from_proto(message)
