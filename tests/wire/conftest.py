"""Real servers on the loopback address, around services that say what a test needs to hear."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import grpc
import pytest

from services.types.errors import ErrorCode, WealdError
from services.types.messages import (
    Close,
    DraftStatus,
    Failure,
    FeatureBlock,
    Features,
    Load,
    Open,
    Started,
    VerifyStatus,
)
from services.wire import convert
from services.wire.channel import connect
from services.wire.errors import answering
from services.wire.server import Server, serve
from services.wire.transport import Tls
from weald.v1 import draft_pb2, draft_pb2_grpc, verify_pb2, verify_pb2_grpc


class Drafts(draft_pb2_grpc.DraftServiceServicer):
    """Begins every generation, and then fails as it was told or goes on for ever."""

    status = DraftStatus("head", b"f", "float32", "cpu", 1, 2, 3, {"v:1": True}, {"drafts": 7})

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.left = asyncio.Event()
        """Set once the caller of a generation is gone."""

    async def Generate(self, request: draft_pb2.GenerateRequest, context: Any) -> AsyncIterator[Any]:
        try:
            async with answering(context):
                call = convert.call_from_proto(request)
                yield convert.event_to_proto(Started(call.session, 0, 0, ""))
                await self._go_on()
        finally:
            self.left.set()

    async def Status(self, request: draft_pb2.DraftServiceStatusRequest, context: Any) -> Any:
        async with answering(context):
            if self.error:
                await self._go_on()
            return convert.draft_status_to_proto(self.status)

    async def _go_on(self) -> None:
        if self.error:
            raise self.error
        await asyncio.Event().wait()


class Verifies(verify_pb2_grpc.VerifyServiceServicer):
    """Opens no session; it answers with as many MiB of features as the epoch says, or with a failure."""

    status = VerifyStatus("target", b"f", "float32", "cpu", 1, 2, 3, 4, 5, 6, Load(7, 8, 9), {"steps": 7})

    async def Verify(self, request_iterator: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        async with answering(context):
            async for message in request_iterator:
                for request in convert.requests_from_proto(message):
                    match request:
                        case Open(session, epoch):
                            block = FeatureBlock(0, epoch, 2**18, "float32", bytes(epoch * 2**20))
                            yield convert.response_to_proto(Features(session.id, epoch, block))
                        case Close(id, epoch):
                            error = WealdError(ErrorCode.UNKNOWN_SESSION, f"session {id} is not open")
                            yield convert.response_to_proto(Failure(id, epoch, error))
                        case Failure():
                            yield convert.response_to_proto(request)

    async def Status(self, request: verify_pb2.VerifyServiceStatusRequest, context: Any) -> Any:
        return convert.verify_status_to_proto(self.status)


@asynccontextmanager
async def serve_and_connect(
    servicer: Drafts | Verifies, server_tls: Tls | None = None, channel_tls: Tls | None = None
) -> AsyncIterator[tuple[Server, grpc.aio.Channel]]:
    """A server at a free port, and a channel to it."""
    server = await serve(servicer, "127.0.0.1:0", server_tls)
    try:
        async with connect(f"127.0.0.1:{server.port}", channel_tls) as channel:
            yield server, channel
    finally:
        await server.stop(0)


@pytest.fixture
def drafts() -> type[Drafts]:
    """`drafts(error)` is a draft service that fails."""
    return Drafts


@pytest.fixture
def verifies() -> type[Verifies]:
    """`verifies()` is a verify service that opens no session."""
    return Verifies


@pytest.fixture
def loopback() -> Callable[..., AbstractAsyncContextManager[tuple[Server, grpc.aio.Channel]]]:
    """`async with loopback(servicer, server_tls, channel_tls) as (server, channel)`."""
    return serve_and_connect
