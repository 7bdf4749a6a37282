"""Budgets: which trees and which of their nodes are worth their time (DESIGN section 6).

Everything is one rule. Time has a price: the tokens that are committed per second. What is done next is worth
its gain in tokens less the price of its seconds, and of all that could be done the worthiest is. Where the
price is the rate that follows from it, that rate is the best there is (Dinkelbach, Management Science 13,
1967).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, zip_longest

from services.speculation.cost import Cost
from services.types.tree import MAX_NODES, DraftTree

FORGETTING = 0.05
"""Weight of the newest of a session's trees, or of the service's steps."""
SHRINKAGE = 16.0
"""A session's own trees, and nodes promised, count against those of all as so many of these would."""
DOUBT = 4.0
"""What all trees have promised counts against their word as so many nodes that were kept would."""
PROBE_SHARE = 0.01
"""Of the sessions' time, what trees that are not expected to pay may cost."""
ALONG = 0.9
"""Where all do better with trees, so many times the rate of plain steps is enough for one of them."""
STAY = 32
"""Rounds over which what the first tree of a session takes longer than others is spread."""
FIRST_ROUNDS = 8
"""Trees of each session that are asked for before any is denied one, whether they come or not."""
LEAST_TRUST, MOST_TRUST = 0.01, 1.5
_STRIDES = 0.7548776662466927, 0.5698402909980532
"""Their multiples fill the unit square evenly: 1/g and 1/g² with g³ = g + 1."""
_LEAST_DELAY_S = 1e-6


def affordable(gains: Sequence[float], seconds: Callable[[int], float], rate: float) -> int:
    """How many of the best candidates are worth their time: n of the greatest Σ gains - rate * seconds(n).

    Args:
        gains: tokens that each is expected to bring, best first.
        seconds: what the first n take.
        rate: the price of a second, in tokens.
    """
    worth = [gain - rate * seconds(n) for n, gain in enumerate(accumulate(gains, initial=0.0))]
    return worth.index(max(worth))


@dataclass(slots=True)
class Prospect:
    """What trees have been like: what their nodes promised, by rank, and how much of it they kept."""

    forgetting: float = FORGETTING
    """Weight of the newest tree."""
    rounds: int = 0
    """Trees seen."""
    values: list[float] = field(default_factory=list)
    """Mean V of the best draft node, the second best, and so on, lately."""
    promised: float = 0.0
    """V of the draft nodes that were verified, lately."""
    accepted: float = 0.0
    """Those of them that were accepted."""

    def see(self, proposed: DraftTree, verified: DraftTree, accepted: int) -> None:
        """Take in the tree of a round; see `Budget.verified`."""
        ranked = sorted(proposed.values[1:], reverse=True)
        self.values += [0.0] * (len(ranked) - len(self.values))
        ranked += [0.0] * (len(self.values) - len(ranked))
        self.rounds += 1
        gain = max(1 / self.rounds, self.forgetting)
        self.values = [mean + gain * (value - mean) for mean, value in zip(self.values, ranked, strict=True)]
        self.promised += sum(verified.values[1:]) - self.forgetting * self.promised
        self.accepted += accepted - self.forgetting * self.accepted

    def trust(self, usual: float | None = None) -> float:
        """Nodes accepted for each promised; with little to go by, as many as is usual, or all."""
        known, taken = (1.0, DOUBT) if usual is None else (usual, SHRINKAGE)
        trust = (self.accepted + taken * known) / (self.promised + taken)
        return min(max(trust, LEAST_TRUST), MOST_TRUST)

    def gains(self, all: "Prospect") -> list[float]:
        """Tokens to be expected of the nodes of a tree, best first.

        Its own experience counts as far as there are rounds, else that of all sessions.
        """
        own = self.rounds / (self.rounds + SHRINKAGE)
        trust = self.trust(all.trust())
        pairs = zip_longest(self.values, all.values, fillvalue=0.0)
        return [trust * (own * mine + (1 - own) * theirs) for mine, theirs in pairs]


