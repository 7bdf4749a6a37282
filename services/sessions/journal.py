"""What the sessions of a draft replica have committed, on its way to the store."""

import asyncio
import logging
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from services.sessions.store import Append, Store, stale
from services.types.errors import ErrorCode, WealdError, incompatible, invalid
from services.types.retry import backoff
from services.types.sampling import SEED_BITS
from services.types.session import FinishReason, Record, Session, lease_epoch

GATHER_S = 0.05
"""Tokens gather for so long before they are written: 20 exchanges a second cost little, and of a replica that
dies no more than the last moment is computed again.
"""
EXCHANGE_TOKENS = 1 << 16
"""An exchange is closed to further sessions from so many tokens on: after an outage, too, it must end within
the store's time limit and not hold up the event loop.
"""
BACKLOG_TOKENS = 1 << 20
"""With so many tokens unwritten no session is accepted: they are held in memory until the store is back."""
FIRST_RETRY_S, LAST_RETRY_S = 0.1, 2.0
"""Between attempts to reach a lost store."""

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Entry:
    """One session here, and how much of it the store has."""

    began: Record
    """As it began here."""
    epoch: int
    output: "array[int]"
    finish: FinishReason | None
    created: bool = False
    """Whether the store has its record."""
    written: int = 0
    """Output tokens that the store has."""
    ended: bool = False
    """Whether the store has its finish."""
    left: bool = False
    """Whether nobody adds to it any more."""

    @classmethod
    def begun(cls, record: Record) -> "_Entry":
        """A session from this record on."""
        return cls(record, record.epoch, array("I", record.session.output), record.finish)

    @property
    def record(self) -> Record:
        """As it is now."""
        session = replace(self.began.session, output=tuple(self.output))
        return replace(self.began, session=session, epoch=self.epoch, finish=self.finish)

    @property
    def unwritten(self) -> int:
        """Tokens that the store lacks: those of the prompt too where it lacks the record, hence some then."""
        return len(self.output) - self.written + (0 if self.created else len(self.began.session.prompt))

    @property
    def dirty(self) -> bool:
        """Whether the store lacks anything."""
        return self.unwritten > 0 or (self.finish is not None and not self.ended)

    def append(self) -> Append:
        """What the store lacks."""
        tokens = tuple(self.output[self.written :])
        return Append(self.began.session.id, self.epoch, self.written, tokens, self.finish)

    def now_has(self, output: int, finish: FinishReason | None) -> None:
        """The store has the record with so many output tokens, and this finish."""
        self.created, self.written, self.ended = True, output, finish is not None


