"""The draft service: one thread that drafts for all sessions whose verifier wants a tree."""

import asyncio
import logging
import queue
import secrets
import threading
import time
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from services.draft.drafter import Drafter
from services.draft.link import VerifyLink
from services.draft.routing import route
from services.engine.transfer import from_block
from services.types.errors import ErrorCode, WealdError, incompatible, invalid
from services.types.messages import (
    Call,
    Close,
    Event,
    Failure,
    FeatureBlock,
    Features,
    Finished,
    Open,
    Proposal,
    Proposals,
    Replies,
    Reply,
    Response,
    Round,
    Started,
    StepTimings,
)
from services.types.sampling import SEED_BITS
from services.types.session import Session
from services.types.tree import DraftTree

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


@dataclass(slots=True, eq=False)
class _Generating:
    """One session. Its drafting state belongs to the thread, the rest to the event loop."""

    call: Call
    session: Session
    epoch: int
    link: VerifyLink
    position: int
    """Tokens so far."""
    events: asyncio.Queue[Event | WealdError] = field(default_factory=asyncio.Queue)
    cached: int = 0
    tree: DraftTree | None = None
    """The latest proposal, until its reply."""
    drafted_ns: int = 0
    arrived_ns: int = 0
    """When the latest reply arrived."""
    sent_ns: int = 0
    """When the latest tree was sent."""
    retired: bool = False
    """The head's pages have run out: no more trees."""

    @property
    def id(self) -> str:
        return self.session.id


