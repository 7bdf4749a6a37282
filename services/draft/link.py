"""The streams to the verify replicas, each of which carries all sessions that are drafted for it here."""

import asyncio
import logging
from collections.abc import AsyncIterator, Collection, Iterable
from typing import Protocol, Self

from services.types.errors import ErrorCode, WealdError
from services.types.messages import Draining, Request, Response
from services.types.replica import Replica
from services.types.retry import backoff
from services.wire.channel import connect
from services.wire.clients import VerifyClient
from services.wire.transport import Tls

FIRST_RETRY_S, LAST_RETRY_S = 0.1, 2.0
"""Between attempts to connect."""
STATUS_WITHIN_S = 5.0

_log = logging.getLogger(__name__)


class Listener(Protocol):
    """Who hears of what happens on links, in the event loop."""

    def linked(self, link: "VerifyLink") -> None:
        """A stream has begun."""

    def received(self, link: "VerifyLink", response: Response) -> None:
        """The replica says something."""

    def broken(self, link: "VerifyLink", error: WealdError) -> None:
        """The stream has ended; what it carried is lost to the link."""


class VerifyLink:
    """Keeps one stream open; everything but `send` belongs to the event loop."""

    def __init__(self, address: str, tls: Tls | None, listener: Listener) -> None:
        """Prepare a link to host:port; the listener hears of what happens on it."""
        self.address = address
        self.connected = False
        self.draining = False
        """Whether the replica goes away: it gets no more sessions."""
        self.listed = True
        """Whether the replica is named by the user, or its heartbeat came in time."""
        self.load = 0
        """Sessions of the replica, by its last heartbeat."""
        self.fingerprint = b""
        """Of the replica's target, once connected."""
        self._tls = tls
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._requests: asyncio.Queue[Request] = asyncio.Queue()

    @property
    def open(self) -> bool:
        """Whether a session can be opened there."""
        return self.connected and self.listed and not self.draining

    def send(self, request: Request) -> None:
        """Send from any thread; lost if the stream breaks, which the listener is told."""
        self._loop.call_soon_threadsafe(self._requests.put_nowait, request)

    async def run(self) -> None:
        """Connect, carry messages, and connect again when the stream has broken, until cancelled."""
        async with connect(self.address, self._tls) as channel:
            client = VerifyClient(channel)
            pauses = backoff(FIRST_RETRY_S, LAST_RETRY_S)
            while True:
                try:
                    self.fingerprint = (await client.status(STATUS_WITHIN_S)).fingerprint
                    self._requests = asyncio.Queue()
                    self.connected, self.draining = True, False
                    pauses = backoff(FIRST_RETRY_S, LAST_RETRY_S)
                    self._listener.linked(self)
                    async for response in client.verify(self._outgoing()):
                        if isinstance(response, Draining):
                            self.draining = True
                        self._listener.received(self, response)
                    raise ConnectionError("the replica has closed the stream")
                except (WealdError, ConnectionError) as error:
                    if self.connected:
                        _log.warning("the stream to %s has broken: %s", self.address, error)
                        self.connected = False
                        self._listener.broken(self, _gone(self.address, error))
                await asyncio.sleep(next(pauses))

    async def _outgoing(self) -> AsyncIterator[Request]:
        while True:
            yield await self._requests.get()


class Links(dict[str, VerifyLink]):
    """The verify replicas by address: those that are named, and those that the registry lists."""

    def __init__(self, named: Collection[str], tls: Tls | None, listener: Listener) -> None:
        """Link to these replicas; leaving the context ends all streams."""
        super().__init__()
        self._named = frozenset(named)
        self._tls = tls
        self._listener = listener
        self._running: dict[str, asyncio.Task[None]] = {}
        for address in self._named:
            self._add(address)

    def told(self, replicas: Iterable[Replica]) -> None:
        """Take what the registry lists: new replicas are linked, those that left get no more sessions."""
        listed = {replica.address: replica for replica in replicas}
        for address in listed.keys() - self.keys():
            self._add(address)
        for address in self.keys() - self._named:
            link, replica = self[address], listed.get(address)
            link.listed = replica is not None
            if replica:
                link.load = replica.sessions
                link.draining |= replica.draining
            elif not link.connected:
                del self[address]
                self._running.pop(address).cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)

    def _add(self, address: str) -> None:
        self[address] = VerifyLink(address, self._tls, self._listener)
        self._running[address] = asyncio.create_task(self[address].run())


def _gone(address: str, error: Exception) -> WealdError:
    return WealdError(
        ErrorCode.UNAVAILABLE,
        f"the verify replica at {address} is gone ({error}); send the request again with what was delivered",
        retry_after_s=1.0,
    )
