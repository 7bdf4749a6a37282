"""Forest rank: of all trees in a step, connected trees of exactly the draft nodes that are worth most."""

from collections.abc import Iterator, Sequence
from itertools import accumulate, combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.speculation.budget import affordable
from services.speculation.forest import Entry, Worth, rank
from services.types.tree import DraftTree

Kept = list[tuple[int, ...]]


@st.composite
def trees(draw: st.DrawFn, most: int = 12) -> DraftTree:
    """Any tree; its few different confidences, 0 and 1 among them, make ties of every kind."""
    parents, depths = [-1], [0]
    for i in range(1, draw(st.integers(1, most))):
        lowest = next(j for j in range(i) if depths[j] >= depths[-1] - 1)
        parents.append(draw(st.integers(lowest, i - 1)))
        depths.append(depths[parents[-1]] + 1)
    confidences = [draw(st.sampled_from([0.0, 0.25, 0.5, 1.0])) for _ in parents[1:]]
    return DraftTree(tuple(range(len(parents))), tuple(parents), (1.0, *confidences))


def entries(most: int = 12, priced: st.SearchStrategy[bool] | None = None) -> st.SearchStrategy[Entry]:
    weights = st.sampled_from([0.5, 1.0, 2.0])
    return st.builds(Entry, trees(most), weights, st.booleans() if priced is None else priced)


FORESTS = st.lists(entries(), max_size=5)
SMALL = st.lists(entries(4, st.just(True)), max_size=3)
BUDGETS = st.integers(-3, 12) | st.integers(0, 70)
COSTS = st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0]), min_size=16, max_size=16).map(
    lambda steps: list(accumulate(steps, initial=1.0))
)
"""Seconds of a step by its rows: never falling, else anything."""


def fixed(*forest: DraftTree) -> list[Entry]:
    return [Entry(tree) for tree in forest]


def drafted(forest: Sequence[Entry]) -> int:
    return sum(len(entry.tree) - 1 for entry in forest)


def value(forest: Sequence[Entry], kept: Kept) -> float:
    """Tokens that draft nodes bring, by the weights of their sessions."""
    pairs = zip(forest, kept, strict=True)
    return sum(entry.weight * entry.tree.values[node] for entry, nodes in pairs for node in nodes[1:])


def choices(forest: Sequence[Entry]) -> Iterator[Kept]:
    """Every choice of connected trees, their roots among them."""

    def connected(tree: DraftTree) -> Iterator[tuple[int, ...]]:
        for n in range(len(tree)):
            for nodes in combinations(range(1, len(tree)), n):
                if all(tree.parents[node] in (0, *nodes) for node in nodes):
                    yield (0, *nodes)

    for kept in product(*(list(connected(entry.tree)) for entry in forest)):
        yield list(kept)


def size(kept: Kept) -> int:
    return sum(len(nodes) - 1 for nodes in kept)


def keys(forest: Sequence[Entry], kept: Kept, inside: bool) -> list[tuple[float, int, int, int]]:
    """What decides about each draft node that is kept, or that is not: value, depth, tree, node."""
    return [
        (-entry.weight * entry.tree.values[node], entry.tree.depths[node], i, node)
        for i, (entry, nodes) in enumerate(zip(forest, kept, strict=True))
        for node in range(1, len(entry.tree))
        if (node in nodes) == inside
    ]


def at_most(count: int) -> Worth:
    return lambda gains, base: min(count, len(gains))


def by_price(seconds: Sequence[float], rate: float) -> Worth:
    return lambda gains, base: affordable(gains, lambda n: seconds[base + n], rate)


@given(forest=FORESTS, budget=BUDGETS, paying=st.integers(0, 30))
def test_every_root_is_kept_and_every_node_stands_with_its_parent(
    forest: list[Entry], budget: int, paying: int
) -> None:
    for worth in (None, at_most(paying)):
        kept = rank(forest, budget, worth)
        assert len(kept) == len(forest)
        for entry, nodes in zip(forest, kept, strict=True):
            assert nodes[0] == 0
            assert list(nodes) == sorted(set(nodes))
            assert all(entry.tree.parents[node] in nodes for node in nodes[1:])
            assert entry.tree.keep(nodes).tokens == tuple(entry.tree.tokens[node] for node in nodes)


@given(forest=FORESTS, budget=BUDGETS)
def test_without_a_price_the_budget_is_used_to_the_last_node_and_roots_do_not_count(
    forest: list[Entry], budget: int
) -> None:
    assert size(rank(forest, budget)) == min(max(0, budget), drafted(forest))


@given(forest=FORESTS, budget=BUDGETS)
def test_no_node_left_out_is_better_than_one_that_is_kept(forest: list[Entry], budget: int) -> None:
    kept = rank(forest, budget)
    best, rest = keys(forest, kept, inside=True), keys(forest, kept, inside=False)
    assert max(best, default=(-3.0,)) < min(rest, default=(3.0,))


@given(forest=SMALL, budget=st.integers(-1, 10))
def test_no_connected_choice_of_as_many_nodes_is_worth_more(forest: list[Entry], budget: int) -> None:
    kept = rank(forest, budget)
    best = max(value(forest, choice) for choice in choices(forest) if size(choice) == size(kept))
    assert value(forest, kept) == pytest.approx(best)


