"""The draft service: sessions with their callers, their verify replicas and their journal."""

import asyncio
import logging
import secrets
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, replace

from services.draft.drafter import Drafter
from services.draft.generating import Generating, Lost, Opening
from services.draft.link import VerifyLink
from services.draft.thread import DraftThread
from services.draft.tracing import Tracer
from services.sessions.journal import Journal
from services.sessions.routing import route
from services.sessions.store import Store
from services.speculation.calibration import Band
from services.telemetry.logs import about
from services.types.errors import ErrorCode, WealdError, incompatible, invalid
from services.types.messages import (
    Call,
    Close,
    Draining,
    Event,
    Failure,
    Features,
    Finished,
    Moved,
    Reliability,
    Replies,
    Reply,
    Response,
    Round,
    Started,
    StepTimings,
)
from services.types.replica import ReplicaKind
from services.types.sampling import SEED_BITS
from services.types.session import MOVES, Record, Session

RECOVER_S = 30.0
"""A session that loses its verify replica and finds no other for so long ends with an error."""
FLUSH_S = 5.0
"""How long the end of the service waits for the journal."""
LOSSES = frozenset({ErrorCode.UNAVAILABLE, ErrorCode.UNKNOWN_SESSION})
"""What a verify replica says of a session that can go on elsewhere."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """Where one round of one session spent its time, nanoseconds, by the clocks of both ends."""

    wall: int
    """From the arrival of the previous reply to that of this one."""
    draft: int
    """Extending, growing, reranking; of all sessions drafted together."""
    flight: int
    """From the sending of the tree to the arrival of the reply."""
    turnaround: int
    """Of these at the verifier: from the arrival of the tree to the sending of the reply."""
    step: StepTimings
    """Of these in the target step."""


class DraftService:
    """Sessions in, tokens out: the event loop talks to all sides, the thread drafts."""

    def __init__(
        self,
        drafter: Drafter,
        fingerprint: bytes,
        *,
        max_num_seqs: int,
        observe: Callable[[RoundTimes], None] | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        """Draft with `drafter`, at most `max_num_seqs` sessions at once.

        `observe` is told of every round with a tree, `tracer` of all calls.
        """
        self.drafter = drafter
        self.fingerprint = fingerprint
        self.links: Mapping[str, VerifyLink] = {}
        """Verify replicas by address."""
        self.draining = False
        """Whether this replica goes away: it takes no new sessions."""
        self._thread = DraftThread(drafter, fingerprint)
        self._counters: Counter[str] = Counter()
        self._max_num_seqs = max_num_seqs
        self._observe = observe
        self._tracer = tracer
        self._sessions: dict[str, Generating] = {}
        self._beginning = 0
        """Calls that wait for their lease."""
        self._journal: Journal
        self._writing: asyncio.Task[None]

    def __len__(self) -> int:
        return len(self._sessions)

    def start(self, store: Store) -> None:
        """Begin drafting, with the journal in `store`; the running event loop is the one that serves."""
        self._journal = Journal(store, self._fenced)
        self._writing = asyncio.create_task(self._journal.run())
        self._thread.start()

    @property
    def pass_began(self) -> float | None:
        """When the trees now in work were begun, `time.monotonic()`; None when none is."""
        return self._thread.pass_began

    def serves(self, link: VerifyLink) -> bool:
        """Whether a verify replica is connected, and serves the target that the head is for."""
        return link.connected and link.fingerprint == self.fingerprint

    def counters(self) -> dict[str, int]:
        """Since the start: trees drafted, those coupled, the time that took, sessions retired, handed over
        and recovered, tokens that went through the head, what the journal wrote and still has to write.
        """
        return {
            **self._thread.counters,
            **self._counters,
            **self._journal.counters,
            "journal_backlog_tokens": self._journal.backlog,
            "tokens_forwarded": self.drafter.tokens_forwarded,
            "trees_coupled": self.drafter.trees_coupled,
        }

    def reliability(self) -> list[Reliability]:
        """What the head's confidences have been worth, in each band of temperature that there has been."""
        told = []
        for band in Band:
            if bins := self.drafter.calibration.bins(band):
                columns = ((b.count, b.confidence, b.accepted) for b in bins)
                error = self.drafter.calibration.error(band)
                told.append(Reliability(band, error, *zip(*columns, strict=True)))
        return told

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new calls, ask callers to leave, serve those that stay; whether all ended in time."""
        self.draining = True
        for generating in self._sessions.values():
            generating.events.put_nowait(Draining())
        deadline = time.monotonic() + timeout_s
        while (self._sessions or self._beginning) and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        return not self._sessions

    async def stop(self) -> None:
        """End the thread, and write what the journal lacks if the store takes it soon."""
        await asyncio.to_thread(self._thread.stop)
        await self._journal.flush(FLUSH_S)
        self._writing.cancel()
        await asyncio.gather(self._writing, return_exceptions=True)

    async def generate(self, call: Call) -> AsyncGenerator[Event, None]:
        """Serve one call; leaving the iterator early frees what it held, here and at the verifier.

        A session that loses its verify replica goes on at another one.

        Raises:
            WealdError: as the verifier and `Journal.begin` do; `RESOURCE_EXHAUSTED` when too many sessions
                are served here; `UNAVAILABLE` when no verify replica can serve the session, for a running one
                after `RECOVER_S` seconds; `STALE_EPOCH` when a later call has taken the session over.
        """
        generating = await self._begin(call)
        try:
            while True:
                match event := await generating.events.get():
                    case WealdError():
                        raise event
                    case Lost():
                        if telling := generating.telling:
                            telling.lost(event)
                        if moved := await self._move(generating, event):
                            if telling:
                                telling.moved(moved, generating.id)
                            yield moved
                    case Started():
                        yield event
                        if generating.replay:
                            yield generating.replay
                    case Finished():
                        yield event
                        return
                    case _:
                        yield event
        finally:
            self._end(generating)
            _log.info(
                "a call is over: %s, %d tokens",
                generating.finished or sys.exception() or "left",
                len(generating.output),
                extra=about(generating.id, generating.traceparent),
            )
            if generating.telling:
                generating.telling.end(generating, sys.exception())

    def linked(self, link: VerifyLink) -> None:
        """A stream has begun: sessions that had nowhere to go leave replicas that drain."""
        for other in self.links.values():
            if other.draining:
                self._evacuate(other)

    def received(self, link: VerifyLink, response: Response) -> None:
        """Take what a verify replica says: tokens go to the caller at once, the rest to the thread."""
        match response:
            case Replies():
                for reply in response.replies:
                    if generating := self._current(reply.session, reply.epoch):
                        self._committed(generating, reply, response.timings)
            case Features():
                if generating := self._current(response.session, response.epoch):
                    self._thread.put(generating, response)
            case Failure():
                if generating := self._current(response.session, response.epoch):
                    self._failed(generating, response.error)
            case Draining():
                self._evacuate(link)

    def broken(self, link: VerifyLink, error: WealdError) -> None:
        """A stream has ended: its sessions go on elsewhere."""
        for generating in self._sessions.values():
            if generating.opening and generating.opening.link is link:
                generating.events.put_nowait(Lost(generating.opening, error))

    def _evacuate(self, link: VerifyLink) -> None:
        """Move the sessions of a replica that drains, if there is another one; otherwise they stay."""
        if self._able():
            for generating in self._sessions.values():
                opening = generating.opening
                if opening and opening.link is link and not generating.leaving:
                    generating.leaving = True
                    generating.events.put_nowait(Lost(opening, _gone(link.address), draining=True))

    def _failed(self, generating: Generating, error: WealdError) -> None:
        """A verify replica ended a session, which goes on elsewhere if that can help."""
        if generating.opening is None:
            return  # The text is over; a late tree found no session.
        generating.refusals.add(generating.opening.link.address)
        elsewhere = generating.output or self._able().keys() - generating.refusals
        if error.code in LOSSES or (error.code is ErrorCode.RESOURCE_EXHAUSTED and elsewhere):
            generating.events.put_nowait(Lost(generating.opening, error))
        else:
            generating.events.put_nowait(error)

    def _fenced(self, id: str, epoch: int) -> None:
        """Another replica has leased a session."""
        if (generating := self._sessions.get(id)) and generating.epoch // MOVES == epoch // MOVES:
            generating.events.put_nowait(_taken_over(id))

    async def _begin(self, call: Call) -> Generating:
        """Lease a session and open it at a verify replica; one that has ended is told from the journal."""
        self._admit(call)
        telling = self._tracer.begin(call) if self._tracer else None
        seed = secrets.randbits(SEED_BITS) if call.params.seed is None else call.params.seed
        session = Session(call.session, call.prompt, call.params, seed, call.output)
        self._beginning += 1
        try:
            record = await self._journal.begin(session, self.fingerprint)
        finally:
            self._beginning -= 1
        session = record.session
        if earlier := self._sessions.get(session.id):
            earlier.events.put_nowait(_taken_over(session.id))
            self._end(earlier)
        replay = _replay(record, len(call.output))
        generating = Generating(call, session, record.epoch, list(session.output), replay, telling)
        self._sessions[session.id] = generating
        if self.draining:
            generating.events.put_nowait(Draining())
        if record.finish:
            generating.events.put_nowait(Started(session.id, session.seed, 0, ""))
            generating.finish(record.finish)
            return generating
        try:
            self._open(generating, self._choose(generating))
        except WealdError:
            self._end(generating)
            raise
        return generating

    def _end(self, generating: Generating) -> None:
        """Free what a session holds, unless a later call has done so."""
        if self._current(generating.id, generating.epoch) is generating:
            del self._sessions[generating.id]
            self._journal.leave(generating.id, generating.epoch)
            self._thread.put(generating, Close(generating.id, generating.epoch))

    def _admit(self, call: Call) -> None:
        if self.draining:
            raise WealdError(ErrorCode.UNAVAILABLE, "this draft replica is shutting down; ask another one")
        sessions = len(self._sessions) + self._beginning
        if sessions >= self._max_num_seqs:
            raise WealdError(
                ErrorCode.RESOURCE_EXHAUSTED,
                f"{sessions} sessions are drafted here already; retry in a second, or ask another "
                "draft replica",
                retry_after_s=1.0,
            )
        vocabulary = self.drafter.head.embedding.shape[0]
        for token in (*call.prompt, *call.output):
            if not 0 <= token < vocabulary:
                raise invalid(f"token {token} is not in the target's vocabulary of {vocabulary}")

    def _able(self) -> dict[str, int]:
        """Sessions at each verify replica that can take more: what it says, or more if we know of more."""
        able = {a: link for a, link in self.links.items() if link.open and self.serves(link)}
        ours = Counter(g.opening.link.address for g in self._sessions.values() if g.opening)
        return {address: max(link.load, ours[address]) for address, link in able.items()}

    def _choose(self, generating: Generating) -> VerifyLink:
        """A verify replica for a session; one that failed it only where there is no other."""
        able = self._able()
        # In an update of the target, replicas of the old one and of the new one are linked for a while.
        known = any(link.fingerprint == self.fingerprint for link in self.links.values())
        others = [link for link in self.links.values() if link.open]
        if not able and others and not known:
            raise incompatible(
                f"the verify replica at {others[0].address} serves another target than this head was loaded "
                "for; start both services with the same --model"
            )
        fresh = {address: count for address, count in able.items() if address not in generating.refusals}
        tokens = (*generating.session.prompt, *generating.output)
        return self.links[route(ReplicaKind.VERIFY, tokens, fresh or able)]

    def _open(self, generating: Generating, link: VerifyLink) -> None:
        session = replace(generating.session, output=tuple(generating.output))
        generating.opening = Opening(session, generating.epoch, link)
        self._thread.put(generating, generating.opening)

    async def _move(self, generating: Generating, lost: Lost) -> Moved | None:
        """Go on at another verify replica, or at the same one once it is back; its text stays the same."""
        generating.leaving = False
        if lost.opening is not generating.opening:
            return None
        link = self._another(generating) if lost.draining else await self._recovered(generating, lost.error)
        if link is None or lost.opening is not generating.opening:
            return None
        self._thread.put(generating, Close(generating.id, generating.epoch))
        generating.epoch += 1
        self._open(generating, link)
        self._counters["handed_over_sessions" if lost.draining else "recovered_sessions"] += 1
        return Moved(ReplicaKind.VERIFY, link.address, lost.error.code in LOSSES and not lost.draining)

    async def _recovered(self, generating: Generating, error: WealdError) -> VerifyLink | None:
        """The verify replica to go on at, once there is one; None where a late opening arrived after all."""
        if generating.lost_at is None:
            generating.lost_at = time.monotonic()
        deadline = generating.lost_at + RECOVER_S
        while time.monotonic() < deadline:
            await asyncio.sleep(next(generating.pauses))
            if generating.lost_at is None:
                return None
            if link := self._another(generating):
                return link
        raise WealdError(
            error.code,
            f"{error.message}; no other verify replica could serve the session within {RECOVER_S:.0f} s",
            retry_after_s=error.retry_after_s,
        )

    def _another(self, generating: Generating) -> VerifyLink | None:
        """A verify replica to move to, if there is one now."""
        try:
            return self._choose(generating)
        except WealdError as none:
            _log.info("nowhere to go: %s", none, extra=about(generating.id, generating.traceparent))
            return None

    def _current(self, id: str, epoch: int) -> Generating | None:
        generating = self._sessions.get(id)
        return generating if generating and generating.epoch == epoch else None

    def _committed(self, generating: Generating, reply: Reply, timings: StepTimings) -> None:
        """Hand on what a target step committed: to the journal, the caller and the thread."""
        now, outcome = time.monotonic_ns(), reply.outcome
        tree = generating.tree if reply.nodes > 1 else None
        if tree and self._observe:
            wall, flight = now - generating.arrived_ns, now - generating.sent_ns
            self._observe(RoundTimes(wall, generating.drafted_ns, flight, reply.turnaround_ns, timings))
        if generating.telling:
            generating.telling.round(generating, reply, now)
        generating.output += outcome.tokens
        self._journal.write(generating.id, generating.epoch, outcome.tokens, outcome.finish)
        if outcome.tokens:
            generating.progressed()
            generating.events.put_nowait(
                Round(
                    position=reply.position,
                    tokens=outcome.tokens,
                    drafted=len(tree) if tree else 0,
                    verified=outcome.verified,
                    draft_ns=generating.drafted_ns if tree else 0,
                    verify_ns=now - (generating.sent_ns if tree else generating.arrived_ns),
                    tree=tree if generating.call.want_trees else None,
                    accepted=outcome.accepted,
                    finish=outcome.finish,
                    logprobs=outcome.logprobs,
                    nodes=reply.nodes if tree and generating.call.want_trees else 0,
                )
            )
        generating.arrived_ns = now
        if outcome.finish:
            generating.opening = None
            generating.finish(outcome.finish)
        elif generating.call.speculative:
            self._thread.put(generating, reply)


def _replay(record: Record, delivered: int) -> Round | None:
    """What the journal has behind the output delivered; it keeps no logprobs."""
    session = record.session
    tokens = session.output[delivered:]
    position = len(session.prompt) + delivered
    return Round(position, tokens, 0, 0, 0, 0, finish=record.finish) if tokens else None


def _gone(address: str) -> WealdError:
    return WealdError(
        ErrorCode.UNAVAILABLE, f"the verify replica at {address} goes away; open the session at another"
    )


def _taken_over(id: str) -> WealdError:
    return WealdError(
        ErrorCode.STALE_EPOCH,
        f"a later call has taken session {id} over; what comes now is delivered there",
    )
