"""The draft replicas a caller can choose from, and the connections to them."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Self

from services.sessions.opening import opened
from services.sessions.registry import Directory
from services.sessions.routing import route
from services.types.errors import ErrorCode, WealdError
from services.types.replica import Replica, ReplicaKind
from services.wire.channel import connect
from services.wire.clients import DraftClient
from services.wire.transport import Tls

LIST_S = 3.0
"""The registry is waited for so long at first; what it lists later is used, too."""
ANSWER_S = 2.0
"""A replica that does not answer within so many seconds is no reason to leave another one."""


@dataclass(slots=True)
class _Connection:
    client: DraftClient
    close: Callable[[], Awaitable[None]]
    calls: int = 0
    """That are running over it."""


class Drafters:
    """Draft replicas that were named, those that a registry lists, or both; within it, they can be called."""

    def __init__(
        self,
        addresses: Collection[str] = (),
        directory: Directory | None = None,
        model: str | None = None,
        tls: Tls | None = None,
    ) -> None:
        """Choose among these replicas.

        Args:
            addresses: host:port of those that are named; one that the registry has as draining is left out.
            directory: the registry's draft replicas; it runs within the context.
            model: name of the target wanted, as the replicas that the registry lists have it; None: any.
            tls: as `connect` takes it.
        """
        self._addresses = frozenset(addresses)
        self._directory = directory
        self._model = model
        self._tls = tls
        self._connections: dict[str, _Connection] = {}

    async def __aenter__(self) -> Self:
        if self._directory:
            self._listing = asyncio.create_task(self._directory.run())
            with suppress(TimeoutError):
                async with asyncio.timeout(LIST_S):
                    await self._directory.first()
        return self

    async def __aexit__(self, *_: object) -> None:
        for connection in self._connections.values():
            await connection.close()
        if self._directory:
            self._listing.cancel()
            with suppress(asyncio.CancelledError):
                await self._listing

    def live(self, target: bytes | None = None) -> dict[str, int]:
        """Sessions at each replica that takes new ones: as it says, or this caller's if they are more.

        Args:
            target: the fingerprint of the one wanted; replicas that say they have another are left out.
        """
        listed = self._listed()
        sessions = dict.fromkeys(self._addresses, 0) | {r.address: r.sessions for r in listed}
        for replica in listed:
            if replica.draining or target not in (None, replica.fingerprint):
                del sessions[replica.address]
        return {
            address: max(count, self._connections[address].calls if address in self._connections else 0)
            for address, count in sessions.items()
        }

    def target(self, address: str) -> bytes | None:
        """The fingerprint of a replica's target; None when the registry does not list it."""
        return next((one.fingerprint for one in self._listed() if one.address == address), None)

    def choose(self, tokens: Sequence[int], avoid: Collection[str] = (), target: bytes | None = None) -> str:
        """The address of the replica for a session of these tokens; one of `avoid` if there is no other.

        `target` is as in `live`.

        Raises:
            WealdError: `UNAVAILABLE` when there is none at all.
        """
        live = self.live(target)
        if not live and self._directory and self._directory.replicas and not self._listed():
            targets = ", ".join(sorted({replica.model for replica in self._directory.replicas}))
            raise WealdError(
                ErrorCode.UNAVAILABLE,
                f"the registry lists draft replicas of {targets}, none of {self._model}; name the model as "
                "they do, or name replicas",
            )
        others = {address: count for address, count in live.items() if address not in avoid}
        return route(ReplicaKind.DRAFT, tokens, others or live)

    @asynccontextmanager
    async def client(self, address: str) -> AsyncIterator[DraftClient]:
        """The replica at an address, for one call."""
        if address not in self._connections:
            channel = connect(address, self._tls)
            self._connections[address] = _Connection(DraftClient(channel), channel.close)
        connection = self._connections[address]
        connection.calls += 1
        try:
            yield connection.client
        finally:
            connection.calls -= 1
            await self._let_go()

    async def answers(self, address: str) -> bool:
        """Whether a replica can be reached now."""
        async with self.client(address) as client:
            try:
                await client.status(ANSWER_S)
            except WealdError:
                return False
            return True

    def _listed(self) -> Sequence[Replica]:
        listed = self._directory.replicas if self._directory else ()
        return [replica for replica in listed if self._model in (None, replica.model)]

    async def _let_go(self) -> None:
        """Close what leads to replicas that are gone; others stay, for the next call."""
        known = self._addresses | {replica.address for replica in self._listed()}
        for address, connection in list(self._connections.items()):
            if not connection.calls and address not in known:
                del self._connections[address]
                await connection.close()


@asynccontextmanager
async def found(
    endpoints: Sequence[str], store: str | None, model: str, tls: Tls | None
) -> AsyncIterator[Drafters]:
    """The draft replicas at these addresses, and those of this target that the store lists.

    Raises:
        WealdError: `INVALID_ARGUMENT` when `store` is no URL of a store.
    """
    async with AsyncExitStack() as stack:
        directory = None
        if store:
            directory = Directory(await stack.enter_async_context(opened(store)), ReplicaKind.DRAFT)
        yield await stack.enter_async_context(Drafters(endpoints, directory, model, tls))
