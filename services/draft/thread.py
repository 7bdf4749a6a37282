"""The thread that drafts for all sessions whose verifier wants a tree."""

import asyncio
import logging
import queue
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from services.draft.drafter import Drafter, Terms
from services.draft.generating import Generating, Opening
from services.draft.link import VerifyLink
from services.engine.transfer import from_block
from services.speculation.coupling import Drawing
from services.types.errors import ErrorCode, WealdError
from services.types.messages import (
    Close,
    Event,
    FeatureBlock,
    Features,
    Open,
    Proposal,
    Proposals,
    Reply,
    Started,
)
from services.types.tree import DraftTree

_JUDGED = 1000
"""After so many nodes decided it is looked at whether head and target belong together."""

_log = logging.getLogger(__name__)


class DraftThread:
    """Owns the drafter: messages in, trees out to the links."""

    def __init__(self, drafter: Drafter, fingerprint: bytes) -> None:
        self.counters: Counter[str] = Counter()
        self.pass_began: float | None = None
        """When the present trees were begun, `time.monotonic()`; None between."""
        self._judged = False
        self._drafter = drafter
        self._fingerprint = fingerprint
        self._wanting: dict[Generating, Reply] = {}
        self._inbox: queue.SimpleQueue[tuple[Generating, Opening | Reply | Features | Close] | None]
        self._inbox = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="draft", daemon=True)
        self._loop: asyncio.AbstractEventLoop

    def start(self) -> None:
        """Begin; events go to the running loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self) -> None:
        """End behind what has been put in."""
        self._inbox.put(None)
        self._thread.join()

    def put(self, generating: Generating, message: Opening | Reply | Features | Close) -> None:
        """Hand in what concerns one session, from any thread; taken in order."""
        self._inbox.put((generating, message))

    def _run(self) -> None:
        while self._receive():
            self.pass_began = time.monotonic()
            self._draft()
            self.counters["draft_ns"] += round((time.monotonic() - self.pass_began) * 1e9)
            self.pass_began = None

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

    def _take(self, generating: Generating, message: Opening | Reply | Features | Close) -> None:
        try:
            match message:
                case Opening():
                    self._open(generating, message)
                case Features():
                    self._tell(generating.id, (), message.block)
                case Reply():
                    self._learn(generating, message)
                    self._tell(generating.id, message.outcome.tokens, message.features)
                    self._wanting.pop(generating, None)
                    if message.wanted:
                        self._wanting[generating] = message
                case Close():
                    self._close(generating, message)
        except Exception as error:
            self._fail([generating], error)

    def _open(self, generating: Generating, opening: Opening) -> None:
        """Open a session at its verify replica, the first one or another."""
        call, session = generating.call, opening.session
        cached = 0
        if call.speculative:
            drawing = Drawing(session.params, session.seed, len(session.prompt), call.coupled)
            cached = self._drafter.open(session.id, session.tokens, call.draft, drawing)
        from_ = cached if call.speculative else len(session.tokens)
        if generating.opened is None:
            generating.cached = cached
            self._post(generating, Started(session.id, session.seed, cached, opening.link.address))
        generating.opened, generating.tree, generating.retired = opening, None, False
        config = generating.config = call.draft or self._drafter.config
        opening.link.send(
            Open(
                session,
                opening.epoch,
                self._fingerprint,
                call.speculative,
                from_,
                generating.traceparent,
                config.adaptive_budget,
                call.priority,
            )
        )

    def _close(self, generating: Generating, message: Close) -> None:
        self._wanting.pop(generating, None)
        self._drafter.close(generating.id)
        if generating.opened:
            generating.opened.link.send(message)

    def _learn(self, generating: Generating, reply: Reply) -> None:
        """Compare what the last tree promised with what it brought; a head that is badly off is reported."""
        if reply.nodes == 1 or not generating.tree:
            return
        drafter, before = self._drafter, self.counters["nodes_decided"]
        self.counters["nodes_decided"] += drafter.learn(generating.id, reply.nodes, reply.outcome.accepted)
        due = before // _JUDGED < self.counters["nodes_decided"] // _JUDGED
        if due and not self._judged and (judgement := drafter.calibration.badly_off()):
            self._judged = True
            _log.warning("%s", judgement)

    def _tell(self, id: str, tokens: Sequence[int], block: FeatureBlock | None) -> None:
        embedding = self._drafter.head.embedding
        features = from_block(block, embedding.dtype, embedding.device) if block else embedding[:0]
        self._drafter.advance(id, tokens, features)

    def _draft(self) -> None:
        """A tree for every session that is to have one; each verify replica gets its trees in one message."""
        wanting, self._wanting = self._wanting, {}
        if not wanting:
            return
        started = time.monotonic_ns()
        try:
            trees = self._propose(wanting)
        except Exception as error:
            self._fail(list(wanting), error)
            return
        drafted = time.monotonic_ns()
        ready: dict[VerifyLink, list[Proposal]] = defaultdict(list)
        for (generating, reply), tree in zip(wanting.items(), trees, strict=True):
            assert generating.opened
            root = reply.position + len(reply.outcome.tokens) - 1
            generating.tree, generating.times = tree, self._drafter.times
            generating.began_ns, generating.sent_ns = started, drafted
            proposal = Proposal(generating.id, reply.epoch, reply.round, root, tree)
            ready[generating.opened.link].append(proposal)
        for link, proposals in ready.items():
            link.send(Proposals(tuple(proposals)))
        self.counters["trees_drafted"] += len(trees)

    def _propose(self, wanting: Mapping[Generating, Reply]) -> list[DraftTree]:
        """A tree for each session: the root alone where the head's pages have run out."""
        while True:
            drafting = [generating for generating in wanting if not generating.retired]
            try:
                terms = {g.id: Terms(reply.price, reply.pace) for g, reply in wanting.items()}
                trees = self._drafter.propose([generating.id for generating in drafting], terms)
                break
            except WealdError as error:
                if error.code is not ErrorCode.RESOURCE_EXHAUSTED:
                    raise
                drafting[-1].retired = True
                self._drafter.retire(drafting[-1].id)
                self.counters["retired_sessions"] += 1
        grown = dict(zip(drafting, trees, strict=True))
        return [grown.get(g) or DraftTree.root(reply.outcome.tokens[-1]) for g, reply in wanting.items()]

    def _fail(self, generating: Sequence[Generating], error: Exception) -> None:
        if not isinstance(error, WealdError):
            _log.exception("drafting failed", exc_info=error)
            error = WealdError(ErrorCode.INTERNAL, "drafting failed; the log of the draft service says why")
        for one in generating:
            self._post(one, error)

    def _post(self, generating: Generating, event: Event | WealdError) -> None:
        self._loop.call_soon_threadsafe(generating.events.put_nowait, event)
