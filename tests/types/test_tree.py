import math
from dataclasses import FrozenInstanceError

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.types.errors import ErrorCode, WealdError
from services.types.tree import MAX_NODES, DraftTree

Path = tuple[int, ...]
"""The tokens from the root's child down to a node: what identifies a node without any index."""


@st.composite
def trees(draw: st.DrawFn, max_nodes: int = MAX_NODES) -> DraftTree:
    """Any valid tree: each node hangs below one on its predecessor's level or the level above."""
    n = draw(st.integers(1, max_nodes))
    parents, depths, siblings = [-1], [0], [0] * n
    tokens = [draw(st.integers(0, 9))]
    for i in range(1, n):
        lowest = next(j for j in range(i) if depths[j] >= depths[-1] - 1)
        parent = draw(st.integers(lowest, i - 1))
        parents.append(parent)
        depths.append(depths[parent] + 1)
        siblings[parent] += draw(st.integers(1, 2))
        tokens.append(siblings[parent])
    confidences = draw(st.lists(st.sampled_from([0.0, 1e-300, 0.1, 0.5, 1.0]), min_size=n, max_size=n))
    return DraftTree(tuple(tokens), tuple(parents), (1.0, *confidences[1:]))


def paths(tree: DraftTree) -> list[Path]:
    found: list[Path] = [()]
    for token, parent in list(zip(tree.tokens, tree.parents, strict=True))[1:]:
        found.append((*found[parent], token))
    return found


@given(tree=trees())
def test_depths_ancestors_and_children_say_which_path_begins_another(tree: DraftTree) -> None:
    nodes = paths(tree)
    assert len(tree) == len(nodes)
    assert tree.depths == tuple(map(len, nodes))
    for i, path in enumerate(nodes):
        begins = [j for j, other in enumerate(nodes) if path[: len(other)] == other]
        assert tree.ancestors[i] == sum(2**j for j in begins)
        assert tree.path(i) == tuple(begins[1:])
        assert tree.children[i] == {
            other[-1]: j for j, other in enumerate(nodes) if j > 0 and other[:-1] == path
        }


@given(tree=trees())
def test_values_are_products_of_confidences_and_never_rise_along_a_path(tree: DraftTree) -> None:
    for i, value in enumerate(tree.values):
        assert value == pytest.approx(math.prod(tree.confidences[j] for j in tree.path(i)), rel=1e-12)
        assert i == 0 or value <= tree.values[tree.parents[i]]


@given(tree=trees(), depth=st.integers(0, MAX_NODES))
def test_a_cut_keeps_exactly_the_paths_that_are_short_enough(tree: DraftTree, depth: int) -> None:
    cut = tree.cut(depth)
    kept = [i for i, path in enumerate(paths(tree)) if len(path) <= depth]
    assert paths(cut) == [paths(tree)[i] for i in kept]
    assert cut.tokens[0] == tree.tokens[0]
    assert cut.confidences == tuple(tree.confidences[i] for i in kept)


@given(tree=trees(), data=st.data())
def test_a_tree_keeps_exactly_the_paths_it_is_told_with_their_tokens_and_confidences(
    tree: DraftTree, data: st.DataObject
) -> None:
    chosen = data.draw(st.sets(st.integers(0, len(tree) - 1)))
    nodes = sorted({0, *(j for i in chosen for j in (i, *tree.path(i)))})
    kept = tree.keep(nodes)
    assert paths(kept) == [paths(tree)[i] for i in nodes]
    assert kept.tokens[0] == tree.tokens[0]
    assert kept.confidences == tuple(tree.confidences[i] for i in nodes)
    assert kept.values == tuple(tree.values[i] for i in nodes)


def test_the_last_of_64_nodes_has_the_highest_bit_of_the_word() -> None:
    star = DraftTree(tuple(range(MAX_NODES)), (-1, *[0] * 63), (1.0,) * MAX_NODES)
    assert star.ancestors[63] == 2**63 + 1
    assert DraftTree.chain(range(MAX_NODES)).ancestors[63] == 2**64 - 1


def test_the_tree_of_one_node_is_its_token() -> None:
    tree = DraftTree.root(7)
    assert tree == DraftTree((7,), (-1,), (1.0,)) == DraftTree.chain([7])
    assert (len(tree), tree.depths, tree.values, tree.ancestors) == (1, (0,), (1.0,), (1,))
    assert (tree.children, tree.path(0)) == (({},), ())


def test_a_chain_is_one_path_with_the_given_confidences() -> None:
    tree = DraftTree.chain([7, 8, 7], [1.0, 0.5, 0.25])
    assert tree == DraftTree((7, 8, 7), (-1, 0, 1), (1.0, 0.5, 0.25))
    assert DraftTree.chain([7, 8]).confidences == (1.0, 1.0)


def test_cousins_may_carry_the_same_token() -> None:
    assert DraftTree((0, 1, 2, 3, 3), (-1, 0, 0, 1, 2), (1.0,) * 5).children[1:3] == ({3: 3}, {3: 4})


def test_a_tree_never_changes() -> None:
    with pytest.raises(FrozenInstanceError):
        DraftTree.root(7).tokens = (8,)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("tokens", "parents", "confidences", "message"),
    [
        ((), (), (), "a draft tree has 1 to 64 nodes, got 0"),
        (range(65), range(-1, 64), (1.0,) * 65, "a draft tree has 1 to 64 nodes, got 65"),
        (
            (1, 2),
            (-1,),
            (1.0, 1.0),
            "a tree of 2 tokens needs as many parents and confidences, got 1 and 2",
        ),
        (
            (1, 2),
            (-1, 0),
            (1.0, 1.0, 1.0),
            "a tree of 2 tokens needs as many parents and confidences, got 2 and 3",
        ),
        ((1,), (0,), (1.0,), "node 0 is the root, its parent must be -1, got 0"),
        ((1, 2), (-1, 1), (1.0, 1.0), "node 1 needs a parent in [0, 1), got 1"),
        ((1, 2, 3), (-1, 2, 0), (1.0, 1.0, 1.0), "node 1 needs a parent in [0, 1), got 2"),
        ((1, 2, 3), (-1, 0, -1), (1.0, 1.0, 1.0), "node 2 needs a parent in [0, 2), got -1"),
        ((1, 2, 2), (-1, 0, 0), (1.0, 1.0, 1.0), "siblings of a draft tree must carry different tokens"),
        (
            (1, 2, 3, 4),
            (-1, 0, 1, 0),
            (1.0, 1.0, 1.0, 1.0),
            "nodes of a draft tree must be in breadth-first order",
        ),
        ((1, 2), (-1, 0), (1.0, 1.0001), "confidences of a draft tree must be in [0, 1]"),
        ((1, 2), (-1, 0), (1.0, -0.1), "confidences of a draft tree must be in [0, 1]"),
        ((1, 2), (-1, 0), (1.0, math.nan), "confidences of a draft tree must be in [0, 1]"),
    ],
)
def test_what_is_no_tree_is_refused_with_the_reason(
    tokens: Path, parents: Path, confidences: tuple[float, ...], message: str
) -> None:
    with pytest.raises(WealdError) as raised:
        DraftTree(tuple(tokens), tuple(parents), confidences)
    assert (raised.value.code, raised.value.message) == (ErrorCode.INVALID_ARGUMENT, message)
