"""What stands between the network and the routes: ids, keys, and bounds on all that a client can take up."""

import asyncio
import hmac
import logging
import re
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.errors import HttpError
from services.types.errors import ErrorCode, WealdError, invalid

OPEN_PATHS = frozenset({"/health", "/ready", "/version", "/metrics", "/ui"})
"""Probes and scrapers have no key, and a browser has none yet; the page asks for what it shows with one."""
BODY_WITHIN_S = 60.0
"""For a client to send all of its request."""
GRACE_S = 5.0
"""An answer ends by itself when the time for its request is over; one that nobody reads, so much later."""
RETRY_AFTER_S = 1.0
_log = logging.getLogger(__name__)
_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


@dataclass(frozen=True, slots=True)
class Limits:
    """What one worker takes on. Raises `WealdError(INVALID_ARGUMENT)` when a number is out of range."""

    running: int = 256
    """Requests that are served at once."""
    waiting: int = 256
    """Further ones that wait for their turn; more are refused."""
    body: int = 4 * 2**20
    """Bytes of a request."""
    within_s: float = 600.0
    """For a whole answer, from its turn on."""

    def __post_init__(self) -> None:
        if self.running < 1 or self.waiting < 0 or self.body < 1 or not self.within_s > 0:
            raise invalid(f"limits must be positive, got {self}")


def identified(app: ASGIApp) -> ASGIApp:
    """Every answer has an `x-request-id`: the client's if it is a plain word, or else a random one."""

    async def identify(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        id, began, status = given if _ID.fullmatch(given) else secrets.token_hex(16), time.monotonic(), 0

        async def named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = id
                status = message["status"]
            await send(message)

        try:
            await app(scope, receive, named)
        finally:
            took = time.monotonic() - began
            _log.info(
                "%s %s: %d after %.3f s", scope["method"], scope["path"], status, took, extra={"request": id}
            )

    return identify


def authorised(app: ASGIApp, keys: Sequence[str]) -> ASGIApp:
    """Only who presents one of the keys gets in; `OPEN_PATHS` are for all."""
    known = [key.encode() for key in keys]

    async def authorise(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
            # All are compared, so that the time does not tell which one comes close.
            matches = [hmac.compare_digest(key, given.strip().encode()) for key in known]
            if scheme.lower() != "bearer" or not any(matches):
                raise HttpError(
                    HTTPStatus.UNAUTHORIZED,
                    "this needs an API key that is known here; send `Authorization: Bearer KEY`",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
        await app(scope, receive, send)

    return authorise


class Places:
    """So many requests run at once, and so many wait for them to end, first come first served."""

    def __init__(self, limits: Limits, observe: Callable[[int, int], None]) -> None:
        """`observe` is told how many run and how many wait, whenever that changes."""
        self._limits = limits
        self._observe = observe
        self._free = asyncio.Semaphore(limits.running)
        self._running = self._waiting = 0

    @asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """A place, once there is one.

        Raises:
            WealdError: `RESOURCE_EXHAUSTED` when too many wait already.
        """
        running, waiting = self._limits.running, self._limits.waiting
        if self._running + self._waiting == running + waiting:
            raise WealdError(
                ErrorCode.RESOURCE_EXHAUSTED,
                f"{running} requests run and {waiting} wait; try again soon",
                retry_after_s=RETRY_AFTER_S,
            )
        self._count(waiting=1)
        try:
            await self._free.acquire()
        except asyncio.CancelledError:
            self._count(waiting=-1)
            raise
        self._count(waiting=-1, running=1)
        try:
            yield
        finally:
            self._free.release()
            self._count(running=-1)

    def _count(self, *, running: int = 0, waiting: int = 0) -> None:
        self._running += running
        self._waiting += waiting
        self._observe(self._running, self._waiting)


def bounded(app: ASGIApp, limits: Limits, places: Places) -> ASGIApp:
    """What is posted comes in whole, takes a place, is given up when its client leaves, and ends in time."""

    async def bound(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await app(scope, receive, send)
            return
        body = await _whole_body(Headers(scope=scope), receive, limits.body)
        if body is None:
            return
        ended = False

        async def watched(message: Message) -> None:
            nonlocal ended
            ended = message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        async def serve() -> None:
            async with places.one(), asyncio.timeout(limits.within_s + GRACE_S):
                await app(scope, _once(body), watched)

        async def client_leaves() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            if ended:
                # It has all, and who serves it may go on to the end.
                await asyncio.Event().wait()

        try:
            await _first(serve(), client_leaves())
        except TimeoutError:
            raise WealdError(
                ErrorCode.DEADLINE_EXCEEDED, f"the request took longer than {limits.within_s:g} s"
            ) from None

    return bound


async def _whole_body(headers: Headers, receive: Receive, most: int) -> bytes | None:
    """The body of a request, or None when its client leaves before.

    Raises:
        HttpError: when it is no JSON, there is more of it, or it does not come in time.
    """
    too_large = HttpError(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a request has {most} bytes at most", code="request_too_large"
    )
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise HttpError(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "send JSON, and say so: `Content-Type: application/json`"
        )
    declared = headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > most:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_WITHIN_S):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                body += message.get("body", b"")
                if len(body) > most:
                    raise too_large
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        raise HttpError(
            HTTPStatus.REQUEST_TIMEOUT, f"the body did not come within {BODY_WITHIN_S:g} s"
        ) from None


def _once(body: bytes) -> Receive:
    """A body to be received again, and then nothing."""
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> Message:
        for message in messages:
            return message
        await asyncio.Event().wait()
        raise AssertionError

    return receive


async def _first(*coroutines: Coroutine[object, object, None]) -> None:
    """Run these until one of them ends, and cancel the others. Raises what that one does."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()
