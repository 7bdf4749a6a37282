"""Trees against a plain recursive reference: a head is a function of a path, a candidate a dict entry."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from services.speculation.growth import (
    Candidates,
    Choose,
    DynamicPlan,
    Plan,
    StaticPlan,
    as_given,
    flatten,
    grow,
    most_likely,
    rerank,
)
from services.speculation.shapes import EAGLE_1_TREE, plan_for
from services.types.configuration import DraftConfig, TreeShape
from services.types.errors import ErrorCode, WealdError
from services.types.tree import MAX_NODES, DraftTree

Path = tuple[int, ...]
"""Target tokens from the root's child down to a candidate."""
Head = Callable[[Path], np.ndarray]
"""Path → log-probabilities of the next token, float32 `[V]`."""

SEEDS = st.integers(0, 2**32)


@dataclass(frozen=True)
class Candidate:
    log_confidence: float
    log_value: float


Grown = Mapping[Path, Candidate]
"""Every candidate in the order of creation."""


def distinct(seed: int, vocab_size: int) -> Head:
    """Log-probabilities no two of which are equal."""

    @cache
    def head(path: Path) -> np.ndarray:
        logits = torch.from_numpy(np.random.default_rng([seed, *path]).normal(scale=2, size=vocab_size))
        return logits.log_softmax(-1).float().numpy()

    return head


def tied(seed: int, vocab_size: int) -> Head:
    """What a head in half precision says: few values, often a confidence of exactly 1, others at 0."""

    @cache
    def head(path: Path) -> np.ndarray:
        rng = np.random.default_rng([seed, *path])
        logits = torch.from_numpy(rng.choice([0.0, 0.0, 1.0, 30.0, -math.inf], size=vocab_size))
        logits[rng.integers(vocab_size)] = 1.0
        return logits.log_softmax(-1).half().float().numpy()

    return head


HEADS = st.sampled_from([distinct, tied])


def first_of_equals(log_probs: Tensor, k: int) -> Tensor:
    """As `most_likely`, and of equals the smaller token; `topk` leaves that open."""
    return log_probs.sort(dim=-1, descending=True, stable=True).indices[..., :k]


def grown(heads: Sequence[Head], plan: Plan, vocabulary: Sequence[int], choose: Choose) -> Candidates:
    """Trees of several sessions, grown in one batch by heads that remember which row holds which path."""
    passes: list[list[Path]] = [[()] for _ in heads]

    def log_probs() -> Tensor:
        return torch.from_numpy(
            np.array([[head(path) for path in paths] for head, paths in zip(heads, passes, strict=True)])
        )

    def expand(tokens: Tensor, rows: Tensor) -> Tensor:
        for paths, new, parents in zip(passes, tokens.tolist(), rows.tolist(), strict=True):
            paths[:] = [(*paths[row], token) for token, row in zip(new, parents, strict=True)]
        return log_probs()

    return grow(log_probs()[:, 0], expand, plan, torch.tensor(vocabulary), choose, score=as_given)


