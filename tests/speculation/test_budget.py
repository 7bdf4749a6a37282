"""Budgets: the price rule by enumeration, and the verifier's books at work in virtual time."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.speculation.budget import FIRST_ROUNDS, PROBE_SHARE, Budget, Offer, Prospect, affordable
from services.speculation.forest import Entry, rank
from services.types.tree import DraftTree

NODES = 32
SHAPES: dict[str, Callable[[int], float]] = {
    "memory-bound": lambda rows: 1 + rows / 2000,
    "compute-bound": lambda rows: 0.2 + 0.05 * rows,
    "in proportion": lambda rows: 0.05 * rows,
    "stairs": lambda rows: 0.5 + 0.5 * math.ceil(rows / 32),
    "knee": lambda rows: max(1.0, rows / 100),
}
"""Seconds of a step by its rows."""


def best_nodes(children: Sequence[float]) -> DraftTree:
    """The tree of highest value if every node has children of such probabilities."""
    values, parents, frontier = [1.0], [-1], [0]
    for _ in range(6):
        level = []
        for parent, probability in product(frontier, children):
            level.append(len(values))
            values.append(values[parent] * probability)
            parents.append(parent)
        frontier = sorted(level, key=lambda node: -values[node])[:8]
    chosen = sorted(sorted(range(len(values)), key=lambda node: (-values[node], node))[:NODES])
    index = {-1: -1} | {node: i for i, node in enumerate(chosen)}
    confidences = (1.0, *(values[node] / values[parents[node]] for node in chosen[1:]))
    return DraftTree(tuple(range(NODES)), tuple(index[parents[node]] for node in chosen), confidences)


GOOD, FAIR, POOR, HOPELESS = (
    best_nodes(children) for children in ((0.85, 0.08), (0.55, 0.2), (0.25, 0.1), (0.02, 0.01))
)


def above(tree: DraftTree, least: float) -> DraftTree:
    return tree.keep([node for node in range(len(tree)) if not node or tree.values[node] >= least])


@dataclass(eq=False)
class Client:
    """A session whose drafter always sends the same tree."""

    tree: DraftTree
    truth: float = 1.0
    """What is accepted of what the tree promises: as much on average, without luck."""
    weight: float = 1.0
    prospect: Prospect = field(default_factory=Prospect)
    proposal: DraftTree | None = None
    streak: int = 0
    ready: float = 0.0
    owed: float = 0.0
    tokens: int = 0
    steps: int = 0
    trees: int = 0
    nodes: int = 0
    rows: int = 1
    brought: float = 1.0


@dataclass
class World:
    """A verifier and its drafter in virtual time."""

    clients: list[Client]
    seconds: Callable[[int], float]
    drafting: float
    """Seconds until a tree is there."""
    fixed: int | None = None
    """Draft nodes of every tree; None lets the budget decide."""
    waits: bool | None = None
    """Whether steps wait for all trees on their way; None lets the budget decide."""
    now: float = 0.0
    total: float = 0.0
    budget: Budget = field(default_factory=Budget)

    def __post_init__(self) -> None:
        rows = 1
        while rows <= NODES * len(self.clients):
            for knot in sorted({rows, rows * 3 // 2}):
                self.budget.cost.observe(knot, self.seconds(knot))
            rows *= 2

    def run(self, steps: int) -> float:
        """So many steps; tokens per second."""
        began, before = self.now, self.total
        for _ in range(steps):
            self._step()
        return (self.total - before) / (self.now - began)

    def _begins(self) -> float:
        """When the next step does."""
        start = max(self.now, min(client.ready for client in self.clients))
        while coming := [client for client in self.clients if client.ready > start]:
            ready = [client for client in self.clients if client.ready <= start]
            due = [(client.ready, client.rows, client.weight * client.brought) for client in coming]
            until = self.budget.worth_waiting(sum(client.rows for client in ready), due, start)
            pays = until > start and all(client.proposal for client in ready)
            if not (pays if self.waits is None else self.waits):
                break
            start = min(client.ready for client in coming)
        return start

    def _step(self) -> None:
        start = self._begins()
        ready = [client for client in self.clients if client.ready <= start]
        forest = [
            Entry(client.proposal or DraftTree.root(0), client.weight, self.fixed is None) for client in ready
        ]
        kept = rank(forest, 10**6, self.budget.nodes)
        rows = sum(map(len, kept))
        self.now = start + self.seconds(rows)
        self.budget.cost.observe(rows, self.now - start)
        accepted = [
            self._accept(client, entry.tree.keep(nodes), start)
            for client, entry, nodes in zip(ready, forest, kept, strict=True)
        ]
        tokens = sum(client.weight * (1 + n) for client, n in zip(ready, accepted, strict=True))
        self.total += sum(accepted) + len(ready)
        self.budget.stepped(start, self.now, tokens)
        for client, entry, nodes, n in zip(ready, forest, kept, accepted, strict=True):
            if client.proposal:
                self.budget.verified(client.prospect, entry.tree, entry.tree.keep(nodes), n)
        for client in ready:
            self._offer(client)

    def _accept(self, client: Client, verified: DraftTree, start: float) -> int:
        if client.proposal:
            self.budget.waited(self.drafting, first=client.streak == 1)
        client.owed += client.truth * sum(verified.values[1:])
        accepted = int(client.owed + 1e-9)
        client.owed -= accepted
        client.tokens += 1 + accepted
        client.steps += 1
        client.trees += client.proposal is not None
        client.nodes += len(verified) - 1
        if client.proposal:
            client.rows = len(verified)
            client.brought += 0.1 * (1 + accepted - client.brought)
        return accepted

    def _offer(self, client: Client) -> None:
        if self.fixed is None:
            offer = self.budget.offer(client.prospect, client.weight, len(self.clients), client.streak)
            client.streak = client.streak + 1 if offer.wanted else 0
            tree = above(client.tree, offer.price / 2)
        else:
            offer = Offer(self.fixed > 0, 0.0, 0.0)
            tree = client.tree.keep(rank([Entry(client.tree)], self.fixed)[0])
        client.proposal = tree if offer.wanted else None
        client.ready = self.now + self.drafting * offer.wanted


def world(kind: DraftTree, sessions: int, shape: str, drafting: float, truth: float = 1.0) -> World:
    """Sessions all alike; a tree takes `drafting` times as long as a step of one row."""
    seconds = SHAPES[shape]
    return World([Client(kind, truth) for _ in range(sessions)], seconds, drafting * seconds(1))


def best_fixed(like: World) -> float:
    """Tokens per second of the best number of nodes for every tree, none among them."""
    worlds = [
        World([Client(client.tree, client.truth) for client in like.clients], like.seconds, like.drafting, n)
        for n in (0, 1, 2, 4, 8, 16, NODES - 1)
    ]
    return max(each.run(1) and each.run(12) for each in worlds)


def share(clients: Sequence[Client]) -> float:
    """Of the steps, those with trees."""
    return sum(client.trees for client in clients) / sum(client.steps for client in clients)


# The price rule.

PROFILES = st.lists(
    st.tuples(
        st.lists(st.floats(0, 1), max_size=4).map(lambda v: sorted(v, reverse=True)), st.floats(0.1, 1)
    ),
    min_size=1,
    max_size=3,
)
"""Values of the nodes of a tree, best first, and how often it occurs."""
TIMES = st.lists(st.floats(0, 2), min_size=5, max_size=5).map(lambda more: list(accumulate(more)))


@given(gains=st.lists(st.floats(0, 1), max_size=8), times=TIMES, rate=st.floats(0, 5))
def test_no_other_number_of_candidates_is_worth_more_beyond_its_time(
    gains: list[float], times: list[float], rate: float
) -> None:
    gains = sorted(gains, reverse=True)[: len(times) - 1]
    surplus = [sum(gains[:n]) - rate * times[n] for n in range(len(gains) + 1)]
    chosen = affordable(gains, times.__getitem__, rate)
    assert surplus[chosen] == pytest.approx(max(surplus))


@given(profiles=PROFILES, times=TIMES, least=st.floats(0.1, 2), overhead=st.floats(0, 2))
def test_where_the_price_is_the_rate_that_follows_from_it_no_policy_has_a_higher_rate(
    profiles: list[tuple[list[float], float]], times: list[float], least: float, overhead: float
) -> None:
    """Rounds with a tree take `overhead` more than plain steps; which tree comes is known before."""

    def seconds(n: int) -> float:
        return least + times[n] + overhead * (n > 0)

    def average(policy: Sequence[int]) -> tuple[float, float]:
        """Tokens and seconds of a round in which each profile gets so many nodes."""
        rounds = [
            (often * (1 + sum(values[:n])), often * seconds(n))
            for (values, often), n in zip(profiles, policy, strict=True)
        ]
        return sum(tokens for tokens, _ in rounds), sum(takes for _, takes in rounds)

    def chosen(rate: float) -> list[int]:
        return [affordable(values, seconds, rate) for values, _ in profiles]

    every = product(*(range(len(values) + 1) for values, _ in profiles))
    best = max(tokens / takes for tokens, takes in map(average, every))
    rates = [0.0]
    for _ in range(12):
        tokens, takes = average(chosen(rates[-1]))
        rates.append(tokens / takes)
    assert rates[1:] == pytest.approx(sorted(rates[1:]))
    assert rates[-1] == pytest.approx(best)
    # The rule's surplus says on which side of the best a price is.
    for factor, sign in ((0.8, 1), (1.25, -1)):
        tokens, takes = average(chosen(factor * best))
        assert sign * (tokens - factor * best * takes) > 0


# The books in virtual time.


@pytest.mark.parametrize("sessions", [1, 8])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", [GOOD, FAIR, POOR, HOPELESS], ids=["good", "fair", "poor", "hopeless"])
def test_no_fixed_number_of_nodes_is_faster_by_more_than_four_percent(
    kind: DraftTree, shape: str, sessions: int
) -> None:
    auto = world(kind, sessions, shape, drafting=0.3)
    auto.run(25)
    assert auto.run(90) > 0.96 * best_fixed(auto)


@pytest.mark.parametrize("sessions", [1, 4, 32])
@pytest.mark.parametrize("shape", SHAPES)
def test_trees_that_never_help_cost_about_what_probes_may(shape: str, sessions: int) -> None:
    hopeless = world(HOPELESS, sessions, shape, drafting=1.0)
    hopeless.run(20)
    # As much again is for trying other numbers of nodes.
    assert hopeless.run(100) > (1 - 2.5 * PROBE_SHARE) * sessions / SHAPES[shape](sessions)


@pytest.mark.parametrize("sessions", [1, 4, 32])
def test_sessions_whose_trees_help_nearly_always_have_one(sessions: int) -> None:
    helped = world(GOOD, sessions, "memory-bound", drafting=0.3)
    helped.run(60)
    assert share(helped.clients) > 0.98 - 1 / 60


@pytest.mark.parametrize("sessions", [1, 8])
@pytest.mark.parametrize("shape", ["memory-bound", "knee"])
def test_overconfident_heads_are_found_out_and_found_again_when_they_are_right(
    shape: str, sessions: int
) -> None:
    over = world(GOOD, sessions, shape, drafting=0.4, truth=0.0)
    over.run(80)
    assert over.budget.trust < 0.15
    assert over.run(150) > 0.97 * sessions / SHAPES[shape](sessions)
    for client in over.clients:
        client.truth = 1.0
    assert until_trees(over, over.clients) < 1500
    over.run(60)
    assert over.run(40) > 0.9 * best_fixed(over)


def until_trees(world: World, clients: Sequence[Client]) -> int:
    """Steps until nearly all of theirs are with trees."""
    steps, recently = 0, 0.0
    while recently < 0.9 and steps < 3000:
        for client in clients:
            client.steps = client.trees = 0
        world.run(20)
        steps, recently = steps + 20, share(clients)
    return steps


@pytest.mark.parametrize("sessions", [1, 8])
@pytest.mark.parametrize("shape", ["memory-bound", "stairs"])
def test_trees_come_back_when_they_begin_to_help(shape: str, sessions: int) -> None:
    changing = world(HOPELESS, sessions, shape, drafting=0.4)
    changing.run(200)
    for client in changing.clients:
        client.tree = GOOD
    assert until_trees(changing, changing.clients) <= 500
    assert changing.run(40) > 0.95 * best_fixed(changing)


@pytest.mark.parametrize("sessions", [1, 8])
def test_trees_that_cease_to_help_are_had_no_more(sessions: int) -> None:
    changing = world(GOOD, sessions, "memory-bound", drafting=0.4)
    changing.run(200)
    for client in changing.clients:
        client.tree = HOPELESS
    changing.run(100)
    assert changing.run(100) > 0.97 * sessions / changing.seconds(sessions)


def test_one_session_whose_trees_begin_to_help_is_found_among_others() -> None:
    mixed = world(HOPELESS, 8, "memory-bound", drafting=0.4)
    mixed.run(150)
    mixed.clients[5].tree = GOOD
    assert until_trees(mixed, mixed.clients[5:6]) <= 1000


def test_where_trees_help_some_no_session_is_slower_than_all_would_be_without() -> None:
    mixed = World([Client(GOOD if i % 2 else HOPELESS) for i in range(8)], SHAPES["memory-bound"], 0.3)
    mixed.run(900)
    began, before = mixed.now, [client.tokens for client in mixed.clients]
    mixed.run(300)
    plain = 1 / mixed.seconds(8)
    rates = [(c.tokens - n) / (mixed.now - began) for c, n in zip(mixed.clients, before, strict=True)]
    assert min(rates[::2]) > 0.9 * plain
    assert min(rates[1::2]) > 2.5 * plain


def test_a_cold_first_tree_does_not_keep_later_ones_away() -> None:
    cold = world(GOOD, 1, "memory-bound", drafting=0.3)
    cold.drafting *= 100
    cold.run(2)
    cold.drafting /= 100
    assert until_trees(cold, cold.clients) <= 100


def test_sizes_believed_to_be_dear_are_tried_again() -> None:
    misled = world(GOOD, 1, "memory-bound", drafting=0.1)
    for rows in (4, 6, 8, 12, 16, 24, 32):
        for _ in range(100):
            misled.budget.cost.observe(rows, 3.0)
    misled.run(2000)
    assert misled.run(50) > 0.85 * best_fixed(misled)


# Who waits for whom.


@pytest.mark.parametrize("fixed", [None, 8])
@pytest.mark.parametrize("drafting", [0.2, 0.6, 1.5])
@pytest.mark.parametrize("shape", SHAPES)
def test_waiting_as_it_pays_is_as_fast_as_the_better_of_always_and_never(
    shape: str, drafting: float, fixed: int | None
) -> None:
    rates = {}
    for waits in (None, True, False):
        halves = world(GOOD, 8, shape, drafting)
        halves.fixed, halves.waits = fixed, waits
        halves.run(30)
        for client in halves.clients[::2]:
            client.ready = max(client.ready, halves.now + halves.seconds(8))
        rates[waits] = halves.run(30) and halves.run(60)
    assert rates[None] > 0.94 * max(rates[True], rates[False])


@given(
    coming=st.lists(st.tuples(st.floats(0, 20), st.integers(1, 64), st.floats(0.1, 9)), max_size=5),
)
def test_no_step_waits_longer_than_what_is_waited_for_may_bring(
    coming: list[tuple[float, int, float]],
) -> None:
    budget = Budget()
    for rows in (1, 4, 16, 64):
        budget.cost.observe(rows, 1 + rows / 30)
    budget.stepped(0.0, 2.0, 3.0)
    until = budget.worth_waiting(4, coming, 10.0)
    latest = (
        max((due for due, *_ in coming), default=10.0) + sum(brings for *_, brings in coming) / budget.rate
    )
    assert 10.0 <= until <= max(10.0, latest)


# Who gets what.


def test_the_lightest_session_with_the_worst_trees_advances_as_often_as_any() -> None:
    light = Client(HOPELESS, weight=0.01)
    crowd = World([light, *(Client(GOOD, weight=2.0) for _ in range(15))], SHAPES["in proportion"], 0.01)
    crowd.run(100)
    assert light.tokens >= light.steps > 0.8 * max(client.steps for client in crowd.clients)


@pytest.mark.parametrize("shape", ["memory-bound", "compute-bound", "knee"])
def test_a_heavier_weight_gets_at_least_as_many_nodes(shape: str) -> None:
    clients = [Client(FAIR, weight=weight) for weight in (0.5, 1.0, 2.0) for _ in range(2)]
    weighted = World(clients, SHAPES[shape], 0.1)
    weighted.run(200)
    light, usual, heavy = (sum(client.nodes for client in clients[i : i + 2]) for i in (0, 2, 4))
    assert light <= usual <= heavy
    assert light < heavy


@given(
    chances=st.integers(1, 300),
    gains=st.lists(st.floats(0, 1), min_size=1, max_size=30).map(lambda v: sorted(v, reverse=True)),
)
def test_trying_other_numbers_of_nodes_costs_no_more_than_its_share(chances: int, gains: list[float]) -> None:
    budget = Budget()
    for rows in (1, 2, 4, 8, 16, 32):
        budget.cost.observe(rows, 0.5 + rows / 20)
    lost = 0.0
    for step in range(chances):
        budget.stepped(step, step + 0.6, 3)
        budget.idle()
        surplus = [
            sum(gains[:n]) - budget.rate * budget.cost.seconds(4 + n)
            for n in (
                affordable(gains, lambda n: budget.cost.seconds(4 + n), budget.rate),
                budget.nodes(gains, 4),
            )
        ]
        lost += surplus[0] - surplus[1]
    # A tenth of the first steps may be unlucky.
    assert lost <= PROBE_SHARE * budget.rate * budget.cost.seconds(4 + len(gains)) * (chances + 100)


def test_idle_time_has_no_price_but_waiting_for_trees_has() -> None:
    budget = Budget()
    assert budget.rate == 0.0
    for step in range(100):
        budget.stepped(2.0 * step, 2.0 * step + 1, 3)
    assert budget.rate == pytest.approx(3 / 2, rel=0.01)
    for step in range(100):
        budget.idle()
        budget.stepped(1000.0 * step, 1000.0 * step + 1, 3)
    assert budget.rate == pytest.approx(3, rel=0.01)


def test_before_anything_is_known_every_tree_and_every_node_is_wanted() -> None:
    budget = Budget()
    assert budget.offer(Prospect(), 1.0, 1, 2) == Offer(True, 0.0, 0.0)
    assert budget.nodes([0.5, 0.1], 1) == 2
    assert (budget.rate, budget.trust, budget.delay) == (0.0, 1.0, 0.0)
    budget.waited(0.25, first=False)
    assert budget.delay == pytest.approx(0.25)


@pytest.mark.parametrize("sessions", [1, 8, 64])
def test_trees_that_never_come_are_not_asked_for_any_more(sessions: int) -> None:
    budget, prospect, wanted = Budget(), Prospect(), []
    for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        budget.cost.observe(rows, 1.0 + rows / 20)
    streak = 0
    for step in range(200 * sessions):
        budget.stepped(2.0 * step, 2.0 * step + 1, sessions)
        offer = budget.offer(prospect, 1.0, sessions, streak)
        wanted.append(offer.wanted)
        streak = streak + 1 if offer.wanted else 0
        if offer.wanted:
            budget.waited(1.0, first=streak == 1)
            budget.missed()
    asked = FIRST_ROUNDS * sessions
    assert all(wanted[: asked - 1])
    assert sum(wanted[asked + 1 :]) <= 0.05 * len(wanted)


def test_a_node_that_is_worth_less_than_the_price_is_not_verified_and_one_worth_more_is() -> None:
    linear = world(FAIR, 1, "compute-bound", drafting=0.1)
    linear.run(300)
    budget, prospect = linear.budget, linear.clients[0].prospect
    price = budget.offer(prospect, 1.0, 1, 2).price
    assert price == pytest.approx(budget.rate / budget.trust * 0.05, rel=0.15)
    assert budget.offer(prospect, 2.0, 1, 2).price == pytest.approx(price / 2)
    sure, doubtful = [1.2 * price], [0.8 * price]
    assert affordable(sure, lambda n: budget.cost.seconds(1 + n), budget.rate / budget.trust) == 1
    assert affordable(doubtful, lambda n: budget.cost.seconds(1 + n), budget.rate / budget.trust) == 0


def test_the_price_told_is_what_the_last_node_costs_at_the_rate_there_is() -> None:
    budget, prospect = Budget(), Prospect()
    for rows in (1, 2, 3, 4, 6, 8, 12, 16):
        budget.cost.observe(rows, 1.0 + rows / 20)
    tree = DraftTree.chain(range(9), [1.0] + [0.9] * 8)
    for step in range(50):
        budget.stepped(2.0 * step, 2.0 * step + 1, 4)
        budget.waited(0.1, first=False)
        budget.verified(prospect, tree, tree, 5)
    offer = budget.offer(prospect, 1.0, 1, 2)
    assert offer.wanted
    assert offer.price == pytest.approx(budget.rate / 20 / prospect.trust(budget.trust), rel=0.01)
    assert offer.pace > 1 / budget.cost.seconds(1)
    assert budget.offer(prospect, 2.0, 1, 2).price == pytest.approx(offer.price / 2)
