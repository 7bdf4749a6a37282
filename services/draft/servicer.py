"""`DraftService` of the wire contract: calls in front of the draft service."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace

import grpc

from services.draft.service import DraftService
from services.types.messages import DraftStatus
from services.wire import convert
from services.wire.errors import answering
from weald.v1 import draft_pb2, draft_pb2_grpc


class DraftServicer(draft_pb2_grpc.DraftServiceServicer):
    """Translates between the wire and a `DraftService`."""

    def __init__(self, service: DraftService, status: DraftStatus) -> None:
        """Serve `service`; `status` says what does not change."""
        self._service = service
        self._status = status

    async def Generate(
        self,
        request: draft_pb2.GenerateRequest,
        context: grpc.aio.ServicerContext[draft_pb2.GenerateRequest, draft_pb2.GenerateResponse],
    ) -> AsyncIterator[draft_pb2.GenerateResponse]:
        """Committed tokens as they come, then how it ended."""
        async with (
            answering(context),
            aclosing(self._service.generate(convert.call_from_proto(request))) as events,
        ):
            async for event in events:
                yield convert.event_to_proto(event)

    async def Status(
        self,
        request: draft_pb2.DraftServiceStatusRequest,
        context: grpc.aio.ServicerContext[
            draft_pb2.DraftServiceStatusRequest, draft_pb2.DraftServiceStatusResponse
        ],
    ) -> draft_pb2.DraftServiceStatusResponse:
        """What this replica is and does."""
        service = self._service
        status = replace(
            self._status,
            running=len(service),
            free_pages=service.drafter.pool.free_pages,
            verifiers={address: service.serves(link) for address, link in service.links.items()},
            counters=service.counters(),
            cost=dict(service.drafter.passes.curve()),
            reliability=tuple(service.reliability()),
        )
        return convert.draft_status_to_proto(status)
