"""Both services in virtual time: the product's scheduler, budgets and early stop, without a model.

What is computed is replayed from traces, what it takes is told by a machine; who waits for whom, which trees
are wanted and which of their nodes are verified is decided by the code that serves.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from random import Random

import torch

from services.bench.machines import Machine, pages_of
from services.bench.traces import Guess
from services.draft.drafter import EXTEND_CHUNK, SLACK
from services.engine.pages import PAGE_SIZE
from services.speculation.adaptive import AdaptivePlan, Reach
from services.speculation.budget import Offer
from services.speculation.cost import Cost
from services.speculation.shapes import plan_for
from services.types.configuration import DraftConfig, TreeShape, VerifyLimits
from services.types.messages import Open, Proposal, Response
from services.types.outcome import Outcome
from services.types.sampling import SamplingParams
from services.types.session import FinishReason, Session
from services.types.tree import MAX_NODES, DraftTree
from services.verify.scheduler import NO_TREE, Scheduler, Seat, Step
from services.verify.warmup import MOST_ROWS, REPEATS, WITHIN_S


@dataclass(frozen=True, slots=True)
class Job:
    """A generation to be served."""

    prompt: int
    """Tokens."""
    output: int
    """Tokens."""
    guesses: Sequence[Guess]
    """Of the positions of its text, over and over."""
    start: int
    """Where in these it begins."""
    arrival: float | None = None
    """Seconds; None: when one before it has finished."""


@dataclass(slots=True)
class Served:
    """What became of a job."""

    job: Job
    began: float
    """Seconds, when it arrived, as all times here."""
    first: float = 0.0
    """When its first token was there."""
    ended: float = math.inf
    rounds: list[tuple[int, int, int]] = field(default_factory=list)
    """Of each target step after the prefill: its root's position in the output, nodes verified besides the
    root, and nodes accepted."""

    @property
    def time_per_token(self) -> float:
        """Seconds per token after the first."""
        return (self.ended - self.first) / max(1, self.job.output - 1)


@dataclass(frozen=True, slots=True)
class Setting:
    """What is simulated."""

    machine: Machine
    config: DraftConfig | None
    """Trees of the sessions; None for plain decoding."""
    limits: VerifyLimits
    verifiers: int = 1
    drafters: int = 1
    noise: float = 0.0
    """Of the logarithm of what a step or a batch of trees takes, its standard deviation."""
    seed: int = 0


@dataclass(slots=True)
class Ledger:
    """All that happened."""

    served: list[Served]
    tokens: list[tuple[float, int]] = field(default_factory=list)
    """When how many tokens were there."""
    verifying: list[tuple[float, float]] = field(default_factory=list)
    """From when to when a verify replica computed."""
    drafting: list[tuple[float, float]] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)
    """Of the schedulers."""
    idle_pages: bool = True
    """Whether every page was free in the end."""


class _Clock:
    """Events in the order of their times; those of one time in the order they were set."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._free = 0.0

    def at(self, time: float, event: Callable[[], None]) -> None:
        """Let something happen."""
        heapq.heappush(self._events, (time, next(self._order), event))

    def occupy(self, seconds: float, shared: bool) -> float:
        """When a computation that is begun now has ended; shared processors do one after the other."""
        if not shared:
            return self.now + seconds
        self._free = max(self._free, self.now) + seconds
        return self._free

    def run(self) -> None:
        """Until nothing more happens."""
        while self._events:
            self.now, _, event = heapq.heappop(self._events)
            event()


@dataclass(slots=True, eq=False)
class _Live:
    """A session as both services and its caller know it."""

    id: str
    served: Served
    verify: "_Verify"
    draft: "_Draft"
    computed: int = 0
    """Positions whose keys and values exist at the verifier."""
    committed: int = 0
    """Tokens of the output."""
    pages: int = 0
    extended: int = 0
    """Entries of the head."""
    told: int = 0
    """Output tokens that the drafter knows."""

    @property
    def tokens(self) -> int:
        return self.served.job.prompt + self.committed

    def guess(self, position: int) -> Guess:
        """Of a position of the output."""
        guesses = self.served.job.guesses
        return guesses[(self.served.job.start + position) % len(guesses)]


