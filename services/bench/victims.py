"""A cluster on one machine whose every process can be killed, frozen, cut off and started again."""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from services.bench.proxy import Proxy, proxied
from services.bench.replicas import WITHIN_S, Forked
from services.bench.stages import Moment, Orders
from services.gateway.drafters import Drafters
from services.sessions.embedded import EmbeddedRedis, embedded
from services.sessions.opening import opened
from services.sessions.registry import Directory
from services.sessions.store import Store
from services.types.errors import WealdError
from services.types.messages import DraftStatus, Load, VerifyStatus
from services.types.replica import ReplicaKind
from services.wire.channel import connect
from services.wire.clients import DraftClient, VerifyClient

POLL_S = 0.02
PATIENCE_S = 60.0
"""For what comes within a second unless something is broken."""


class Victim:
    """One replica behind a proxy, which keeps its address through all its lives."""

    def __init__(
        self, kind: ReplicaKind, name: str, arguments: Sequence[object], proxy: Proxy, log: Path
    ) -> None:
        """A replica that does not run yet.

        Args:
            kind: which service.
            name: tells it from the others.
            arguments: of its command, the address excepted.
            proxy: stands in front of it.
            log: the directory for its log and its orders.
        """
        self.kind = kind
        self.name = name
        self.proxy = proxy
        self.running = False
        """Whether it serves, frozen or not."""
        self.frozen = False
        place = "--port", 0, "--advertise", proxy.address
        self._arguments = (kind, *arguments, *place, "--log-level", "info")
        self._log = log / f"{name}.log"
        self._file = log / f"{name}.orders"
        self.orders = Orders(self._file)
        self._forked: Forked

    async def start(self) -> None:
        """Start it, and wait until it serves.

        Raises:
            WealdError: `UNAVAILABLE` when it does not.
        """
        self.orders.withdraw()
        self._forked = Forked(*self._arguments, log=self._log, orders=self._file)
        self.proxy.target = await asyncio.to_thread(self._forked.ready)
        self.running = True

    async def ended(self, within_s: float = PATIENCE_S) -> int:
        """Wait for its end; the exit status, that of a signal being negative.

        Raises:
            TimeoutError: it goes on.
        """
        await until(lambda: not self._forked.process.is_alive(), within_s)
        self.running = self.frozen = False
        self.proxy.target = None
        return self._forked.stop()

    async def kill(self) -> None:
        """End it without notice, whatever it does."""
        self._forked.send_signal(signal.SIGKILL)
        await self.ended()

    async def die_at(self, stage: str, moment: Moment, within_s: float = PATIENCE_S) -> bool:
        """End it without notice at a stage of a round; whether it came there in time."""
        self.orders.give(stage, moment, signal.SIGKILL)
        try:
            await self.ended(within_s)
        except TimeoutError:
            self.orders.withdraw()
            return False
        return True

    async def freeze_at(self, stage: str, moment: Moment, within_s: float = PATIENCE_S) -> bool:
        """Stop it at a stage of a round, until `thaw`; whether it came there in time."""
        self.orders.give(stage, moment, signal.SIGSTOP)
        try:
            await until(lambda: not self.orders.standing, within_s)
        except TimeoutError:
            self.orders.withdraw()
            return False
        self.frozen = True
        return True

    def freeze(self) -> None:
        """Stop it, until `thaw`, whatever it does."""
        self._forked.send_signal(signal.SIGSTOP)
        self.frozen = True

    def thaw(self) -> None:
        """Let it go on."""
        self._forked.send_signal(signal.SIGCONT)
        self.frozen = False

    def drain(self) -> None:
        """Ask it to hand over what it has, and to end."""
        self._forked.send_signal(signal.SIGTERM)

    async def status(self) -> VerifyStatus | DraftStatus:
        """What it says of itself. Raises `WealdError` when it does not."""
        async with connect(self.proxy.address) as channel:
            client = VerifyClient(channel) if self.kind is ReplicaKind.VERIFY else DraftClient(channel)
            return await client.status(WITHIN_S)

    async def vacant(self) -> bool:
        """Whether it answers, and holds neither a session nor a page."""
        try:
            status = await self.status()
        except WealdError:
            return False
        if isinstance(status, VerifyStatus):
            return status.load == Load(0, 0, status.num_pages)
        return (status.running, status.free_pages) == (0, status.num_pages)

    async def linked(self, addresses: Collection[str]) -> bool:
        """Whether this draft replica is connected to the verify replicas at these addresses."""
        try:
            status = await self.status()
        except WealdError:
            return False
        return isinstance(status, DraftStatus) and all(status.verifiers.get(address) for address in addresses)

    async def close(self) -> None:
        """End it for good."""
        if self.running:
            await self.kill()
        self.orders.close()


