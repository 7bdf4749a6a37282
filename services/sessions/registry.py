"""Who is alive: replicas say so of themselves, and others keep the list."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

from services.sessions.store import Store
from services.types.errors import WealdError
from services.types.replica import Replica, ReplicaKind

HEARTBEAT_S = 1.0
"""Between two signs of life of a replica, and between two looks at the list."""
TTL_S = 5.0
"""A replica is listed so long after its last sign of life: several can be late or get lost before a process
that is only busy counts as dead. A dead one costs its callers a failed attempt until then.
"""
MISSES = 5
"""A replica is gone when so many answers in a row lack it. A store that has been away may have forgotten the
living; they are back within a heartbeat, or two more where an attempt to register still waits for an answer.
"""
DEREGISTER_WITHIN_S = 1.0
"""The end of a process waits no longer for the store."""

_log = logging.getLogger(__name__)


async def announce(store: Store, describe: Callable[[], Replica]) -> None:
    """List a replica, as `describe` says at each heartbeat, until cancelled; then list it no longer."""
    outage = _Outage("register with the store; running sessions do not need it")
    replica = describe()
    try:
        while True:
            with outage:
                await store.register(replica, TTL_S)
            await asyncio.sleep(HEARTBEAT_S)
            replica = describe()
    finally:
        with suppress(WealdError, TimeoutError):
            async with asyncio.timeout(DEREGISTER_WITHIN_S):
                await store.deregister(replica.kind, replica.address)


async def everyone(store: Store) -> list[Replica]:
    """The live replicas of all kinds. Raises as `Store.replicas` does."""
    return [replica for kind in ReplicaKind for replica in await store.replicas(kind)]


class Directory:
    """The live replicas of one kind, as the store last told; it belongs to the event loop."""

    def __init__(
        self, store: Store, kind: ReplicaKind, told: Callable[[list[Replica]], None] | None = None
    ) -> None:
        """Follow what `store` lists; `told` is called with the replicas after each of its answers."""
        self.replicas: list[Replica] = []
        """By address. While the store is lost the last ones stand."""
        self._store = store
        self._kind = kind
        self._told = told
        self._missed: Counter[str] = Counter()
        self._answered = asyncio.Event()

    async def run(self) -> None:
        """Ask with every heartbeat, until cancelled."""
        outage = _Outage(f"look for {self._kind} replicas in the store; the last ones known stand")
        while True:
            with outage:
                self._take(await self._store.replicas(self._kind))
            await asyncio.sleep(HEARTBEAT_S)

    async def first(self) -> list[Replica]:
        """The replicas, once the store has answered for the first time."""
        await self._answered.wait()
        return self.replicas

    def _take(self, listed: list[Replica]) -> None:
        present = {replica.address for replica in listed}
        missing = [replica for replica in self.replicas if replica.address not in present]
        self._missed = Counter({replica.address: self._missed[replica.address] + 1 for replica in missing})
        kept = [replica for replica in missing if self._missed[replica.address] < MISSES]
        self.replicas = sorted([*listed, *kept], key=lambda replica: replica.address)
        self._answered.set()
        if self._told:
            self._told(self.replicas)


class _Outage:
    """A block that a lost store may fail: the log says when that begins and when it is over."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._lost = False

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        lost = isinstance(error, WealdError)
        if lost and not self._lost:
            _log.warning("cannot %s: %s", self._what, error)
        elif self._lost and error is None:
            _log.warning("the store is back")
        self._lost = lost or (self._lost and error is not None)
        return lost