class _Books:
    """The pages of a verify replica: `Books` of the scheduler. Nothing is found in a prefix cache."""

    def __init__(self, pages: int) -> None:
        self.free_pages = pages
        self.live: dict[str, _Live] = {}

    def pending(self, id: str) -> tuple[int, int]:
        """A root's token is its index, 0."""
        return self.live[id].tokens - 1, 0

    def lacking(self, id: str) -> int:
        """Tokens to be computed."""
        return self.live[id].tokens - self.live[id].computed

    def room(self, id: str) -> int:
        """Tokens of the output to come."""
        return self.live[id].served.job.output - self.live[id].committed

    def place(self, id: str) -> int:
        """All is to be computed."""
        return self.lacking(id)

    def suspend(self, id: str) -> None:
        """Free its pages."""
        live = self.live[id]
        self.free_pages += live.pages
        live.pages = live.computed = 0

    def close(self, id: str) -> None:
        """Forget a session."""
        self.suspend(id)
        del self.live[id]

    def pages_missing(self, id: str, rows: int) -> int:
        """As `Verifier`."""
        return max(0, pages_of(self.live[id].computed + rows) - self.live[id].pages)

    def rows_within(self, id: str, pages: int) -> int:
        """As `Verifier`."""
        return (self.live[id].pages + pages) * PAGE_SIZE - self.live[id].computed

    def step(self, step: Step) -> dict[str, Outcome]:
        """What a target step commits."""
        rows = {id: len(tree) for id, tree in step.trees.items()} | step.chunks
        for id, written in rows.items():
            missing = self.pages_missing(id, written)
            self.free_pages -= missing
            self.live[id].pages += missing
        outcomes = {id: self._walk(self.live[id], tree) for id, tree in step.trees.items()}
        for id, written in step.chunks.items():
            live = self.live[id]
            if written < self.lacking(id):
                live.computed += written
            else:
                live.computed = live.tokens - 1
                outcomes[id] = self._commit(live, (), 1)
        return outcomes

    def _walk(self, live: _Live, tree: DraftTree) -> Outcome:
        position = live.committed - 1
        path = live.guess(position).accepted(tree)
        live.served.rounds.append((position, len(tree) - 1, len(path)))
        return self._commit(live, path, len(tree))

    def _commit(self, live: _Live, path: tuple[int, ...], rows: int) -> Outcome:
        live.computed += 1 + len(path)
        live.committed += 1 + len(path)
        over = live.committed >= live.served.job.output
        finish = FinishReason.LENGTH if over else None
        return Outcome((0,) * (1 + len(path)), path, rows, finish)


class _Stream:
    """The way to a drafter: what is posted there is told by the simulation itself."""

    congested = False

    def post(self, responses: Sequence[Response]) -> None:
        """Nothing is posted."""


@dataclass(frozen=True, slots=True)
class _Told:
    """What a drafter hears of a session: a part of `Reply`."""

    live: _Live
    round: int
    tokens: int
    offer: Offer
    finished: bool