class Vault:
    """The Redis of the cluster, always on the same data."""

    def __init__(self, directory: Path) -> None:
        """One that does not run yet, and will keep its data in this directory."""
        self.running = False
        self._directory = directory
        self._stack = ExitStack()
        self._redis: EmbeddedRedis

    @property
    def url(self) -> str:
        """Where it listens, the same through all its lives."""
        return self._redis.url

    async def start(self) -> None:
        """Start it, and wait until it serves."""
        self._redis = await asyncio.to_thread(self._stack.enter_context, embedded(self._directory))
        self.running = True

    async def kill(self) -> None:
        """End it without notice."""
        self._redis.process.kill()
        await self.close()

    async def close(self) -> None:
        """End it, if it runs."""
        self.running = False
        await asyncio.to_thread(self._stack.close)


@dataclass(frozen=True)
class Cluster:
    """What a test or a benchmark of failures works on."""

    verifiers: list[Victim]
    drafters: list[Victim]
    vault: Vault
    store: Store
    """The same Redis, for questions."""
    callers: Drafters
    """The draft replicas as callers find them, through the registry."""

    @property
    def victims(self) -> list[Victim]:
        """All replicas."""
        return [*self.verifiers, *self.drafters]

    async def listed(self, within_s: float = PATIENCE_S) -> None:
        """Wait until callers find all draft replicas, and these are linked to all verify replicas.

        Raises:
            TimeoutError: they do not in time.
        """
        addresses = {victim.proxy.address for victim in self.drafters}
        await until(lambda: self.callers.live().keys() == addresses, within_s)
        verifiers = [victim.proxy.address for victim in self.verifiers]
        async with asyncio.timeout(within_s):
            for victim in self.drafters:
                while not await victim.linked(verifiers):
                    await asyncio.sleep(POLL_S)

    async def vacant(self, within_s: float = PATIENCE_S) -> None:
        """Wait until no replica that runs holds a session or a page.

        Raises:
            TimeoutError: one still does.
        """
        async with asyncio.timeout(within_s):
            for victim in self.victims:
                while victim.running and not await victim.vacant():
                    await asyncio.sleep(POLL_S)


@asynccontextmanager
async def cluster(
    directory: Path, verify: Sequence[object], draft: Sequence[object], count: int = 2
) -> AsyncIterator[Cluster]:
    """A Redis and so many replicas of each kind, which find each other through it; all end with the context.

    Args:
        directory: for logs and data.
        verify: arguments of verify replicas, besides address and store.
        draft: those of draft replicas.
        count: of each kind.
    """
    async with AsyncExitStack() as stack:
        vault = Vault(directory / "redis")
        await vault.start()
        stack.push_async_callback(vault.close)
        store = await stack.enter_async_context(opened(vault.url))

        async def started(kind: ReplicaKind, arguments: Sequence[object], i: int) -> Victim:
            proxy = await stack.enter_async_context(proxied())
            named = (*arguments, "--store", vault.url)
            victim = Victim(kind, f"{kind}-{i}", named, proxy, directory)
            stack.push_async_callback(victim.close)
            await victim.start()
            return victim

        verifiers = [await started(ReplicaKind.VERIFY, verify, i) for i in range(count)]
        drafters = [await started(ReplicaKind.DRAFT, draft, i) for i in range(count)]
        callers = await stack.enter_async_context(Drafters(directory=Directory(store, ReplicaKind.DRAFT)))
        running = Cluster(verifiers, drafters, vault, store, callers)
        await running.listed()
        yield running


async def until(holds: Callable[[], bool], within_s: float) -> None:
    """Wait until something holds.

    Raises:
        TimeoutError: it does not in time.
    """
    async with asyncio.timeout(within_s):
        while not holds():
            await asyncio.sleep(POLL_S)
