"""Answers as server-sent events: each as soon as it is known, with an id to go on from."""

import asyncio
from asyncio import FIRST_COMPLETED
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Self

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.gateway.choices import Figures, Piece, usage_of
from services.gateway.errors import HttpError, Problem, problem_of
from services.gateway.requests import Job
from services.gateway.resumption import Delivery, EventId, Point
from services.gateway.schemas import StreamOptions
from services.gateway.shapes import Chunk, Shape
from services.types.errors import ErrorCode, WealdError

PING_S = 15.0
"""Where nothing comes for so long, a comment shows that the stream lives."""
_PING = b": waiting\n\n"
_DONE = b"data: [DONE]\n\n"
# Proxies are to pass on what they get.
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_FINAL = frozenset({ErrorCode.INVALID_ARGUMENT, ErrorCode.CONTEXT_LENGTH_EXCEEDED, ErrorCode.DIVERGED})
"""Errors that a resumption would meet again."""


class EventStream(Response):
    """A response that has sent each event before it asks for the next one."""

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes]) -> None:
        super().__init__(headers=_HEADERS, media_type="text/event-stream")
        del self.headers["content-length"]
        self._first = first
        self._rest = rest

    @classmethod
    async def begin(cls, events: AsyncGenerator[bytes]) -> Self:
        """The response, once there is an event. Raises what comes in its place: the status can still tell."""
        return cls(await anext(events), events)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all events; however that ends, their iterator is closed."""
        async with aclosing(self._rest):
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": self._first, "more_body": True})
            async for event in self._rest:
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b""})


class Stream:
    """The events of an answer, behind where its client lost an earlier stream of it."""

    def __init__(self, job: Job, shape: Shape, lost: EventId, options: StreamOptions) -> None:
        """Begin.

        Args:
            job: the request.
            shape: of its answer.
            lost: the last event that the client has.
            options: what is told of the usage.
        """
        self._job = job
        self._shape = shape
        self._options = options
        self._deliveries = [Delivery(point) for point in lost.points]
        self._opened = [point != Point() for point in lost.points]
        """Whether a choice's first chunk is out."""
        self._figures = [Figures(len(call.prompt)) for call in job.calls]

    async def events(self, pieces: AsyncGenerator[tuple[int, Piece] | None]) -> AsyncGenerator[bytes]:
        """Each as soon as it is known; a comment for each None among the pieces.

        Raises:
            WealdError: as `pieces` does, before the first event; later it is the last event.
            HttpError: as `Delivery.take` does, likewise.
        """
        begun = False
        try:
            async with aclosing(pieces):
                async for item in pieces:
                    for event in [_PING] if item is None else self._take(*item):
                        begun = True
                        yield event
        except Exception as error:
            if not begun:
                raise
            yield _event(self._at, _explained(error).body)
            return
        if self._options.include_usage:
            yield _event(self._at, self._json(self._shape.closing(), last=True))
        yield _DONE

    def _take(self, index: int, piece: Piece) -> Iterator[bytes]:
        self._figures[index] = piece.figures
        before = self._at
        if not (fresh := self._deliveries[index].take(piece)):
            return
        if not self._opened[index] and (opening := self._shape.opening(index)):
            yield _event(before, self._json(opening))
        self._opened[index] = True
        yield _event(self._at, self._json(self._shape.chunk(index, fresh)))

    @property
    def _at(self) -> EventId:
        return EventId(self._job.id, tuple(delivery.point for delivery in self._deliveries))

    def _json(self, chunk: Chunk, last: bool = False) -> str:
        if self._options.include_usage:
            told = last or self._options.continuous_usage_stats
            chunk.usage = usage_of(self._job, self._figures) if told else None
        return chunk.model_dump_json(exclude_unset=True)


def _event(at: EventId, data: str) -> bytes:
    return f"id: {at}\ndata: {data}\n\n".encode()


def _explained(error: Exception) -> Problem:
    problem = problem_of(error)
    if isinstance(error, HttpError) or (isinstance(error, WealdError) and error.code in _FINAL):
        return problem
    rest = "to get the rest, send the request again, with the last event's id as `Last-Event-ID`"
    return replace(problem, message=f"{problem.message}; {rest}")


async def kept_alive(
    pieces: AsyncGenerator[tuple[int, Piece]], ending: asyncio.Future[None]
) -> AsyncGenerator[tuple[int, Piece] | None]:
    """The pieces, and None whenever none has come for `PING_S`.

    Raises:
        WealdError: `UNAVAILABLE` once `ending` is done, and what `pieces` raises.
    """
    async with aclosing(pieces):
        while True:
            coming = asyncio.ensure_future(anext(pieces, None))
            either: set[asyncio.Future[Any]] = {coming, ending}
            try:
                while not coming.done():
                    if not (await asyncio.wait(either, timeout=PING_S, return_when=FIRST_COMPLETED))[0]:
                        yield None
                    elif ending.done():
                        raise WealdError(ErrorCode.UNAVAILABLE, "this gateway ends; another one can go on")
            finally:
                if not coming.done():
                    coming.cancel()
                    await asyncio.gather(coming, return_exceptions=True)
            if (item := coming.result()) is None:
                return
            yield item
