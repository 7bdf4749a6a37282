"""The text has exactly the target's distribution: by enumeration, not by sampling.

A randomised program asks an `Oracle` for every decision. `law` runs it once for each way the decisions can
fall, and every way has its exact probability.
"""

import random
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from services.speculation.acceptance import walk
from services.speculation.rejection import accept_sampled, sample_without_replacement, walk_sampled
from services.speculation.stopping import cut
from services.types.tree import DraftTree

Text = tuple[int, ...]
Law = dict[Any, float]
Model = Callable[[Text], Tensor]
"""Text → distribution of the next token, float64 `[V]`."""
Round = Callable[["Oracle", Text], Sequence[int]]
"""One round of a decoder: committed text → the tokens it commits, before the cut."""
Propose = Callable[[Tensor, int, "Oracle"], list[int]]
"""(q `[V]`, k) → up to k children of a node, in the order they are tried."""

EXACT = 1e-12
SEEDS = st.integers(0, 2**32)
ZEROS = st.sampled_from([0, 1 / 3])


class Oracle:
    """Follows `script` as far as it goes, then takes the first way that is possible."""

    def __init__(self, script: list[int]) -> None:
        self.taken: list[int] = []
        self.weight = 1.0
        self.others: list[list[int]] = []
        self._script = script

    def pick(self, distribution: Tensor | Sequence[float]) -> int:
        chances = distribution.tolist() if isinstance(distribution, Tensor) else distribution
        if len(self.taken) < len(self._script):
            way = self._script[len(self.taken)]
        else:
            way, *others = [i for i, chance in enumerate(chances) if chance > 0]
            self.others += [[*self.taken, other] for other in others]
        self.taken.append(way)
        self.weight *= chances[way]
        return way

    def chance(self, p: float) -> bool:
        return self.pick((1 - p, p)) == 1


def law(program: Callable[[Oracle], Hashable]) -> Law:
    """The exact distribution of what `program` returns."""
    found: Law = defaultdict(float)
    scripts: list[list[int]] = [[]]
    while scripts:
        oracle = Oracle(scripts.pop())
        found[program(oracle)] += oracle.weight
        scripts += oracle.others
    return found


def gap(one: Law, other: Law) -> float:
    return max(abs(one.get(x, 0.0) - other.get(x, 0.0)) for x in {*one, *other})


def model(seed: int, vocab_size: int, zeros: float = 1 / 3) -> Model:
    """A random distribution for every text, in which this part of the chances is 0, sometimes all but one."""

    @cache
    def distribution(text: Text) -> Tensor:
        rng = np.random.default_rng([seed, *text])
        weights = rng.exponential(size=vocab_size) * (rng.random(vocab_size) >= zeros)
        weights[rng.integers(vocab_size)] += 0.1
        return torch.from_numpy(weights / weights.sum())

    return distribution


def texts_of(target: Model, length: int, ends: frozenset[int]) -> Law:
    """What the target alone says: `length` tokens, or up to the first that ends a text."""

    def say(oracle: Oracle) -> Text:
        text: Text = ()
        while len(text) < length and not (text and text[-1] in ends):
            text = (*text, oracle.pick(target(text)))
        return text

    return law(say)


def decoded(one_round: Round, length: int, ends: frozenset[int]) -> Law:
    """The distribution of the whole texts that rounds produce, all rounds of a text as one program."""

    def decode(oracle: Oracle) -> Text:
        text: Text = ()
        finish = None
        while finish is None:
            tokens, finish = cut(one_round(oracle, text), length - len(text), ends)
            text += tokens
        return text

    return law(decode)


def decoded_by_rounds(one_round: Round, length: int, ends: frozenset[int]) -> Law:
    """As `decoded`, for rounds of many decisions: those that start from one text are enumerated once."""
    outcomes = cache(lambda text: law(lambda oracle: tuple(one_round(oracle, text))))
    found: Law = defaultdict(float)

    def go_on(text: Text, weight: float) -> None:
        for said, chance in outcomes(text).items():
            tokens, finish = cut(said, length - len(text), ends)
            if finish is None:
                go_on(text + tokens, weight * chance)
            else:
                found[text + tokens] += weight * chance

    go_on((), 1.0)
    return found


def random_tree(rng: random.Random, vocab_size: int, root: int, max_nodes: int = 7) -> DraftTree:
    """Any tree, whatever the target thinks of it: a node hangs below any node whose child it can be."""
    paths: set[Text] = set()
    for _ in range(rng.randrange(max_nodes)):
        paths.add((*rng.choice([(), *sorted(paths)]), rng.randrange(vocab_size)))
    return tree_of(paths, root)


def tree_of(paths: set[Text], root: int) -> DraftTree:
    nodes = [(), *sorted(paths, key=lambda path: (len(path), path))]
    parents = [nodes.index(path[:-1]) for path in nodes[1:]]
    return DraftTree((root, *(path[-1] for path in nodes[1:])), (-1, *parents), (1.0,) * len(nodes))


def said(tree: DraftTree, path: Sequence[int]) -> Text:
    return tuple(tree.tokens[node] for node in path)