def paths_of(tokens: Sequence[int], parents: Sequence[int]) -> list[Path]:
    paths: list[Path] = []
    for token, parent in zip(tokens, parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


def of_session(candidates: Candidates, session: int) -> Grown:
    columns = (
        candidates.tokens,
        candidates.parents,
        candidates.log_confidences,
        candidates.log_values,
    )
    tokens, parents, confidences, values = (column[session].tolist() for column in columns)
    paths = paths_of(tokens, parents)
    assert len(set(paths)) == len(paths)
    return {path: Candidate(*entry) for path, *entry in zip(paths, confidences, values, strict=True)}


def child(head: Head, parent: Path, value: float, index: int) -> Candidate:
    log_confidence = min(head(parent)[index], np.float32(0))
    return Candidate(float(log_confidence), float(min(np.float32(value) + log_confidence, np.float32(value))))


def best(head: Head, path: Path, k: int) -> list[int]:
    """The k most likely draft tokens, of equals the smaller one first."""
    return sorted(range(len(head(path))), key=lambda i: (-head(path)[i], i))[:k]


def reference_dynamic(head: Head, levels: int, beam: int, vocabulary: Sequence[int]) -> Grown:
    def below(frontier: Grown, level: int) -> Grown:
        if level > levels:
            return {}
        made = {
            (*path, vocabulary[i]): child(head, path, parent.log_value, i)
            for path, parent in frontier.items()
            for i in best(head, path, beam)
        }
        ranked = sorted(made, key=lambda path: -made[path].log_value)
        return {**made, **below({path: made[path] for path in ranked[:beam]}, level + 1)}

    return below({(): Candidate(0.0, 0.0)}, 1)


def reference_static(head: Head, shape: Sequence[Path], vocabulary: Sequence[int]) -> Grown:
    made: dict[Path, tuple[Path, Candidate]] = {}

    def below(ranks: Path, path: Path, value: float) -> None:
        for below_ranks in shape:
            if below_ranks[:-1] == ranks:
                i = best(head, path, below_ranks[-1] + 1)[-1]
                below_path = (*path, vocabulary[i])
                candidate = child(head, path, value, i)
                made[below_ranks] = below_path, candidate
                below(below_ranks, below_path, candidate.log_value)

    below((), (), 0.0)
    return dict(made[ranks] for ranks in sorted(made, key=lambda ranks: (len(ranks), ranks)))


@st.composite
def vocabularies(draw: st.DrawFn, min_size: int = 1) -> list[int]:
    """Target ids of the draft tokens."""
    return draw(st.lists(st.integers(0, 99), min_size=min_size, max_size=max(min_size, 7), unique=True))


@given(seed=SEEDS, kind=HEADS, levels=st.integers(1, 5), beam=st.integers(1, 4), vocabulary=vocabularies())
def test_a_dynamic_tree_grows_like_its_recursive_definition(
    seed: int, kind: Callable[[int, int], Head], levels: int, beam: int, vocabulary: list[int]
) -> None:
    head = kind(seed, len(vocabulary))
    candidates = grown([head], DynamicPlan(levels, beam), vocabulary, first_of_equals)
    expected = reference_dynamic(head, levels, beam, vocabulary)
    assert list(of_session(candidates, 0).items()) == list(expected.items())


@st.composite
def shapes(draw: st.DrawFn) -> list[Path]:
    """Any set of paths of child ranks that holds the path above each of its paths."""
    paths: list[Path] = [()]
    for _ in range(draw(st.integers(1, 15))):
        path = (*draw(st.sampled_from(paths)), draw(st.integers(0, 3)))
        if path not in paths:
            paths.append(path)
    return draw(st.permutations(paths[1:]))


@given(
    seed=SEEDS,
    kind=HEADS,
    shape=st.one_of(st.just(list(EAGLE_1_TREE)), shapes()),
    vocabulary=vocabularies(min_size=4),
)
def test_a_static_tree_grows_like_its_recursive_definition(
    seed: int, kind: Callable[[int, int], Head], shape: list[Path], vocabulary: list[int]
) -> None:
    head = kind(seed, len(vocabulary))
    candidates = grown([head], StaticPlan(shape), vocabulary, first_of_equals)
    expected = reference_static(head, shape, vocabulary)
    assert list(of_session(candidates, 0).items()) == list(expected.items())
    (tree,) = flatten(candidates, rerank(candidates, MAX_NODES), [0])
    assert len(tree) == len(shape) + 1


@given(seed=SEEDS, kind=HEADS, levels=st.integers(1, 7), vocabulary=vocabularies())
def test_a_chain_always_says_the_most_likely_token(
    seed: int, kind: Callable[[int, int], Head], levels: int, vocabulary: list[int]
) -> None:
    head = kind(seed, len(vocabulary))
    plan = plan_for(DraftConfig(TreeShape.CHAIN, levels=levels, beam=3))
    path: Path = ()
    for _ in range(levels):
        path += (vocabulary[best(head, path, 1)[0]],)
    assert list(of_session(grown([head], plan, vocabulary, first_of_equals), 0)) == [
        path[: level + 1] for level in range(levels)
    ]


PLANS = st.one_of(
    st.builds(DynamicPlan, levels=st.integers(1, 6), beam=st.integers(1, 10)),
    st.just(plan_for(DraftConfig(TreeShape.STATIC))),
    st.just(plan_for(DraftConfig(TreeShape.CHAIN))),
)
CHOICES = st.sampled_from([most_likely, first_of_equals])


@given(
    heads=st.lists(st.tuples(HEADS, SEEDS), min_size=1, max_size=4),
    plan=PLANS,
    vocabulary=vocabularies(min_size=4),
    choose=CHOICES,
    nodes=st.integers(0, 63),
)
def test_a_session_in_a_batch_has_the_tree_it_has_alone(
    heads: list[tuple[Callable[[int, int], Head], int]],
    plan: Plan,
    vocabulary: list[int],
    choose: Choose,
    nodes: int,
) -> None:
    made = [kind(seed, len(vocabulary)) for kind, seed in heads]
    roots = range(100, 100 + len(made))
    batch = grown(made, plan, vocabulary, choose)
    trees = flatten(batch, rerank(batch, nodes), roots)
    for session, head in enumerate(made):
        alone = grown([head], plan, vocabulary, choose)
        assert of_session(batch, session) == of_session(alone, 0)
        assert flatten(alone, rerank(alone, nodes), [roots[session]]) == [trees[session]]


@given(
    seed=SEEDS,
    kind=HEADS,
    plan=PLANS,
    vocabulary=vocabularies(min_size=4),
    choose=CHOICES,
    budget=st.one_of(st.just(64), st.integers(1, 64)),
)
def test_a_tree_has_its_budget_its_order_and_values_that_never_rise(
    seed: int,
    kind: Callable[[int, int], Head],
    plan: Plan,
    vocabulary: list[int],
    choose: Choose,
    budget: int,
) -> None:
    candidates = grown([kind(seed, len(vocabulary))], plan, vocabulary, choose)
    all_of_them = of_session(candidates, 0)
    chosen = rerank(candidates, budget - 1)
    (tree,) = flatten(candidates, chosen, [77])
    assert len(tree) == min(budget, len(all_of_them) + 1)
    assert (tree.tokens[0], tree.parents[0], tree.confidences[0]) == (77, -1, 1.0)
    paths = paths_of(tree.tokens[1:], [parent - 1 for parent in tree.parents[1:]])
    assert len(set(paths)) == len(paths)
    assert list(tree.depths) == sorted(tree.depths)
    for i in range(1, len(tree)):
        assert tree.parents[i] < i
        assert tree.values[i] <= tree.values[tree.parents[i]] <= 1
        expected = all_of_them[paths[i - 1]]
        assert tree.confidences[i] == pytest.approx(math.exp(expected.log_confidence), rel=1e-6)
        assert tree.values[i] == pytest.approx(math.exp(expected.log_value), rel=1e-4, abs=1e-30)


def connected(chosen: Sequence[int], parents: Sequence[int]) -> bool:
    return all(parents[i] == -1 or parents[i] in chosen for i in chosen)


@given(seed=SEEDS, kind=HEADS, levels=st.integers(1, 4), beam=st.integers(1, 2), nodes=st.integers(0, 12))
def test_no_connected_tree_of_the_same_size_is_worth_more(
    seed: int, kind: Callable[[int, int], Head], levels: int, beam: int, nodes: int
) -> None:
    """All subsets of up to 14 candidates; among equals the earlier ones."""
    candidates = grown([kind(seed, 4)], DynamicPlan(levels, beam), range(4), first_of_equals)
    parents = candidates.parents[0].tolist()
    values = candidates.log_values[0].double().exp().tolist()
    subsets = [
        subset
        for subset in combinations(range(len(parents)), min(nodes, len(parents)))
        if connected(subset, parents)
    ]
    worth = {subset: sum(values[i] for i in subset) for subset in subsets}
    chosen = tuple(rerank(candidates, nodes)[0].tolist())
    assert connected(chosen, parents)
    assert worth[chosen] == pytest.approx(max(worth.values()), rel=1e-12)
    log_values = candidates.log_values[0].tolist()
    ranking = sorted(range(len(parents)), key=lambda i: (-log_values[i], i))
    assert list(chosen) == sorted(ranking[:nodes])


def test_confidences_of_exactly_one_keep_the_parent_before_its_children() -> None:
    """Everything is worth 1, so any order of equals but the first would lose a parent."""
    certain = grown([lambda path: np.zeros(10, dtype=np.float32)], DynamicPlan(6, 10), range(10), most_likely)
    for nodes in range(64):
        assert rerank(certain, nodes).tolist() == [list(range(nodes))]
        (tree,) = flatten(certain, rerank(certain, nodes), [0])
        assert tree.values == (1.0,) * (nodes + 1)
    assert tree.ancestors[63] >> 63 == 1


def test_a_log_probability_rounded_above_zero_counts_as_certain() -> None:
    above = np.array([1e-4, -9.0], dtype=np.float32)
    (tree,) = flatten(
        candidates := grown([lambda _: above], DynamicPlan(3, 1), [5, 6], most_likely),
        rerank(candidates, 3),
        [0],
    )
    assert tree == DraftTree.chain([0, 5, 5, 5])


def test_with_fewer_candidates_than_the_budget_all_of_them_are_in_the_tree() -> None:
    candidates = grown([distinct(0, 2)], DynamicPlan(2, 10), [8, 9], most_likely)
    (tree,) = flatten(candidates, rerank(candidates, 63), [0])
    assert set(paths_of(tree.tokens[1:], [parent - 1 for parent in tree.parents[1:]])) == {
        *[(a,) for a in (8, 9)],
        *[(a, b) for a in (8, 9) for b in (8, 9)],
    }


def test_tokens_that_cannot_come_have_no_value_and_no_place_before_others() -> None:
    log_probs = np.log(
        np.array([0.5, 0.0, 0.5], dtype=np.float32),
        where=[True, False, True],
        out=np.full(3, -np.inf, dtype=np.float32),
    )
    candidates = grown([lambda _: log_probs], DynamicPlan(2, 3), range(3), first_of_equals)
    (tree,) = flatten(candidates, rerank(candidates, 63), [0])
    assert sorted(tree.values, reverse=True) == [1.0, 0.5, 0.5, *[0.25] * 4, *[0.0] * 6]


def test_the_head_makes_one_pass_less_than_there_are_levels() -> None:
    widths: list[int] = []

    def expand(tokens: Tensor, rows: Tensor) -> Tensor:
        assert tokens.shape == rows.shape
        widths.append(tokens.shape[1])
        return torch.zeros(*tokens.shape, 30)

    for plan, expected in [
        (DynamicPlan(6, 10), [10] * 5),
        (DynamicPlan(1, 10), []),
        (plan_for(DraftConfig(TreeShape.STATIC)), [4, 4, 1, 1]),
        (plan_for(DraftConfig(TreeShape.CHAIN, levels=4)), [1] * 3),
    ]:
        widths.clear()
        grow(torch.zeros(2, 30), expand, plan, torch.arange(30))
        assert widths == expected


def test_the_static_tree_is_that_of_eagle_1() -> None:
    children = {(): 4, (0,): 3, (1,): 2, (2,): 2, (3,): 1, (0, 0): 3, (0, 1): 2, (0, 2): 2, (1, 0): 1}
    children |= {(0, 0, 0): 3, (0, 0, 0, 0): 2}
    assert len(EAGLE_1_TREE) == 25
    assert max(map(len, EAGLE_1_TREE)) == 5
    assert set(EAGLE_1_TREE) == {(*path, rank) for path, count in children.items() for rank in range(count)}


def test_a_configuration_names_its_plan() -> None:
    assert plan_for(DraftConfig(levels=4, beam=3)) == DynamicPlan(4, 3)
    assert plan_for(DraftConfig(TreeShape.CHAIN, levels=4)).levels == 4
    assert plan_for(DraftConfig(TreeShape.STATIC, levels=2)).levels == 5


def test_a_vocabulary_narrower_than_the_static_tree_is_refused() -> None:
    with pytest.raises(WealdError) as raised:
        grown([distinct(0, 3)], plan_for(DraftConfig(TreeShape.STATIC)), range(3), most_likely)
    assert raised.value.code is ErrorCode.INVALID_ARGUMENT
    assert raised.value.message == (
        "the tree proposes 4 children at level 1, but the draft vocabulary has only 3 tokens; "
        "use a chain or a dynamic tree"
    )