@given(forest=SMALL, budget=st.integers(-1, 10), seconds=COSTS, rate=st.sampled_from([0.0, 0.25, 0.5, 1.0]))
def test_at_a_price_no_connected_choice_of_any_size_is_worth_more_beyond_its_time(
    forest: list[Entry], budget: int, seconds: list[float], rate: float
) -> None:
    def surplus(kept: Kept) -> float:
        return value(forest, kept) - rate * seconds[len(forest) + size(kept)]

    kept = rank(forest, budget, by_price(seconds, rate))
    within = [choice for choice in choices(forest) if size(choice) <= max(0, budget)]
    assert size(kept) <= max(0, budget)
    assert surplus(kept) == pytest.approx(max(map(surplus, within)))


@given(forest=FORESTS, budget=BUDGETS, paying=st.integers(0, 30))
def test_trees_without_a_price_take_every_place_that_priced_nodes_do_not_pay_for(
    forest: list[Entry], budget: int, paying: int
) -> None:
    asked: list[tuple[list[float], int]] = []

    def worth(gains: Sequence[float], base: int) -> int:
        asked.append((list(gains), base))
        return min(paying, len(gains))

    kept, unpriced = rank(forest, budget, worth), rank(forest, budget)
    ((gains, base),) = asked
    assert gains == sorted(gains, reverse=True)
    assert base + len(gains) == len(forest) + size(unpriced)
    for entry, nodes, before in zip(forest, kept, unpriced, strict=True):
        assert set(nodes) <= set(before) if entry.priced else set(nodes) >= set(before)
    priced = sum(len(nodes) - 1 for entry, nodes in zip(forest, kept, strict=True) if entry.priced)
    others = drafted([entry for entry in forest if not entry.priced])
    assert priced == min(paying, len(gains))
    assert size(kept) - priced == min(others, max(0, budget) - priced)


@given(forest=FORESTS, budget=BUDGETS, favourite=st.integers(0, 4), factor=st.sampled_from([1.5, 4.0]))
def test_a_tree_whose_tokens_are_worth_more_never_gets_fewer_nodes(
    forest: list[Entry], budget: int, favourite: int, factor: float
) -> None:
    if not forest:
        return
    i = favourite % len(forest)
    entry = forest[i]
    heavier = [*forest[:i], Entry(entry.tree, factor * entry.weight, entry.priced), *forest[i + 1 :]]
    assert len(rank(heavier, budget)[i]) >= len(rank(forest, budget)[i])


@given(forest=FORESTS, budget=st.integers(0, 60), data=st.data())
def test_what_is_left_of_a_tree_can_shrink_further_as_if_it_had_been_ranked_so_at_once(
    forest: list[Entry], budget: int, data: st.DataObject
) -> None:
    for entry, nodes in zip(forest, rank(forest, budget), strict=True):
        fewer = data.draw(st.integers(1, len(nodes)))
        (shrunk,) = rank([entry], fewer - 1)
        assert len(shrunk) == fewer
        assert set(shrunk) <= set(nodes)


def test_a_sure_tree_takes_the_places_of_a_doubtful_one() -> None:
    sure = DraftTree.chain([0, 1, 2, 3], [1.0, 0.9, 0.9, 0.9])
    doubtful = DraftTree((0, 1, 2, 3), (-1, 0, 0, 1), (1.0, 0.6, 0.4, 0.9))
    assert rank(fixed(doubtful, sure), 3) == [(0,), (0, 1, 2, 3)]
    assert rank(fixed(doubtful, sure), 5) == [(0, 1, 3), (0, 1, 2, 3)]
    assert rank(fixed(doubtful, sure), 0) == rank(fixed(doubtful, sure), -1) == [(0,), (0,)]


def test_ties_go_to_the_shallower_node_then_to_the_earlier_tree_then_to_the_earlier_node() -> None:
    deep = DraftTree((0, 1, 2, 3), (-1, 0, 0, 1), (1.0, 0.5, 0.5, 1.0))
    wide = DraftTree((0, 1, 2), (-1, 0, 0), (1.0, 0.5, 0.5))
    order = [
        ((0, 1), (0,)),
        ((0, 1, 2), (0,)),
        ((0, 1, 2), (0, 1)),
        ((0, 1, 2), (0, 1, 2)),
        ((0, 1, 2, 3), (0, 1, 2)),
    ]
    assert [tuple(rank(fixed(deep, wide), budget)) for budget in range(1, 6)] == order


def test_no_trees_are_no_forest() -> None:
    assert rank([], 10) == rank([], -1) == []


def test_nodes_that_pay_only_together_are_kept_together() -> None:
    tree = DraftTree((0, 1, 2, 3), (-1, 0, 0, 0), (1.0, 0.25, 0.25, 0.25))
    stairs = [0.0, 1.0, 3.0, 3.0, 3.0]
    assert rank([Entry(tree, priced=True)], 10, by_price(stairs, 0.25)) == [(0, 1, 2, 3)]
    assert rank([Entry(tree, priced=True)], 10, by_price(stairs, 0.5)) == [(0,)]
    assert rank([Entry(tree)], 10, by_price(stairs, 0.5)) == [(0, 1, 2, 3)]
