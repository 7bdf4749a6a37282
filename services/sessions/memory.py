"""The store of one process, and the plain twin of the real one."""

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace

from services.sessions.store import FINISHED_S, UNFINISHED_S, Append, exists, stale, unknown
from services.types.errors import WealdError
from services.types.replica import Replica, ReplicaKind
from services.types.session import Record, lease_epoch


class MemoryStore:
    """Sessions and replicas in dictionaries; it ends with its process."""

    def __init__(
        self,
        unfinished_s: float = UNFINISHED_S,
        finished_s: float = FINISHED_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Keep sessions for so many seconds after their last write; `clock` tells seconds."""
        self._unfinished_s, self._finished_s, self._clock = unfinished_s, finished_s, clock
        # Each with when it expires. Whatever is written moves to the end, so what expires first stands first.
        self._unfinished: OrderedDict[str, tuple[Record, float]] = OrderedDict()
        self._finished: OrderedDict[str, tuple[Record, float]] = OrderedDict()
        self._replicas: dict[tuple[ReplicaKind, str], tuple[Replica, float]] = {}

    async def create(self, record: Record) -> None:
        """As `Store` says."""
        if self._find(record.session.id):
            raise exists(record.session.id)
        self._keep(record)

    async def load(self, id: str) -> Record:
        """As `Store` says."""
        return self._known(id)

    async def lease(self, id: str) -> Record:
        """As `Store` says."""
        record = self._known(id)
        return self._keep(replace(record, epoch=lease_epoch(record.epoch)))

    async def append(self, appends: Sequence[Append]) -> list[int | WealdError]:
        """As `Store` says."""
        return [self._append(append) for append in appends]

    async def register(self, replica: Replica, ttl_s: float) -> None:
        """As `Store` says."""
        self._replicas[replica.kind, replica.address] = replica, self._clock() + ttl_s

    async def deregister(self, kind: ReplicaKind, address: str) -> None:
        """As `Store` says."""
        self._replicas.pop((kind, address), None)

    async def replicas(self, kind: ReplicaKind) -> list[Replica]:
        """As `Store` says."""
        now = self._clock()
        self._replicas = {key: found for key, found in self._replicas.items() if found[1] > now}
        listed = [replica for replica, _ in self._replicas.values() if replica.kind is kind]
        return sorted(listed, key=lambda replica: replica.address)

    async def close(self) -> None:
        """As `Store` says."""

    def _append(self, append: Append) -> int | WealdError:
        record = self._find(append.session)
        if record is None:
            return unknown(append.session)
        if append.epoch < record.epoch:
            return stale(append.session, append.epoch, record.epoch)
        output, end = record.session.output, append.position + len(append.tokens)
        if append.position > len(output):
            return len(output)
        behind = output[end:] if append.epoch == record.epoch else ()
        output = output[: append.position] + append.tokens + behind
        session = replace(record.session, output=output)
        finish = append.finish or (record.finish if append.epoch == record.epoch else None)
        self._keep(replace(record, session=session, epoch=append.epoch, finish=finish))
        return len(output)

    def _keep(self, record: Record) -> Record:
        id = record.session.id
        self._unfinished.pop(id, None)
        self._finished.pop(id, None)
        if record.finish:
            self._finished[id] = record, self._clock() + self._finished_s
        else:
            self._unfinished[id] = record, self._clock() + self._unfinished_s
        return record

    def _known(self, id: str) -> Record:
        record = self._find(id)
        if record is None:
            raise unknown(id)
        return record

    def _find(self, id: str) -> Record | None:
        now = self._clock()
        for sessions in (self._unfinished, self._finished):
            while sessions and next(iter(sessions.values()))[1] <= now:
                sessions.popitem(last=False)
        found = self._unfinished.get(id) or self._finished.get(id)
        return found[0] if found else None
