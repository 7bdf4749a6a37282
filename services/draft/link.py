"""The stream to one verify replica, which carries all sessions that are drafted for it here."""

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from services.types.errors import ErrorCode, WealdError
from services.types.messages import Request, Response
from services.wire.channel import connect
from services.wire.clients import VerifyClient
from services.wire.transport import Tls

FIRST_RETRY_S, LAST_RETRY_S = 0.1, 5.0
"""Between attempts to connect; the time doubles, with jitter."""
STATUS_WITHIN_S = 5.0

_log = logging.getLogger(__name__)


class VerifyLink:
    """Keeps one stream open; everything but `send` belongs to the event loop."""

    def __init__(
        self,
        address: str,
        client: VerifyClient,
        received: Callable[[Response], None],
        broken: Callable[["VerifyLink", WealdError], None],
    ) -> None:
        """Prepare a link.

        Args:
            address: host:port of the replica.
            client: of that address.
            received: called with every response.
            broken: called when the stream has ended; its sessions are lost to this link.
        """
        self.address = address
        self.connected = False
        self.fingerprint = b""
        """Of the replica's target, once connected."""
        self._client = client
        self._received = received
        self._broken = broken
        self._loop = asyncio.get_running_loop()
        self._requests: asyncio.Queue[Request] = asyncio.Queue()

    def send(self, request: Request) -> None:
        """Send from any thread; lost if the stream breaks, which `broken` tells."""
        self._loop.call_soon_threadsafe(self._requests.put_nowait, request)

    async def run(self) -> None:
        """Connect, carry messages, and connect again when the stream has broken, until cancelled."""
        retry_s = FIRST_RETRY_S
        while True:
            try:
                self.fingerprint = (await self._client.status(STATUS_WITHIN_S)).fingerprint
                self._requests = asyncio.Queue()
                self.connected = True
                retry_s = FIRST_RETRY_S
                async for response in self._client.verify(self._outgoing()):
                    self._received(response)
                raise ConnectionError("the replica has closed the stream")
            except (WealdError, ConnectionError) as error:
                if self.connected:
                    _log.warning("the stream to %s has broken: %s", self.address, error)
                    self.connected = False
                    self._broken(self, _gone(self.address, error))
            await asyncio.sleep(retry_s * random.uniform(0.5, 1.0))
            retry_s = min(2 * retry_s, LAST_RETRY_S)

    async def _outgoing(self) -> AsyncIterator[Request]:
        while True:
            yield await self._requests.get()


@asynccontextmanager
async def linked(
    address: str,
    tls: Tls | None,
    received: Callable[[Response], None],
    broken: Callable[[VerifyLink, WealdError], None],
) -> AsyncIterator[VerifyLink]:
    """A link to host:port that keeps itself connected until the end; arguments as for `VerifyLink`."""
    async with connect(address, tls) as channel:
        link = VerifyLink(address, VerifyClient(channel), received, broken)
        running = asyncio.create_task(link.run())
        try:
            yield link
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running


def _gone(address: str, error: Exception) -> WealdError:
    return WealdError(
        ErrorCode.UNAVAILABLE,
        f"the verify replica at {address} is gone ({error}); send the request again with what was delivered",
        retry_after_s=1.0,
    )
