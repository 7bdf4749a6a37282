"""Growth that stops where it does not pay: how deep and how wide, by the price of time."""

from collections.abc import Callable

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from services.speculation.adaptive import FIRST_REACH, AdaptivePlan, Reach
from services.speculation.cost import Cost
from services.speculation.growth import Candidates, DynamicPlan, Plan, grow

VOCABULARY = 12


def passes(seconds: float) -> Cost:
    """Passes that take so long, whatever their rows."""
    cost = Cost()
    for rows in (1, 64):
        cost.observe(rows, seconds)
    return cost


def plan(
    seconds: float,
    pace: float,
    *,
    price: float = 0.0,
    levels: int = 4,
    beam: int = 3,
    sessions: int = 1,
    reach: Reach | None = None,
    cost: Cost | None = None,
    clock: Callable[[], float] = lambda: 0.0,
) -> AdaptivePlan:
    known = cost or passes(seconds)
    return AdaptivePlan(levels, beam, [price] * sessions, pace, known, reach or Reach(), clock)


def grown(plan: Plan, sessions: int = 1, seed: int = 0) -> Candidates:
    """Growth by a head that says something else at every node, but always the same."""
    passes_made: list[int] = []

    def log_probs(rows: Tensor) -> Tensor:
        made = torch.Generator().manual_seed(seed + int(rows.sum()) % 1000)
        return torch.randn(*rows.shape, VOCABULARY, generator=made).mul(2).log_softmax(-1)

    def expand(tokens: Tensor, parents: Tensor) -> Tensor:
        passes_made.append(tokens.shape[1])
        return log_probs(tokens + 31 * len(passes_made))

    return grow(log_probs(torch.arange(sessions)[:, None])[:, 0], expand, plan, torch.arange(VOCABULARY))


class Ticking:
    """A clock on which every look takes a second."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


@given(seed=st.integers(0, 50), sessions=st.integers(1, 4), beam=st.integers(1, 6), levels=st.integers(1, 5))
def test_where_time_costs_nothing_the_tree_is_the_papers(
    seed: int, sessions: int, beam: int, levels: int
) -> None:
    free = plan(1.0, 0.0, sessions=sessions, beam=beam, levels=levels, clock=Ticking())
    for mine, whole in zip(
        vars_of(grown(free, sessions, seed)),
        vars_of(grown(DynamicPlan(levels, beam), sessions, seed)),
        strict=True,
    ):
        assert torch.equal(mine, whole)


def vars_of(candidates: Candidates) -> tuple[Tensor, ...]:
    return candidates.tokens, candidates.parents, candidates.log_values


def test_where_a_pass_costs_more_than_it_can_bring_there_is_one_level() -> None:
    dear = grown(plan(1.0, 1.01 * FIRST_REACH))
    assert dear.tokens.shape == (1, 3)
    assert (dear.parents == -1).all()


@given(seed=st.integers(0, 50), sessions=st.integers(1, 3), dear=st.floats(0, 2), dearer=st.floats(0, 2))
def test_the_dearer_time_is_the_smaller_the_tree(
    seed: int, sessions: int, dear: float, dearer: float
) -> None:
    sizes = [
        grown(plan(1.0, pace, sessions=sessions, clock=Ticking()), sessions, seed).tokens.shape[1]
        for pace in sorted((dear, dearer))
    ]
    assert sizes[0] >= sizes[1]


def test_a_frontier_is_as_wide_as_is_worth_its_rows() -> None:
    cost = Cost()
    for rows in (1, 2, 3, 4, 6, 8):
        cost.observe(rows, float(rows))
    values = torch.tensor([[0.6, 0.1, 0.05]])
    # A row costs 0.2 tokens: only the first node's children are expected to bring more.
    assert plan(0, 0.2, cost=cost).frontier(1, values.log()).tolist() == [[0]]
    assert plan(0, 0.07, cost=cost).frontier(1, values.log()).tolist() == [[0, 1]]
    assert plan(0, 0.01, cost=cost).frontier(1, values.log()).tolist() == [[0, 1, 2]]
    assert plan(0, 0.5, cost=cost).frontier(1, values.log()).tolist() == [[]]


def test_sessions_share_a_pass_and_its_price() -> None:
    alone = torch.tensor([[0.5]]).log()
    both = torch.tensor([[0.5], [0.5]]).log()
    # A pass costs 0.5 tokens of everyone who waits; its time does not depend on its rows.
    assert not plan(1.0, 0.5).frontier(1, alone).numel()
    assert not plan(1.0, 1.0, sessions=2).frontier(1, both).numel()
    # One that makes less of its time tips the scale for both.
    assert plan(1.0, 0.7, sessions=2).frontier(1, both).shape == (2, 1)


def test_what_passes_take_and_nodes_bring_is_learnt_while_growing() -> None:
    cost, reach = passes(0.1), Reach()
    before = cost.seconds(3)
    for seed in range(30):
        grown(plan(0, 0.0, cost=cost, reach=reach, clock=Ticking()), seed=seed)
    assert cost.seconds(3) > 2 * before
    assert 0 < reach[1] <= 1
    assert reach[1] != FIRST_REACH
    # Nodes below the price bring nothing.
    dear = Reach()
    grown(plan(1.0, 0.0, price=1.0, reach=dear, clock=Ticking()))
    assert dear[1] == 0.0
