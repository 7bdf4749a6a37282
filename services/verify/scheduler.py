"""The scheduler: which sessions enter the next target step, with which trees and prefill chunks."""

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from services.speculation.budget import Budget, Offer, Prospect
from services.speculation.forest import Entry, rank
from services.telemetry.spans import Trace
from services.types.configuration import VerifyLimits
from services.types.errors import ErrorCode, WealdError
from services.types.messages import Open, Proposal, Response
from services.types.outcome import Outcome
from services.types.tree import DraftTree

MIN_HOLD_S, MAX_HOLD_S = 0.005, 1.0
HOLD_FACTOR = 3.0
"""A session is held for its tree this many times as long as trees take to arrive."""
_FORGETTING = 0.1
_ROUNDS_REMEMBERED = 8
_MOST_HALVINGS = 8
"""A drafter that answers no more costs its sessions next to nothing after so many holds in vain."""
NO_TREE, ANY_TREE = Offer(False, 0.0, 0.0), Offer(True, 0.0, 0.0)
_CONGESTED_S = 0.02
"""A congested link is looked at again after so many seconds."""


class Books(Protocol):
    """What a verifier knows of its sessions and pages; see `Verifier`."""

    @property
    def free_pages(self) -> int:
        """Pages that no session holds."""

    def pending(self, id: str) -> tuple[int, int]:
        """Position and token of the pending token."""

    def lacking(self, id: str) -> int:
        """Tokens that are not computed yet."""

    def room(self, id: str) -> int:
        """Output tokens a session may still generate."""

    def place(self, id: str) -> int:
        """Give a session without pages the cached ones of its prefix; tokens still to be computed."""

    def suspend(self, id: str) -> None:
        """Take a session's pages away."""

    def pages_missing(self, id: str, rows: int) -> int:
        """Pages a session has to be given before so many rows can be written."""

    def rows_within(self, id: str, pages: int) -> int:
        """Rows that can be written when a session is given so many pages."""


class Link(Protocol):
    """The stream to the drafter of a session."""

    def post(self, responses: Sequence[Response]) -> None:
        """Send, from any thread, without waiting."""

    @property
    def congested(self) -> bool:
        """Whether so much waits to be sent that the sessions behind it should pause."""


@dataclass(slots=True, eq=False)
class Seat:
    """One session's place in the service."""

    request: Open
    link: Link | None
    """None once its stream has broken: the seat is parked until it expires."""
    age: int
    """Order of arrival; the youngest is preempted first."""
    sent: int
    """Position below which the drafter has, or has been sent, all features."""
    committed: int
    """Tokens of the session so far, prompt included."""
    round: int = 0
    """Target steps that committed tokens of it here."""
    proposal: Proposal | None = None
    arrived: float = 0.0
    """Seconds, when the proposal arrived."""
    wanted: dict[int, float] = field(default_factory=dict)
    """Seconds, when the replies of the latest rounds wanted a tree."""
    held_until: float = 0.0
    missed: int = 0
    """Holds in a row that ended without a tree."""
    expires: float = 0.0
    """Seconds, when a parked seat is dropped."""
    preparing: bool = False
    """Whether its grammar is still being compiled; others overtake it meanwhile."""
    asked: float = 0.0
    """Seconds, when the tree it is held for was wanted."""
    streak: int = 0
    """Trees that it wanted in a row."""
    delay: float = 0.0
    """Seconds that it took until its last tree was there."""
    rows: int = 1
    """Of that tree in its step."""
    brought: float = 1.0
    """Tokens that its trees have brought in a step, lately."""
    prospect: Prospect = field(default_factory=Prospect)
    """What its trees have been like."""
    trace: Trace | None = None
    """Of its `generate` span, where that is recorded."""

    @property
    def id(self) -> str:
        """The session's id."""
        return self.request.session.id

    @property
    def weight(self) -> float:
        """What a token of it is worth."""
        return self.request.priority.weight