class Journal:
    """Leases sessions and writes what they commit, behind their back; it belongs to the event loop.

    It keeps the whole text of every session served here and how much of it the store has acknowledged, and
    writes the difference; so it does after an exchange that failed, too, and for a store that has forgotten.
    While the store is lost sessions go on, and new ones are accepted under an epoch by the clock as long as
    `BACKLOG_TOKENS` has room.
    """

    def __init__(self, store: Store, fenced: Callable[[str, int], None]) -> None:
        """Write to `store`; `fenced` is told the id and epoch of a session that another replica has now."""
        self.lost = False
        """Whether the store could not be reached; something is unwritten then, so `run` sees it return."""
        self.counters: Counter[str] = Counter()
        """`journal_writes`: exchanges with the store that wrote; `journal_tokens`: output tokens in them;
        `journal_failures`: exchanges that failed; `fenced_sessions`.
        """
        self._store = store
        self._fenced = fenced
        self._entries: dict[str, _Entry] = {}
        self._unwritten = asyncio.Event()
        self._exchanging = asyncio.Lock()

    @property
    def backlog(self) -> int:
        """Tokens that the store has not acknowledged, prompts of sessions that it does not know included."""
        return sum(entry.unwritten for entry in self._entries.values())

    async def begin(self, session: Session, fingerprint: bytes) -> Record:
        """Lease a session for the target of this fingerprint: a new one, or one that was served before.

        An empty prompt says that only the journal knows the session. Without a seed in its parameters the
        seed of the record counts. One that is still served here is superseded.

        Returns:
            Its record: the epoch to serve it under, and the longest output known, from which to go on.

        Raises:
            WealdError: `INVALID_ARGUMENT` when the id is another request's; `INCOMPATIBLE_CHECKPOINT` when it
                is text of another target; `DIVERGED` when the outputs known are not one text;
                `UNKNOWN_SESSION` without a prompt; `STALE_EPOCH` when it was begun twice at once;
                `UNAVAILABLE` when the store is lost and only the journal knows the session, or when too many
                tokens are unwritten.
        """
        id = session.id
        if self.backlog >= BACKLOG_TOKENS:
            raise _full(self.backlog)
        while not self.lost and (here := self._entries.get(id)) and here.dirty:
            await self._write()
        try:
            entry = await self._lease(session, fingerprint)
        except WealdError as error:
            entry = self._accept(session, fingerprint, error)
        if (here := self._entries.get(id)) and here.epoch > entry.epoch:
            raise stale(id, entry.epoch, here.epoch)
        self._entries[id] = entry
        if entry.dirty:
            self._unwritten.set()
        return entry.began

    def write(self, id: str, epoch: int, tokens: Sequence[int], finish: FinishReason | None = None) -> None:
        """Add committed tokens; a higher epoch is a move of the session, with a lower one they are late."""
        entry = self._entries.get(id)
        if entry is None or epoch < entry.epoch:
            return
        entry.epoch = epoch
        entry.output.extend(tokens)
        entry.finish = finish or entry.finish
        self._unwritten.set()

    def leave(self, id: str, epoch: int) -> None:
        """Nobody adds to this session any more; it is forgotten here once it is written."""
        entry = self._entries.get(id)
        if entry and epoch >= entry.epoch:
            entry.left = True
            self._forget(entry)

    async def run(self) -> None:
        """Write what comes, until cancelled."""
        while True:
            await self._unwritten.wait()
            await asyncio.sleep(GATHER_S)
            pauses = backoff(FIRST_RETRY_S, LAST_RETRY_S)
            while not await self._write():
                await asyncio.sleep(next(pauses))

    async def flush(self, within_s: float) -> bool:
        """Write what is left, with this much patience; whether the store has everything."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while self._dirty():
                    if not await self._write():
                        await asyncio.sleep(FIRST_RETRY_S)
        return not self._dirty()

    async def _write(self) -> bool:
        """One exchange, if anything is unwritten; False when it failed. It may have happened all the same."""
        async with self._exchanging:
            try:
                await self._exchange()
            except WealdError as error:
                self._lose(error)
                self.counters["journal_failures"] += 1
                return False
            if not self._dirty():
                self._unwritten.clear()
            return True

    async def _exchange(self) -> None:
        batch = self._batch()
        for entry in batch:
            if not entry.created:
                await self._create(entry)
        lacking = [entry for entry in batch if entry.dirty]
        appends = [entry.append() for entry in lacking]
        results = await self._store.append(appends) if appends else []
        settled = [self._settle(*each) for each in zip(lacking, appends, results, strict=True)]
        if failures := [failure for failure in settled if failure]:
            raise failures[0]
        if batch:
            self.counters["journal_writes"] += 1
            self._found()

    def _batch(self) -> list[_Entry]:
        """Sessions for one exchange."""
        batch, tokens = [], 0
        for entry in self._entries.values():
            if entry.dirty and tokens < EXCHANGE_TOKENS:
                batch.append(entry)
                tokens += entry.unwritten
        return batch

    async def _create(self, entry: _Entry) -> None:
        record = entry.record
        try:
            await self._store.create(record)
            entry.now_has(len(record.session.output), record.finish)
            self.counters["journal_tokens"] += entry.written
        except WealdError as error:
            if error.code is not ErrorCode.ALREADY_EXISTS:
                raise
            # Another replica's, or ours of an exchange that seemed to fail: this text replaces it.
            entry.now_has(0, None)
        self._forget(entry)

    def _settle(self, entry: _Entry, append: Append, result: int | WealdError) -> WealdError | None:
        """Take in what the store says to an append; returns what says nothing about its session."""
        if self._entries.get(append.session) is not entry:
            return None  # begun anew meanwhile
        match result:
            case int() if result < append.position:
                # The store has forgotten some, and what it has left may be another's: all of it again.
                entry.now_has(0, None)
            case int():
                entry.now_has(append.position + len(append.tokens), append.finish)
                self.counters["journal_tokens"] += len(append.tokens)
                self._forget(entry)
            case WealdError(code=ErrorCode.UNKNOWN_SESSION):
                entry.created, entry.written, entry.ended = False, 0, False
            case WealdError(code=ErrorCode.STALE_EPOCH):
                _log.warning("%s", result)
                del self._entries[append.session]
                self.counters["fenced_sessions"] += 1
                self._fenced(append.session, entry.epoch)
            case _:
                return result
        return None

    def _forget(self, entry: _Entry) -> None:
        """Drop a session that is over, once the store has all of it."""
        id = entry.began.session.id
        if (entry.left or entry.finish) and not entry.dirty and self._entries.get(id) is entry:
            del self._entries[id]

    def _dirty(self) -> bool:
        return any(entry.dirty for entry in self._entries.values())

    async def _lease(self, session: Session, fingerprint: bytes) -> _Entry:
        """The session as the store has it, under a new epoch."""
        if self.lost:
            raise _lost(session.id)
        record = await self._created(session, fingerprint)
        if record is None:
            # A lease fences whoever serves the session, so a request that must be refused may not get there.
            _joined(await self._store.load(session.id), session, fingerprint)
            record = await self._store.lease(session.id)
        entry = _Entry.begun(_joined(record, session, fingerprint))
        entry.now_has(len(record.session.output), record.finish)
        return entry

    async def _created(self, session: Session, fingerprint: bytes) -> Record | None:
        """The record of a new session, now in the store; None for one that the store has to know."""
        if not session.prompt:
            return None
        record = Record(session, fingerprint, lease_epoch())
        try:
            await self._store.create(record)
        except WealdError as error:
            if error.code is not ErrorCode.ALREADY_EXISTS:
                raise
            return None
        return record

    def _accept(self, session: Session, fingerprint: bytes, error: WealdError) -> _Entry:
        """The session as far as it is known here, under an epoch by the clock, since the store fails."""
        lost = error.code is ErrorCode.UNAVAILABLE
        here = self._entries.get(session.id)
        known = here.record if here else Record(session, fingerprint, 0)
        if lost and not known.session.prompt:
            raise _lost(session.id) from error
        # A session that the store knew can have expired when it was to be leased.
        expired = error.code is ErrorCode.UNKNOWN_SESSION and known.session.prompt
        if not lost and not expired:
            raise error
        record = _joined(replace(known, epoch=lease_epoch(known.epoch)), session, fingerprint)
        if lost:
            self._lose(error)
        return _Entry.begun(record)

    def _lose(self, error: WealdError) -> None:
        if not self.lost:
            _log.warning("the journal is lost, sessions go on without it: %s", error)
        self.lost = True

    def _found(self) -> None:
        if self.lost:
            _log.warning("the journal is back; %d tokens are left to write", self.backlog)
        self.lost = False


def _joined(record: Record, session: Session, fingerprint: bytes) -> Record:
    """The record with the longer of two outputs, which must be of one request and one text."""
    known = record.session
    if record.fingerprint != fingerprint:
        raise incompatible(
            f"session {session.id} is text of another target; go on at a replica that serves that one, or "
            "choose another id"
        )
    if session.prompt and not _same_request(known, session):
        raise invalid(
            f"session id {session.id} is used for another request, with another prompt, seed or parameters; "
            "choose another id"
        )
    common = min(len(known.output), len(session.output))
    ended = record.finish is not None and len(session.output) > common
    if known.output[:common] != session.output[:common] or ended:
        raise WealdError(
            ErrorCode.DIVERGED,
            f"what was delivered of session {session.id} is not the text that the journal has of it; "
            "send the request again under another id",
        )
    return replace(record, session=replace(known, output=max(known.output, session.output, key=len)))


def _same_request(known: Session, session: Session) -> bool:
    same_seed = session.params.seed is None or (known.seed - session.seed) % (1 << SEED_BITS) == 0
    return (
        known.prompt == session.prompt
        and replace(known.params, seed=None) == replace(session.params, seed=None)
        and same_seed
    )


def _lost(id: str) -> WealdError:
    return WealdError(
        ErrorCode.UNAVAILABLE,
        f"the journal cannot be reached, and only it knows session {id}; resume it again shortly",
        retry_after_s=LAST_RETRY_S,
    )


def _full(backlog: int) -> WealdError:
    return WealdError(
        ErrorCode.UNAVAILABLE,
        f"the journal is {backlog} tokens behind, so no session is accepted here; ask another draft replica, "
        "or retry shortly",
        retry_after_s=LAST_RETRY_S,
    )