def walked(target: Model, trees: Callable[[Text], DraftTree], oracle: Oracle, text: Text) -> Sequence[int]:
    """A round of the walk."""
    tree = trees(text)
    (went,) = walk(
        [tree],
        lambda going: [oracle.pick(target(text + said(tree, tree.path(node)))) for _, node in going],
    )
    return *said(tree, went.path), went.bonus


def sampled(q: Tensor, k: int, oracle: Oracle) -> list[int]:
    return sample_without_replacement(q, k, oracle.pick)


def rejected(
    target: Model, head: Model, shape: Sequence[Text], propose: Propose, oracle: Oracle, text: Text
) -> Sequence[int]:
    """A round of the p/q rule on a tree of fixed shape, given as paths of child ranks, breadth-first."""
    tokens, parents = [0], [-1]
    rows: dict[Text, int] = {(): 0}
    paths: list[Text] = [()]
    for ranks in [(), *shape]:
        width = sum(len(path) == len(ranks) + 1 and path[:-1] == ranks for path in shape)
        if ranks not in rows or width == 0:
            continue
        row = rows[ranks]
        for rank, token in enumerate(propose(head(text + paths[row]), width, oracle)):
            rows[*ranks, rank] = len(tokens)
            tokens.append(token)
            parents.append(row)
            paths.append((*paths[row], token))
    tree = DraftTree(tuple(tokens), tuple(parents), (1.0,) * len(tokens))
    path, bonus = walk_sampled(
        tree,
        lambda node: target(text + paths[node]),
        lambda node: head(text + paths[node]),
        oracle.chance,
        oracle.pick,
    )
    return *said(tree, path), bonus


ENDS = st.frozensets(st.integers(0, 3), max_size=1)
CHAIN = ((0,), (0, 0))
SHAPES = (
    ((0,),),
    CHAIN,
    ((0,), (0, 0), (0, 0, 0)),
    ((0,), (1,)),
    ((0,), (1,), (2,)),
    ((0,), (1,), (0, 0)),
    ((0,), (1,), (1, 0)),
    ((0,), (0, 0), (0, 1)),
    ((0,), (1,), (0, 0), (1, 0)),
)


@given(seed=SEEDS, zeros=ZEROS, vocab_size=st.integers(3, 4), length=st.integers(3, 4), ends=ENDS)
def test_the_walk_says_what_the_target_says(
    seed: int, zeros: float, vocab_size: int, length: int, ends: frozenset[int]
) -> None:
    target = model(seed, vocab_size, zeros)

    def trees(text: Text) -> DraftTree:
        return random_tree(random.Random(repr((seed, text))), vocab_size, text[-1] if text else 0)

    truth = texts_of(target, length, ends)
    assert sum(truth.values()) == pytest.approx(1, abs=EXACT)
    assert gap(decoded(partial(walked, target, trees), length, ends), truth) < EXACT


@given(seed=SEEDS)
def test_sessions_that_walk_together_stay_independent(seed: int) -> None:
    rng = random.Random(seed)
    targets = [model(seed + i, 3) for i in range(3)]
    trees = [random_tree(rng, 3, root=0, max_nodes=6) for _ in targets]

    def together(oracle: Oracle) -> Hashable:
        went = walk(
            trees,
            lambda going: [oracle.pick(targets[i](said(trees[i], trees[i].path(node)))) for i, node in going],
        )
        return tuple((*said(tree, one.path), one.bonus) for tree, one in zip(trees, went, strict=True))

    alone = [
        law(lambda oracle, i=i: tuple(walked(targets[i], lambda _: trees[i], oracle, ()))) for i in range(3)
    ]
    product = {
        (a, b, c): p_a * p_b * p_c
        for a, p_a in alone[0].items()
        for b, p_b in alone[1].items()
        for c, p_c in alone[2].items()
    }
    assert gap(law(together), product) < EXACT


@given(seed=SEEDS, children=st.sets(st.integers(0, 3)))
def test_the_walk_is_the_rule_for_proposals_that_are_certain(seed: int, children: set[int]) -> None:
    """With q = δ: accept x with p(x), else drop x from p and renormalise, for each sibling in turn."""
    p = model(seed, 4)(())

    def in_turn(oracle: Oracle) -> Hashable:
        left = p.clone()
        for token in sorted(children):
            if oracle.chance(float(left[token])):
                return (token,)
            left[token] = 0
            left /= left.sum()
        return (oracle.pick(left),)

    tree = tree_of({(token,) for token in children}, root=0)
    one_level = law(lambda oracle: tuple(walked(lambda _: p, lambda _: tree, oracle, ()))[:1])
    assert gap(law(in_turn), one_level) < EXACT