@dataclass(frozen=True, slots=True)
class Step:
    """What the next target step does."""

    trees: dict[str, DraftTree]
    """As much of each session's tree as is verified; a root alone is a plain step."""
    nodes: dict[str, tuple[int, ...]]
    """Which nodes of the proposed tree those are."""
    chunks: dict[str, int]
    """Further prompt tokens of sessions in their prefill."""


@dataclass(slots=True)
class _Room:
    """Tokens and pages a step being formed can still take."""

    tokens: int
    pages: int


class Scheduler:
    """Continuous batching with chunked prefill: waiting, running, preempted.

    A preempted session loses its pages, goes back to the head of the queue and computes them again; the
    chunk that reaches its newest token draws the next one, as any plain step does.
    """

    def __init__(self, verifier: Books, limits: VerifyLimits) -> None:
        self._verifier = verifier
        self._limits = limits
        self.seats: dict[str, Seat] = {}
        self.waiting: deque[Seat] = deque()
        self.counters: Counter[str] = Counter()
        self.budget = Budget()
        self._running: list[Seat] = []
        self._age = 0
        self._arrival_s: float | None = None

    def __len__(self) -> int:
        return len(self._running)

    def enqueue(self, request: Open, link: Link) -> Seat:
        """Let an admitted session wait for its place; `make_room` has been asked before."""
        self._age += 1
        seat = Seat(request, link, self._age, request.features_from, len(request.session.tokens))
        self.seats[seat.id] = seat
        self.waiting.append(seat)
        return seat

    def make_room(self) -> None:
        """Raise `WealdError(RESOURCE_EXHAUSTED)`, with a hint when to retry, if the queue is full."""
        if len(self.seats) >= self._limits.max_num_seqs + self._limits.max_waiting:
            raise WealdError(
                ErrorCode.RESOURCE_EXHAUSTED,
                f"{len(self)} sessions run and {len(self.waiting)} wait here; retry in a second, or ask "
                "another verify replica",
                retry_after_s=1.0,
            )

    def remove(self, id: str) -> None:
        """Forget a session; the verifier is told by whoever ends it."""
        if seat := self.seats.pop(id, None):
            (self._running if seat in self._running else self.waiting).remove(seat)

    def offer(self, proposal: Proposal, now: float) -> None:
        """Take the tree a session is held for; a stale one is dropped."""
        seat = self.seats[proposal.session]
        pending = self._verifier.pending(seat.id)
        if wanted := seat.wanted.pop(proposal.round, None):
            self._observe(now - wanted)
        seat.missed = 0
        stale = seat not in self._running or pending != (proposal.root_position, proposal.tree.tokens[0])
        if stale or self._verifier.lacking(seat.id) != 1:
            self.counters["stale_trees"] += 1
        else:
            seat.proposal, seat.arrived = proposal, now

    def hold(self, seat: Seat, round: int, now: float) -> None:
        """A tree is wanted from now on: hold the session for as long as trees take, but not forever."""
        patience = MAX_HOLD_S if self._arrival_s is None else HOLD_FACTOR * self._arrival_s
        seat.wanted[round] = seat.asked = now
        # What has not come for so many rounds takes at least so long; a slow drafter is to be waited for.
        if forgotten := seat.wanted.pop(round - _ROUNDS_REMEMBERED, None):
            self._observe(now - forgotten)
        seat.held_until = now + min(max(patience, MIN_HOLD_S), MAX_HOLD_S) / 2 ** min(
            seat.missed, _MOST_HALVINGS
        )

    def settle(
        self, step: Step, outcomes: Mapping[str, Outcome], began: float, now: float
    ) -> dict[str, Offer]:
        """Take in what a step did, and decide which sessions are to have a tree next.

        Args:
            step: that was run.
            outcomes: of the sessions that drew a token.
            began: seconds, when the step began.
            now: when it had ended.

        Returns:
            What each session is told that goes on.
        """
        budget, seats = self.budget, {id: self.seats[id] for id in outcomes}
        rows = sum(map(len, step.trees.values())) + sum(step.chunks.values())
        if not step.chunks:
            budget.cost.observe(rows, now - began)
        tokens = sum(seat.weight * len(outcomes[id].tokens) for id, seat in seats.items())
        budget.stepped(began, now, tokens)
        for id, seat in seats.items():
            if not seat.proposal or id not in step.trees:
                continue
            tree, accepted = step.trees[id], outcomes[id].accepted
            seat.rows = len(tree)
            seat.brought += _FORGETTING * (1 + len(accepted) - seat.brought)
            if seat.request.priced:
                budget.verified(seat.prospect, seat.proposal.tree, tree, len(accepted))
        offers = {id: self.tree_or_plain(seat) for id, seat in seats.items() if not outcomes[id].finish}
        for id, offer in offers.items():
            seats[id].streak = seats[id].streak + 1 if offer.wanted else 0
        return offers

    def tree_or_plain(self, seat: Seat) -> Offer:
        """Whether a session would do well to have a tree now."""
        if not seat.request.speculative or self._verifier.room(seat.id) <= 1:
            return NO_TREE
        if not seat.request.priced:
            return ANY_TREE
        return self.budget.offer(seat.prospect, seat.weight, len(self), seat.streak)

    def patience(self, now: float) -> float:
        """Seconds until something can happen by itself: a wait ends, or a link is to be looked at again."""
        ends = [s.held_until for s in self._running if s.held_until and not s.proposal and _open(s)]
        ends += [now + _CONGESTED_S for s in self._running if s.link and s.link.congested]
        ends += [until] if (until := self._worth_waiting(now)) > now else []
        return max(0.0, min(ends, default=math.inf) - now)

    def form(self, now: float) -> Step | None:
        """The next target step; None when every session is held, parked or gone."""
        room = _Room(self._limits.max_num_batched_tokens, self._verifier.free_pages)
        self._admit(room)
        if not self._running:
            self.budget.idle()
        if self._worth_waiting(now) > now:
            return None
        trees, nodes = self._forest(now, room)
        chunks = self._chunks(room, alone=not trees)
        return Step(trees, nodes, chunks) if trees or chunks else None

    def _observe(self, arrival_s: float) -> None:
        before = arrival_s if self._arrival_s is None else self._arrival_s
        self._arrival_s = before + _FORGETTING * (arrival_s - before)

    def _admit(self, room: _Room) -> None:
        verifier = self._verifier
        reserved = sum(verifier.pages_missing(s.id, verifier.lacking(s.id)) for s in self._running)
        for seat in [seat for seat in self.waiting if not seat.preparing]:
            if len(self._running) >= self._limits.max_num_seqs:
                return
            lacking = verifier.place(seat.id)
            needed = verifier.pages_missing(seat.id, lacking)
            room.pages = verifier.free_pages
            # A page to spare for each that runs, lest it be taken from this one at once.
            if self._running and reserved + needed + len(self._running) > room.pages:
                verifier.suspend(seat.id)
                room.pages = verifier.free_pages
                return
            reserved += needed
            self.waiting.remove(seat)
            self._running.append(seat)
            self._running.sort(key=lambda s: s.age)
            self.counters["prefix_hit_tokens"] += verifier.pending(seat.id)[0] + 1 - lacking

    def _worth_waiting(self, now: float) -> float:
        """Until when it is better to wait for trees on their way than to begin a step now.

        Nobody waits who goes on by plain steps, or is in its prefill.
        """
        running = [seat for seat in self._running if _open(seat)]
        coming = [seat for seat in running if not seat.proposal]
        rows = sum(seat.rows for seat in running if seat.proposal)
        if not rows or any(seat.held_until <= now for seat in coming):
            return now
        trees = [(s.asked + s.delay, s.rows, s.weight * s.brought) for s in coming if s.delay]
        return self.budget.worth_waiting(rows, trees, now)

    def _forest(self, now: float, room: _Room) -> tuple[dict[str, DraftTree], dict[str, tuple[int, ...]]]:
        """Trees of the sessions that are ready, ranked and fitted into the tokens and pages there are."""
        verifier = self._verifier
        for seat in [seat for seat in self._running if self._ready(seat, now)]:
            if self._clear(seat, room):
                # Roots first: no tree costs another its root.
                room.pages -= verifier.pages_missing(seat.id, 1)
        ready = [seat for seat in self._running if self._ready(seat, now)]
        forest = [Entry(self._tree(seat), seat.weight, seat.request.priced) for seat in ready]
        spare = room.tokens - len(forest)
        prefill = sum(n for seat in self._running if _open(seat) and (n := verifier.lacking(seat.id)) > 1)
        # Half of what the roots leave is for prefills: full trees must not keep new sessions from starting.
        self.counters["offered_nodes"] += sum(len(entry.tree) - 1 for entry in forest)
        ranked = rank(forest, spare - min(prefill, -(-spare // 2)), self.budget.nodes)
        trees: dict[str, DraftTree] = {}
        nodes: dict[str, tuple[int, ...]] = {}
        for seat, entry, kept in zip(ready, forest, ranked, strict=True):
            room.pages += verifier.pages_missing(seat.id, 1)
            fitting = self._take(seat, len(kept), room)
            if fitting < len(kept):
                self.counters["shrunk_trees"] += 1
                kept = rank([entry], fitting - 1)[0]
            trees[seat.id], nodes[seat.id] = entry.tree.keep(kept), kept
            room.tokens -= len(kept)
            if seat.held_until:
                seat.delay = (seat.arrived if seat.proposal else now) - seat.asked
                if seat.request.priced:
                    self.budget.waited(seat.delay, first=seat.streak == 1)
            if not seat.proposal and seat.held_until:
                seat.missed += 1
                self.counters["missed_trees"] += 1
                if seat.request.priced:
                    self.budget.missed()
        return trees, nodes

    def _clear(self, seat: Seat, room: _Room) -> bool:
        """See that there is a page for a session's next row: without one, the youngest sessions lose theirs.

        They stand behind it in the step, so nothing is taken from one that has its row. False when the
        youngest is this one itself.
        """
        while seat in self._running and self._verifier.rows_within(seat.id, room.pages) < 1:
            self._preempt(self._running[-1], room)
        return seat in self._running

    def _chunks(self, room: _Room, alone: bool) -> dict[str, int]:
        """Prefill chunks in what the trees leave; `alone` when there are none, and pages may be taken."""
        chunks: dict[str, int] = {}
        for seat in list(self._running):
            if seat not in self._running or not _open(seat):
                continue
            lacking = self._verifier.lacking(seat.id)
            count = min(lacking, room.tokens)
            if lacking == 1 or not count:
                continue
            if alone and not chunks and not self._clear(seat, room):
                continue
            if count := self._take(seat, count, room):
                chunks[seat.id] = count
                room.tokens -= count
                self.counters["chunked_prefills"] += count < lacking
        return chunks

    def _take(self, seat: Seat, rows: int, room: _Room) -> int:
        rows = max(0, min(rows, self._verifier.rows_within(seat.id, room.pages)))
        room.pages -= self._verifier.pages_missing(seat.id, rows)
        return rows

    def _preempt(self, seat: Seat, room: _Room) -> None:
        before = self._verifier.free_pages
        self._verifier.suspend(seat.id)
        room.pages += self._verifier.free_pages - before
        self._running.remove(seat)
        self.waiting.appendleft(seat)
        seat.proposal, seat.held_until = None, 0.0
        self.counters["preemptions"] += 1

    def _ready(self, seat: Seat, now: float) -> bool:
        waited = seat.proposal is not None or seat.held_until <= now
        return waited and _open(seat) and self._verifier.lacking(seat.id) == 1

    def _tree(self, seat: Seat) -> DraftTree:
        tree = seat.proposal.tree if seat.proposal else DraftTree.root(self._verifier.pending(seat.id)[1])
        return tree.cut(self._verifier.room(seat.id) - 1)


def _open(seat: Seat) -> bool:
    return seat.link is not None and not seat.link.congested