@dataclass(slots=True)
class _Waits:
    """How long something takes: the mean of logarithms, as one interruption says little of the next."""

    count: float = 0.0
    log_s: float = 0.0

    @property
    def seconds(self) -> float:
        return math.exp(self.log_s) if self.count else 0.0

    def see(self, seconds: float) -> None:
        self.count = min(self.count + 1, 1 / (2 * FORGETTING))
        self.log_s += (math.log(max(seconds, _LEAST_DELAY_S)) - self.log_s) / self.count


@dataclass(frozen=True, slots=True)
class Offer:
    """What a session is told with an outcome."""

    wanted: bool
    """Whether it is to have a tree."""
    price: float
    """Value that a node of it must have to be worth its time in the target step."""
    pace: float
    """Tokens per second the session makes: the price of a second that it waits for its tree."""


class Budget:
    """The verifier's books: what steps take, what a second is worth, what trees bring, and when they come."""

    def __init__(self) -> None:
        self.cost = Cost()
        self._tokens = 0.0
        self._seconds = 0.0
        self._ended: float | None = None
        self._lead_in, self._delay = _Waits(), _Waits()
        self._all = Prospect(FORGETTING / 2)
        self._missed = 0
        """Trees that were waited for in vain."""
        self._spread = 0.5, 0.5
        self._takes: dict[tuple[int, float], tuple[list[float], float]] = {}

    @property
    def rate(self) -> float:
        """λ: tokens per second of all sessions, by their weights; 0.0 before the first step."""
        return self._tokens / self._seconds if self._seconds else 0.0

    @property
    def trust(self) -> float:
        """Nodes accepted for each that the values promised, lately."""
        return self._all.trust()

    @property
    def delay(self) -> float:
        """Seconds from the outcome that wants a tree to its arrival, lately, where one came before it."""
        return self._delay.seconds

    def idle(self) -> None:
        """No session runs: the time until the next does has no price."""
        self._ended = None

    def stepped(self, began: float, ended: float, tokens: float) -> None:
        """Take in a target step.

        Args:
            began: seconds, when it began.
            ended: when it ended.
            tokens: that it committed, each by the weight of its session.
        """
        keep, since = 1 - FORGETTING, began if self._ended is None else self._ended
        self._tokens = keep * self._tokens + tokens
        self._seconds = keep * self._seconds + ended - since
        self._ended = ended
        first, second = self._spread
        self._spread = (first + _STRIDES[0]) % 1, (second + _STRIDES[1]) % 1
        self._takes.clear()

    def waited(self, seconds: float, first: bool) -> None:
        """Take in how long it took from an outcome that wanted a tree until it came, or was given up.

        The first tree after plain steps is another matter than those behind it: its drafter has to extend by
        all that it has missed.
        """
        (self._lead_in if first else self._delay).see(seconds)

    def verified(self, prospect: Prospect, proposed: DraftTree, verified: DraftTree, accepted: int) -> None:
        """Take in what became of a session's tree.

        Args:
            prospect: the session's.
            proposed: as the drafter sent it.
            verified: what stood in the step.
            accepted: draft nodes of it that were.
        """
        prospect.see(proposed, verified, accepted)
        self._all.see(proposed, verified, accepted)

    def missed(self) -> None:
        """Take in that a session has waited for its tree in vain."""
        self._missed += 1

    def offer(self, prospect: Prospect, weight: float, sessions: int, streak: int) -> Offer:
        """Tree or plain: whether sessions like this one would be faster with trees than without.

        With n nodes, what they bring comes once in the time until the tree is there and the step that has it;
        without, a token once in a step. The step is one in which all others do likewise, by the weight of
        this one: a place beside their trees is no measure, since each would find it better than none where
        all would be better off plain. So the sessions go together: where trees like those there have been
        are better for all, one that would be about as fast goes along; where they are not, one goes its
        own way only if that pays although the others do not wait for it.

        Where trees are not expected to pay, two are had now and then all the same, after the same step by
        all: that is how long trees take when they are wanted.

        Args:
            prospect: the session's.
            weight: of its tokens.
            sessions: that run, this one among them.
            streak: trees that it wanted in a row until now.
        """
        if not self.cost.known or not self._delay.count:
            return Offer(True, 0.0, 0.0)
        alike = 1 + (sessions - 1) / weight
        seconds, together = self._steps(sessions, alike)
        delay, step = self.delay, seconds[0]
        lead_in = max(self._lead_in.seconds, delay)
        begins = delay if streak else delay + (lead_in - delay) / STAY
        tokens = list(accumulate(prospect.gains(self._all), initial=1.0))
        rates = _rates(tokens, begins, seconds)
        plain, tree = 1 / step, max(rates)
        nodes = rates.index(tree)
        if sessions == 1:
            pays = tree > plain
        elif together > plain:
            pays = tree > ALONG * plain
        else:
            # The others go on by plain steps; those that begin meanwhile are missed.
            missed = step * math.ceil(begins / step)
            pays = max(_rates(tokens, missed, seconds)) > plain
        if pays or self._all.rounds + self._missed < FIRST_ROUNDS * sessions:
            trust = prospect.trust(self.trust)
            # What the last of them costs, not the next: beyond a kink of T(N) that may be much more.
            dearness = (seconds[nodes] - seconds[max(nodes - 1, 0)]) / alike
            return Offer(True, self.rate / weight / trust * dearness, max(plain, tree))
        lost = lead_in + delay + 2 * seconds[nodes] - 2 * tokens[nodes] * step
        probing = streak == 1 or self._spread[0] * lost < PROBE_SHARE * step
        return Offer(probing, 0.0, plain * sessions)

    def nodes(self, gains: Sequence[float], base: int) -> int:
        """How many draft nodes of a forest are worth their time.

        Now and then, as often as costs little, it is another number: only what is tried is measured.

        Args:
            gains: value of each, by the weight of its session, best first.
            base: rows of the step without them.
        """
        if not self.cost.known:
            return len(gains)

        def seconds(n: int) -> float:
            return self.cost.seconds(base + n)

        trusted = [self.trust * gain for gain in gains]
        best = affordable(trusted, seconds, self.rate)
        chance, size = self._spread
        other = int((len(gains) + 1) ** size) - 1
        more = sum(trusted[best:other]) - sum(trusted[other:best])
        lost = self.rate * (seconds(other) - seconds(best)) - more
        return other if chance * lost < PROBE_SHARE * self.rate * seconds(best) else best

    def worth_waiting(self, rows: int, coming: Sequence[tuple[float, int, float]], now: float) -> float:
        """Until when a step of trees does well to wait for others on their way, by the price rule.

        Waiting for some of them has what they bring in this step, not in a later one, and costs the time
        until they come and what they add to the step. A tree that is overdue is taken to need as long again
        as it is late.

        Args:
            rows: of the step as it stands.
            coming: when each tree is due, its rows, and the tokens that it may bring, by their weights.
            now: seconds, as all times here.

        Returns:
            `now` where it does not.
        """
        if not self.rate:
            return now
        until, tokens, more, step = now, 0.0, rows, self.cost.seconds(rows)
        for due, adds, brings in sorted(coming, key=lambda tree: abs(tree[0] - now)):
            more, tokens = more + adds, tokens + brings
            worth = tokens / self.rate - (self.cost.seconds(more) - step)
            if abs(due - now) < worth:
                until = max(until, due + worth)
        return until

    def _steps(self, sessions: int, alike: float) -> tuple[list[float], float]:
        """Seconds of steps of so many sessions with 0, 1, 2, … times `alike` nodes, and the tokens per second
        of each if all have trees like those there have been.
        """
        key = sessions, alike
        if key not in self._takes:
            seconds = [self.cost.seconds(sessions + n * alike) for n in range(MAX_NODES)]
            tokens = list(accumulate(self._all.gains(self._all), initial=1.0))
            self._takes[key] = seconds, max(_rates(tokens, self.delay, seconds))
        return self._takes[key]


def _rates(tokens: Sequence[float], delay: float, seconds: Sequence[float]) -> list[float]:
    """Tokens per second of a session with 0, 1, 2, … nodes that come after a delay and stand in a step."""
    return [gain / (delay + takes) for gain, takes in zip(tokens, seconds, strict=False)]
