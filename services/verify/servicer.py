"""`VerifyService` of the wire contract: streams in front of the verify service."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Protocol

import grpc

from services.types.errors import WealdError
from services.types.messages import Draining, Failure, Load, Request, Response, VerifyStatus
from services.wire import convert
from services.wire.chunks import pieces
from weald.v1 import verify_pb2, verify_pb2_grpc

CONGESTED = 64
"""Posts that wait to be sent on a stream before the sessions behind it pause."""


class StreamLink:
    """The way back to one drafter: posts from the service's thread, sent in the event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._posts: asyncio.Queue[Sequence[Response] | None] = asyncio.Queue()

    @property
    def congested(self) -> bool:
        """Whether the drafter reads slower than the target speaks."""
        return self._posts.qsize() > CONGESTED

    def post(self, responses: Sequence[Response]) -> None:
        """Send, from any thread, without waiting."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._posts.put_nowait, responses)

    def end(self) -> None:
        """Let the stream end behind what has been posted."""
        self._posts.put_nowait(None)

    async def __aiter__(self) -> AsyncIterator[Response]:
        while (posted := await self._posts.get()) is not None:
            for response in posted:
                yield response


class Serving(Protocol):
    """What a servicer needs of the service behind it; all of any thread."""

    def submit(self, link: StreamLink, request: Request | None) -> None:
        """Take what a stream brought; None when it has ended."""

    def load(self) -> Load:
        """How busy it is."""

    def counters(self) -> dict[str, int]:
        """What it has counted."""

    def cost(self) -> dict[int, float]:
        """Seconds that a target step takes, by the tokens in it."""


class VerifyServicer(verify_pb2_grpc.VerifyServiceServicer):
    """Translates between the wire and a `VerifyService`."""

    def __init__(self, service: Serving, status: VerifyStatus) -> None:
        """Serve `service`; `status` says what does not change."""
        self._service = service
        self._status = status
        self._links: set[StreamLink] = set()
        self._draining = False

    async def Verify(
        self,
        request_iterator: AsyncIterator[verify_pb2.VerifyRequest],
        context: grpc.aio.ServicerContext[verify_pb2.VerifyRequest, verify_pb2.VerifyResponse],
    ) -> AsyncIterator[verify_pb2.VerifyResponse]:
        """One stream of one draft replica; its sessions outlive it for a while."""
        link = StreamLink()
        self._links.add(link)
        if self._draining:
            link.post([Draining()])
        reading = asyncio.create_task(self._read(request_iterator, link))
        try:
            async for response in link:
                for piece in pieces(response):
                    yield convert.response_to_proto(piece)
        finally:
            reading.cancel()
            self._links.discard(link)
            self._service.submit(link, None)

    async def Status(
        self,
        request: verify_pb2.VerifyServiceStatusRequest,
        context: grpc.aio.ServicerContext[
            verify_pb2.VerifyServiceStatusRequest, verify_pb2.VerifyServiceStatusResponse
        ],
    ) -> verify_pb2.VerifyServiceStatusResponse:
        """What this replica is and does."""
        service = self._service
        status = replace(self._status, load=service.load(), counters=service.counters(), cost=service.cost())
        return convert.verify_status_to_proto(status)

    def drain(self) -> None:
        """Ask all drafters to open their sessions elsewhere."""
        self._draining = True
        for link in self._links:
            link.post([Draining()])

    def close(self) -> None:
        """End every stream behind what has been posted to it."""
        for link in self._links:
            link.end()

    async def _read(self, requests: AsyncIterator[verify_pb2.VerifyRequest], link: StreamLink) -> None:
        """Hand on what the drafter says; what is malformed is answered and hurts nothing else."""
        async for message in requests:
            try:
                said = convert.requests_from_proto(message)
            except WealdError as error:
                said = [Failure("", 0, error)]
            for request in said:
                if isinstance(request, Failure):
                    link.post([request])
                else:
                    self._service.submit(link, request)
        link.end()
