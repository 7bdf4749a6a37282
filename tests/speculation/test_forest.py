"""Forest rank: of all trees in a step, connected trees of exactly the best draft nodes."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from services.speculation.forest import rank
from services.types.tree import DraftTree

Kept = list[tuple[int, ...]]


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    """Any tree; its few different confidences, 0 and 1 among them, make ties of every kind."""
    parents, depths = [-1], [0]
    for i in range(1, draw(st.integers(1, 12))):
        lowest = next(j for j in range(i) if depths[j] >= depths[-1] - 1)
        parents.append(draw(st.integers(lowest, i - 1)))
        depths.append(depths[parents[-1]] + 1)
    confidences = [draw(st.sampled_from([0.0, 0.25, 0.5, 1.0])) for _ in parents[1:]]
    return DraftTree(tuple(range(len(parents))), tuple(parents), (1.0, *confidences))


FORESTS = st.lists(trees(), max_size=5)
BUDGETS = st.integers(-3, 70)


def drafted(forest: Sequence[DraftTree]) -> int:
    return sum(len(tree) - 1 for tree in forest)


def keys(forest: Sequence[DraftTree], kept: Kept, inside: bool) -> list[tuple[float, int, int, int]]:
    """What decides about each draft node that is kept, or that is not: value, depth, tree, node."""
    return [
        (-tree.values[node], tree.depths[node], i, node)
        for i, (tree, nodes) in enumerate(zip(forest, kept, strict=True))
        for node in range(1, len(tree))
        if (node in nodes) == inside
    ]


@given(forest=FORESTS, budget=BUDGETS)
def test_every_root_is_kept_and_every_node_stands_with_its_parent(
    forest: list[DraftTree], budget: int
) -> None:
    kept = rank(forest, budget)
    assert len(kept) == len(forest)
    for tree, nodes in zip(forest, kept, strict=True):
        assert nodes[0] == 0
        assert list(nodes) == sorted(set(nodes))
        assert all(tree.parents[node] in nodes for node in nodes[1:])
        assert tree.keep(nodes).tokens == tuple(tree.tokens[node] for node in nodes)


@given(forest=FORESTS, budget=BUDGETS)
def test_the_budget_is_used_to_the_last_node_and_roots_do_not_count(
    forest: list[DraftTree], budget: int
) -> None:
    kept = rank(forest, budget)
    assert sum(len(nodes) - 1 for nodes in kept) == min(max(0, budget), drafted(forest))


@given(forest=FORESTS, budget=BUDGETS)
def test_no_node_left_out_is_better_than_one_that_is_kept(forest: list[DraftTree], budget: int) -> None:
    kept = rank(forest, budget)
    best, rest = keys(forest, kept, inside=True), keys(forest, kept, inside=False)
    assert max(best, default=(-2.0,)) < min(rest, default=(2.0,))


@given(forest=FORESTS, budget=st.integers(0, 60), data=st.data())
def test_what_is_left_of_a_tree_can_shrink_further_as_if_it_had_been_ranked_so_at_once(
    forest: list[DraftTree], budget: int, data: st.DataObject
) -> None:
    for tree, nodes in zip(forest, rank(forest, budget), strict=True):
        fewer = data.draw(st.integers(1, len(nodes)))
        (shrunk,) = rank([tree], fewer - 1)
        assert len(shrunk) == fewer
        assert set(shrunk) <= set(nodes)


def test_a_sure_tree_takes_the_places_of_a_doubtful_one() -> None:
    sure = DraftTree.chain([0, 1, 2, 3], [1.0, 0.9, 0.9, 0.9])
    doubtful = DraftTree((0, 1, 2, 3), (-1, 0, 0, 1), (1.0, 0.6, 0.4, 0.9))
    assert rank([doubtful, sure], 3) == [(0,), (0, 1, 2, 3)]
    assert rank([doubtful, sure], 5) == [(0, 1, 3), (0, 1, 2, 3)]
    assert rank([doubtful, sure], 0) == rank([doubtful, sure], -1) == [(0,), (0,)]


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
    assert [tuple(rank([deep, wide], budget)) for budget in range(1, 6)] == order


def test_no_trees_are_no_forest() -> None:
    assert rank([], 10) == rank([], -1) == []