class DraftService:
    """Sessions in, trees out: the event loop talks, the thread drafts."""

    def __init__(
        self,
        drafter: Drafter,
        fingerprint: bytes,
        *,
        max_num_seqs: int,
        observe: Callable[[RoundTimes], None] | None = None,
    ) -> None:
        """Draft with `drafter`, at most `max_num_seqs` sessions at once; `observe` is told of every round."""
        self.drafter = drafter
        self.fingerprint = fingerprint
        self.links: dict[str, VerifyLink] = {}
        """Verify replicas by address."""
        self._counters: Counter[str] = Counter()
        self._max_num_seqs = max_num_seqs
        self._observe = observe
        self._sessions: dict[str, _Generating] = {}
        self._wanting: dict[_Generating, Reply] = {}
        self._inbox: queue.SimpleQueue[tuple[_Generating, Call | Reply | Features | Close] | None]
        self._inbox = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="draft", daemon=True)
        self._draining = False
        self._loop: asyncio.AbstractEventLoop

    def __len__(self) -> int:
        return len(self._sessions)

    def start(self) -> None:
        """Begin drafting; the running event loop is the one that serves."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def counters(self) -> dict[str, int]:
        """Events since the start: trees drafted, sessions retired, tokens that went through the head."""
        return dict(self._counters) | {"tokens_forwarded": self.drafter.tokens_forwarded}

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new calls and wait for the running ones; whether all of them finished in time."""
        self._draining = True
        deadline = time.monotonic() + timeout_s
        while self._sessions and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        return not self._sessions

    def stop(self) -> None:
        """End the thread."""
        self._inbox.put(None)
        self._thread.join()

    async def generate(self, call: Call) -> AsyncGenerator[Event, None]:
        """Serve one call; leaving the iterator early frees what it held, here and at the verifier.

        Raises:
            WealdError: as the verifier does, `RESOURCE_EXHAUSTED` when too many sessions are served here,
                `UNAVAILABLE` when no verify replica is connected or the session's one is lost.
        """
        generating = self._begin(call)
        try:
            while True:
                event = await generating.events.get()
                if isinstance(event, WealdError):
                    raise event
                yield event
                if isinstance(event, Finished):
                    return
        finally:
            del self._sessions[generating.id]
            self._inbox.put((generating, Close(generating.id, generating.epoch)))

    def received(self, response: Response) -> None:
        """Take what a verify replica says: tokens go to the caller at once, the rest to the thread."""
        match response:
            case Replies():
                for reply in response.replies:
                    if generating := self._current(reply.session, reply.epoch):
                        self._committed(generating, reply, response.timings)
            case Features():
                if generating := self._current(response.session, response.epoch):
                    self._inbox.put((generating, response))
            case Failure():
                if generating := self._current(response.session, response.epoch):
                    generating.events.put_nowait(response.error)

    def broken(self, link: VerifyLink, error: WealdError) -> None:
        """A stream has ended: so have its sessions."""
        for generating in self._sessions.values():
            if generating.link is link:
                generating.events.put_nowait(error)

    def _begin(self, call: Call) -> _Generating:
        self._admit(call)
        seed = secrets.randbits(SEED_BITS) if call.params.seed is None else call.params.seed
        session = Session(call.session, call.prompt, call.params, seed, call.output)
        if session.id in self._sessions:
            raise WealdError(ErrorCode.ALREADY_EXISTS, f"session {session.id} is being served here already")
        serving = {address: 0 for address, link in self.links.items() if link.connected}
        for other in self._sessions.values():
            if other.link.address in serving:
                serving[other.link.address] += 1
        link = self.links[route(session.tokens, serving)]
        if link.fingerprint != self.fingerprint:
            raise incompatible(
                f"the verify replica at {link.address} serves another target than this head was loaded for; "
                "start both services with the same --model"
            )
        # The wall clock orders takeovers: a session opened later, here or elsewhere, has the higher epoch.
        generating = _Generating(call, session, time.time_ns(), link, len(session.tokens))
        generating.arrived_ns = time.perf_counter_ns()
        self._sessions[session.id] = generating
        self._inbox.put((generating, call))
        return generating

    def _admit(self, call: Call) -> None:
        if self._draining:
            raise WealdError(ErrorCode.UNAVAILABLE, "this draft replica is shutting down; ask another one")
        if len(self._sessions) >= self._max_num_seqs:
            raise WealdError(
                ErrorCode.RESOURCE_EXHAUSTED,
                f"{len(self._sessions)} sessions are drafted here already; retry in a second, or ask another "
                "draft replica",
                retry_after_s=1.0,
            )
        if not call.prompt:
            raise invalid("the prompt is empty; give at least one token")
        vocabulary = self.drafter.head.embedding.shape[0]
        for token in (*call.prompt, *call.output):
            if not 0 <= token < vocabulary:
                raise invalid(f"token {token} is not in the target's vocabulary of {vocabulary}")

    def _current(self, id: str, epoch: int) -> _Generating | None:
        generating = self._sessions.get(id)
        return generating if generating and generating.epoch == epoch else None

    def _committed(self, generating: _Generating, reply: Reply, timings: StepTimings) -> None:
        """Hand on what a target step committed."""
        now, outcome = time.perf_counter_ns(), reply.outcome
        tree = generating.tree if reply.nodes > 1 else None
        if tree and self._observe:
            wall, flight = now - generating.arrived_ns, now - generating.sent_ns
            self._observe(RoundTimes(wall, generating.drafted_ns, flight, reply.turnaround_ns, timings))
        if outcome.tokens:
            generating.events.put_nowait(
                Round(
                    position=reply.position,
                    tokens=outcome.tokens,
                    drafted=len(tree) if tree else 0,
                    verified=outcome.verified,
                    draft_ns=generating.drafted_ns if tree else 0,
                    verify_ns=now - (generating.sent_ns if tree else generating.arrived_ns),
                    tree=tree if generating.call.want_trees else None,
                    accepted=outcome.accepted if generating.call.want_trees else (),
                    finish=outcome.finish,
                )
            )
        generating.arrived_ns = now
        generating.position += len(outcome.tokens)
        if outcome.finish:
            prompt = len(generating.session.prompt)
            count = generating.position - prompt
            generating.events.put_nowait(Finished(outcome.finish, prompt, count, generating.cached))
        elif generating.call.speculative:
            self._inbox.put((generating, reply))

    def _run(self) -> None:
        while self._receive():
            self._draft()

    def _receive(self) -> bool:
        """Take in everything that has arrived, waiting for the first; False at the end."""
        item = self._inbox.get()
        while item is not None:
            try:
                self._take(*item)
                item = self._inbox.get_nowait()
            except queue.Empty:
                return True
        return False

    def _take(self, generating: _Generating, message: Call | Reply | Features | Close) -> None:
        id = generating.id
        try:
            match message:
                case Call():
                    self._open(generating, message)
                case Features():
                    self._tell(id, (), message.block)
                case Reply():
                    self._tell(id, message.outcome.tokens, message.features)
                    self._wanting.pop(generating, None)
                    if message.wanted:
                        self._wanting[generating] = message
                case Close():
                    self._wanting.pop(generating, None)
                    self.drafter.close(id)
                    generating.link.send(message)
        except Exception as error:
            self._fail([generating], error)

    def _open(self, generating: _Generating, call: Call) -> None:
        session, tokens = generating.session, generating.session.tokens
        generating.cached = self.drafter.open(generating.id, tokens, call.draft) if call.speculative else 0
        from_ = generating.cached if call.speculative else len(tokens)
        started = Started(session.id, session.seed, generating.cached, generating.link.address)
        self._post(generating, started)
        generating.link.send(
            Open(
                session,
                generating.epoch,
                self.fingerprint,
                call.speculative,
                from_,
                call.traceparent,
            )
        )

    def _tell(self, id: str, tokens: Sequence[int], block: FeatureBlock | None) -> None:
        embedding = self.drafter.head.embedding
        features = from_block(block, embedding.dtype, embedding.device) if block else embedding[:0]
        self.drafter.advance(id, tokens, features)

    def _draft(self) -> None:
        """A tree for every session that is to have one; each verify replica gets its trees in one message."""
        wanting, self._wanting = self._wanting, {}
        if not wanting:
            return
        started = time.perf_counter_ns()
        try:
            trees = self._propose(wanting)
        except Exception as error:
            self._fail(list(wanting), error)
            return
        drafted = time.perf_counter_ns()
        ready: dict[VerifyLink, list[Proposal]] = defaultdict(list)
        for (generating, reply), tree in zip(wanting.items(), trees, strict=True):
            root = reply.position + len(reply.outcome.tokens) - 1
            generating.tree, generating.drafted_ns, generating.sent_ns = tree, drafted - started, drafted
            ready[generating.link].append(Proposal(generating.id, generating.epoch, reply.round, root, tree))
        for link, proposals in ready.items():
            link.send(Proposals(tuple(proposals)))
        self._counters["trees_drafted"] += len(trees)

    def _propose(self, wanting: Mapping[_Generating, Reply]) -> list[DraftTree]:
        """A tree for each session: the root alone where the head's pages have run out."""
        while True:
            drafting = [generating for generating in wanting if not generating.retired]
            try:
                trees = self.drafter.propose([generating.id for generating in drafting])
                break
            except WealdError as error:
                if error.code is not ErrorCode.RESOURCE_EXHAUSTED:
                    raise
                drafting[-1].retired = True
                self.drafter.retire(drafting[-1].id)
                self._counters["retired_sessions"] += 1
        grown = dict(zip(drafting, trees, strict=True))
        return [grown.get(g) or DraftTree.root(reply.outcome.tokens[-1]) for g, reply in wanting.items()]

    def _fail(self, generating: Sequence[_Generating], error: Exception) -> None:
        if not isinstance(error, WealdError):
            _log.exception("drafting failed", exc_info=error)
            error = WealdError(ErrorCode.INTERNAL, "drafting failed; the log of the draft service says why")
        for one in generating:
            self._post(one, error)

    def _post(self, generating: _Generating, event: Event | WealdError) -> None:
        self._loop.call_soon_threadsafe(generating.events.put_nowait, event)