class _Verify:
    """A verify replica: `VerifyService` with its thread."""

    def __init__(self, world: "_World") -> None:
        self._world = world
        self.books = _Books(world.setting.machine.pages)
        self.scheduler = Scheduler(self.books, world.setting.limits)
        self._inbox: deque[_Live | tuple[Proposal, float]] = deque()
        self._busy = False
        self._warm_up()

    def receive(self, messages: Sequence[_Live | Proposal]) -> None:
        """Sessions to open, and trees."""
        now = self._world.clock.now
        self._inbox += (m if isinstance(m, _Live) else (m, now) for m in messages)
        self._go_on()

    def _warm_up(self) -> None:
        """As `warm_up` measures it."""
        machine, rows, taken = self._world.setting.machine, 1, 0.0
        most = min(self._world.setting.limits.max_num_batched_tokens, MOST_ROWS)
        while rows <= most and taken < WITHIN_S:
            seconds = machine.step(rows, -(-rows // MAX_NODES), 0)
            for _ in range(REPEATS - 1):
                self.scheduler.budget.cost.observe(rows, seconds)
            taken += REPEATS * seconds
            rows *= 2

    def _go_on(self) -> None:
        if self._busy:
            return
        now = self._world.clock.now
        while self._inbox:
            match self._inbox.popleft():
                case _Live() as live:
                    self._open(live)
                case (proposal, arrived):
                    if proposal.session in self.scheduler.seats:
                        self.scheduler.offer(proposal, arrived)
        step = self.scheduler.form(now)
        if step is None:
            patience = self.scheduler.patience(now)
            if patience < math.inf:
                self._world.clock.at(math.nextafter(now + patience, math.inf), self._go_on)
            return
        self._busy = True
        rows = sum(map(len, step.trees.values())) + sum(step.chunks.values())
        context = sum(self.books.live[id].computed for id in (*step.trees, *step.chunks))
        seconds = self._world.setting.machine.step(rows, len(step.trees) + len(step.chunks), context)
        ends = self._world.compute(seconds, self._world.ledger.verifying)
        self._world.clock.at(ends, lambda: self._end(step, now))

    def _open(self, live: _Live) -> None:
        job, setting = live.served.job, self._world.setting
        self.books.live[live.id] = live
        session = Session(live.id, (0,) * job.prompt, SamplingParams(max_tokens=job.output), 0)
        config = setting.config
        priced = config is not None and config.adaptive_budget
        self.scheduler.enqueue(Open(session, 0, b"", config is not None, 0, priced=priced), _Stream())

    def _end(self, step: Step, began: float) -> None:
        """What `VerifyService` does with a step that has been computed."""
        now, scheduler = self._world.clock.now, self.scheduler
        outcomes = self.books.step(step)
        offers = scheduler.settle(step, outcomes, began, now)
        told: dict[_Draft, list[_Told]] = {}
        for id in (*step.trees, *step.chunks):
            if id in outcomes:
                live, seat = self.books.live[id], scheduler.seats[id]
                reply = self._settle(live, seat, step, outcomes[id], offers.get(id, NO_TREE), now)
                told.setdefault(live.draft, []).append(reply)
        scheduler.counters["steps"] += 1
        for draft, replies in told.items():
            self._tell(draft, replies, now)
        self._busy = False
        self._go_on()

    def _tell(self, draft: "_Draft", replies: list[_Told], now: float) -> None:
        lacking = sum(r.live.tokens - 1 - r.live.extended for r in replies if r.offer.wanted)
        arrives = now + self._world.setting.machine.link(lacking)
        self._world.clock.at(arrives, lambda: draft.receive(replies))

    def _settle(
        self, live: _Live, seat: Seat, step: Step, outcome: Outcome, offer: Offer, now: float
    ) -> _Told:
        nodes = len(step.trees.get(live.id, ()))
        seat.proposal, seat.held_until = None, 0.0
        self.scheduler.counters["trees_verified" if nodes > 1 else "plain_steps"] += 1
        round, seat.round = seat.round, seat.round + 1
        seat.committed += len(outcome.tokens)
        if outcome.finish:
            self.scheduler.remove(live.id)
            self.books.close(live.id)
        elif offer.wanted:
            self.scheduler.hold(seat, round, now)
        return _Told(live, round, len(outcome.tokens), offer, outcome.finish is not None)


class _Draft:
    """A draft replica: `DraftThread` with its drafter."""

    def __init__(self, world: "_World") -> None:
        self._world = world
        self._wanting: dict[_Live, _Told] = {}
        self._busy = False
        self._passes, self._reach = Cost(), Reach()
        config = world.setting.config
        self._rows = tuple(expanded(config)) if config else ()

    def receive(self, replies: Sequence[_Told]) -> None:
        """Take in what a target step did."""
        now = self._world.clock.now
        self._world.ledger.tokens.append((now, sum(told.tokens for told in replies)))
        for told in replies:
            live = told.live
            live.served.first = live.served.first or now
            live.told += told.tokens
            self._wanting.pop(live, None)
            if told.offer.wanted:
                self._wanting[live] = told
            if told.finished:
                live.served.ended = now
                self._world.finished()
        self._go_on()

    def _go_on(self) -> None:
        if self._busy or not self._wanting:
            return
        wanting, self._wanting = list(self._wanting.values()), {}
        self._busy = True
        seconds, trees = self._propose(wanting)
        ends = self._world.compute(seconds, self._world.ledger.drafting)
        ready: dict[_Verify, list[Proposal]] = {}
        for told, tree in zip(wanting, trees, strict=True):
            live = told.live
            root = live.served.job.prompt + live.told - 1
            ready.setdefault(live.verify, []).append(Proposal(live.id, 0, told.round, root, tree))
        self._world.clock.at(ends, lambda: self._send(ready))

    def _send(self, ready: Mapping[_Verify, Sequence[Proposal]]) -> None:
        now, link = self._world.clock.now, self._world.setting.machine.link(0)
        for verify, proposals in ready.items():
            self._world.clock.at(now + link, lambda v=verify, p=proposals: v.receive(p))  # type: ignore[misc]
        self._busy = False
        self._go_on()

    def _propose(self, wanting: Sequence[_Told]) -> tuple[float, list[DraftTree]]:
        """Seconds for a batch of trees, and the trees: as `Drafter.propose` extends, grows and reranks."""
        machine, config = self._world.setting.machine, self._world.setting.config
        assert config
        lives = [told.live for told in wanting]
        context = sum(live.served.job.prompt + live.told for live in lives)
        seconds = sum(machine.head_pass(rows, many, context) for rows, many in self._extend(lives))
        guesses = [live.guess(live.told - 1) for live in lives]
        if not config.adaptive_levels:
            seconds += sum(machine.head_pass(rows * len(lives), len(lives), context) for rows in self._rows)
            if config.shape is TreeShape.STATIC:
                return seconds, [guess.tree for guess in guesses]
            return seconds, [guess.part(config.levels, config.budget) for guess in guesses]
        prices = [told.offer.price for told in wanting]
        growing = _Growing(machine, len(lives), context)
        plan = AdaptivePlan(
            config.levels,
            config.beam,
            prices,
            sum(told.offer.pace for told in wanting),
            self._passes,
            self._reach,
            growing.clock,
        )
        least = [SLACK * price if config.adaptive_budget else 0.0 for price in prices]
        trees = replay(guesses, plan, growing, least)
        return seconds + growing.seconds, trees

    def _extend(self, lives: Sequence[_Live]) -> Iterator[tuple[int, int]]:
        """Rows and sessions of the passes over entries that are not there yet."""
        lacking = [live.served.job.prompt + live.told - 1 - live.extended for live in lives]
        for live, entries in zip(lives, lacking, strict=True):
            live.extended += entries
        while any(lacking):
            yield sum(min(n, EXTEND_CHUNK) for n in lacking), sum(n > 0 for n in lacking)
            lacking = [max(0, n - EXTEND_CHUNK) for n in lacking]


class _Growing:
    """The passes of a growth: its clock goes by what they take."""

    def __init__(self, machine: Machine, sessions: int, context: int) -> None:
        self._machine, self._sessions, self._context = machine, sessions, context
        self.seconds = 0.0

    def clock(self) -> float:
        """Seconds, all passes so far."""
        return self.seconds

    def __call__(self, rows: int) -> None:
        """A pass over so many rows."""
        self.seconds += self._machine.head_pass(rows, self._sessions, self._context)


def replay(
    guesses: Sequence[Guess],
    plan: AdaptivePlan,
    expand: Callable[[int], None],
    least: Sequence[float],
) -> list[DraftTree]:
    """Grow trees by a plan as `growth.grow` does, from recorded nodes instead of the head's.

    Args:
        guesses: of the sessions.
        plan: chooses what is expanded.
        expand: told the rows of each head pass.
        least: values, of each session; what is worth less is left out.
    """
    level_1 = [guess.by_level[0] if guess.by_level else () for guess in guesses]
    grown = [list(nodes) for nodes in level_1]
    candidates = [list(nodes) for nodes in level_1]
    for level in range(1, plan.levels):
        width = max(1, *(len(nodes) for nodes in candidates))
        values = torch.zeros(len(guesses), width)
        for i, nodes in enumerate(candidates):
            if nodes:
                values[i, : len(nodes)] = torch.tensor([guesses[i].tree.values[node] for node in nodes])
        chosen = plan.frontier(level, values.log())
        if not chosen.numel():
            break
        expand(chosen.numel())
        for i, picked in enumerate(chosen.tolist()):
            expanded = {candidates[i][at] for at in picked if at < len(candidates[i])}
            guess = guesses[i]
            below = guess.by_level[level] if level < len(guess.by_level) else ()
            candidates[i] = [node for node in below if guess.tree.parents[node] in expanded]
            grown[i] += candidates[i]
    return [
        guess.tree.keep((0, *(node for node in nodes if guess.tree.values[node] >= bound)))
        for guess, nodes, bound in zip(guesses, grown, least, strict=True)
    ]


def expanded(config: DraftConfig) -> Iterator[int]:
    """Nodes that a session's growth expands in each pass, where the sizes are fixed."""
    plan = plan_for(config)
    candidates = 1
    for level in range(1, plan.levels):
        candidates = plan.kept(level, candidates, plan.width(level)).numel()
        candidates = plan.frontier(level, torch.zeros(1, candidates)).numel()
        yield candidates


class _World:
    """Replicas, and the sessions between them."""

    def __init__(self, setting: Setting, jobs: Sequence[Job], sessions: int) -> None:
        self.setting, self.clock, self.ledger = setting, _Clock(), Ledger([])
        self._rng = Random(setting.seed)
        self.verifiers = [_Verify(self) for _ in range(setting.verifiers)]
        self._drafters = [_Draft(self) for _ in range(setting.drafters)]
        self._names = count()
        self._follow = deque(job for job in jobs if job.arrival is None)
        for job in jobs:
            if job.arrival is not None:
                self.clock.at(job.arrival, lambda job=job: self._begin(job))  # type: ignore[misc]
        for _ in range(min(sessions, len(self._follow))):
            self.clock.at(0.0, self.finished)

    def compute(self, seconds: float, log: list[tuple[float, float]]) -> float:
        """When it has ended, if it is begun now."""
        if self.setting.noise:
            seconds *= math.exp(self._rng.gauss(0, self.setting.noise))
        ends = self.clock.occupy(seconds, self.setting.machine.shared)
        log.append((ends - seconds, ends))
        return ends

    def finished(self) -> None:
        """One has finished: another begins."""
        if self._follow:
            self._begin(self._follow.popleft())

    def _begin(self, job: Job) -> None:
        number, now = next(self._names), self.clock.now
        served = Served(job, now)
        self.ledger.served.append(served)
        verify = self.verifiers[number % len(self.verifiers)]
        draft = self._drafters[number % len(self._drafters)]
        live = _Live(str(number), served, verify, draft)
        self.clock.at(now + self.setting.machine.link(0), lambda: verify.receive([live]))


def simulate(setting: Setting, jobs: Sequence[Job], sessions: int = 0) -> Ledger:
    """Serve jobs until all are done.

    Args:
        setting: replicas and their policy.
        jobs: in the order of their arrival.
        sessions: of the jobs without a time of arrival, so many run at once.
    """
    world = _World(setting, jobs, sessions)
    world.clock.run()
    for verify in world.verifiers:
        for name, counted in verify.scheduler.counters.items():
            world.ledger.counters[name] = world.ledger.counters.get(name, 0) + counted
        world.ledger.idle_pages &= verify.books.free_pages == setting.machine.pages
    return world.ledger