@given(seed=SEEDS, vocab_size=st.integers(1, 5), k=st.integers(0, 6))
def test_a_token_after_sampled_candidates_follows_the_target(seed: int, vocab_size: int, k: int) -> None:
    p, q = model(seed, vocab_size)(()), model(seed + 1, vocab_size)(())
    given_p, given_q = p.clone(), q.clone()

    def one_token(oracle: Oracle) -> Hashable:
        candidates = sample_without_replacement(q, k, oracle.pick)
        assert len(candidates) == len(set(candidates)) == min(k, int((q > 0).sum()))
        token, accepted = accept_sampled(p, q, candidates, oracle.chance, oracle.pick)
        assert not accepted or token in candidates
        return token

    assert gap(law(one_token), dict(enumerate(p.tolist()))) < EXACT
    assert torch.equal(p, given_p)
    assert torch.equal(q, given_q)


@settings(max_examples=60)
@given(seed=SEEDS, zeros=ZEROS, shape=st.sampled_from(SHAPES), ends=ENDS)
def test_the_rule_for_sampled_candidates_says_what_the_target_says(
    seed: int, zeros: float, shape: Sequence[Text], ends: frozenset[int]
) -> None:
    target, head = model(seed, 3, zeros), model(seed + 1, 3, zeros)
    one_round = partial(rejected, target, head, shape, sampled)
    assert gap(decoded_by_rounds(one_round, 3, ends), texts_of(target, 3, ends)) < EXACT


@settings(max_examples=8)
@given(seed=SEEDS, shape=st.sampled_from([CHAIN, ((0,), (1,), (0, 0))]), ends=ENDS)
def test_the_rule_for_sampled_candidates_holds_for_four_tokens_of_four(
    seed: int, shape: Sequence[Text], ends: frozenset[int]
) -> None:
    target, head = model(seed, 4), model(seed + 1, 4)
    one_round = partial(rejected, target, head, shape, sampled)
    assert gap(decoded_by_rounds(one_round, 4, ends), texts_of(target, 4, ends)) < EXACT


@settings(max_examples=10)
@given(seed=SEEDS, ends=ENDS)
def test_enumerating_round_by_round_is_enumerating_the_whole(seed: int, ends: frozenset[int]) -> None:
    one_round = partial(rejected, model(seed, 3), model(seed + 1, 3), ((0,), (1,)), sampled)
    assert gap(decoded_by_rounds(one_round, 2, ends), decoded(one_round, 2, ends)) < EXACT


def most_likely(q: Tensor, k: int, oracle: Oracle) -> list[int]:
    """The mistake to keep out: fixed candidates, accepted as if they had been sampled from q."""
    return q.topk(k).indices.tolist()


def sampled_then_sorted(q: Tensor, k: int, oracle: Oracle) -> list[int]:
    return sorted(sampled(q, k, oracle), key=lambda token: -float(q[token]))


def sampled_then_dropped(q: Tensor, k: int, oracle: Oracle) -> list[int]:
    """Reranking sampled candidates: which of them is tried depends on which it is."""
    return sampled_then_sorted(q, k, oracle)[: max(1, k - 1)]


@pytest.mark.parametrize("propose", [most_likely, sampled_then_sorted, sampled_then_dropped])
@pytest.mark.parametrize("shape", [((0,), (1,)), ((0,), (1,), (0, 0))])
def test_the_same_check_finds_the_rule_biased_for_other_proposals(
    propose: Propose, shape: Sequence[Text]
) -> None:
    nothing = frozenset[int]()
    gaps = []
    for seed in range(10):
        target, head = model(seed, 4, zeros=0), model(seed + 100, 4, zeros=0)
        one_round = partial(rejected, target, head, shape, propose)
        gaps.append(gap(decoded_by_rounds(one_round, 2, nothing), texts_of(target, 2, nothing)))
    assert min(gaps) > 0.01


def test_the_biased_rule_is_wrong_by_a_quarter_where_the_head_is_twice_too_sure() -> None:
    """The candidate is always 0, the target says it in 1 of 4 cases, and half of them are accepted."""
    p, q = torch.tensor([0.25, 0.75]).double(), torch.tensor([0.5, 0.5]).double()
    biased = law(lambda o: accept_sampled(p, q, most_likely(q, 1, o), o.chance, o.pick)[0])
    exact = law(lambda o: accept_sampled(p, q, sampled(q, 1, o), o.chance, o.pick)[0])
    assert biased == {0: 0.5, 1: 0.5}
    assert exact == {0: 0.25, 1: 0.75}


@given(seed=SEEDS, k=st.integers(1, 4))
def test_a_perfect_head_is_always_accepted(seed: int, k: int) -> None:
    p = model(seed, 4)(())

    def first(oracle: Oracle) -> Hashable:
        candidates = sampled(p, k, oracle)
        return accept_sampled(p, p, candidates, oracle.chance, oracle.pick) == (candidates[0], True)

    assert law(first) == {True: pytest.approx(1, abs=EXACT)}


def test_a_candidate_the_target_never_says_is_never_accepted() -> None:
    p, q = torch.tensor([0.0, 0.5, 0.5]).double(), torch.tensor([1.0, 0.0, 0.0]).double()
    assert law(lambda o: accept_sampled(p, q, [0], o.chance, o.pick)) == {(1, False): 0.5, (2, False): 0.5}
