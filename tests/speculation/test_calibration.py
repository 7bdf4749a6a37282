"""Calibration: what a round says about its nodes, and what confidences become by that."""

import math
import random
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from services.speculation.acceptance import walk
from services.speculation.calibration import (
    LEAST,
    MEMORY,
    MOST,
    REFRESH,
    Band,
    Calibration,
    Reliability,
    observations,
)
from services.speculation.growth import DynamicPlan, as_given, flatten, grow, rerank
from services.speculation.stopping import cut
from services.types.tree import DraftTree

Truth = Callable[[float], float]
ALL = (1 << 64) - 1
TREE = DraftTree(
    tokens=(50, 10, 11, 12, 20, 21, 22, 30),
    parents=(-1, 0, 0, 0, 1, 1, 2, 4),
    confidences=(1.0, 0.6, 0.3, 0.1, 0.7, 0.2, 0.9, 0.8),
)


def square_root(confidence: float) -> float:
    """A head that knows more than it says."""
    return math.sqrt(confidence)


def square(confidence: float) -> float:
    """A head that says more than it knows."""
    return confidence**2


def right(confidence: float) -> float:
    """A head that is right about the target."""
    return confidence


def confidence_of(rng: random.Random) -> float:
    """As heads have them: mostly near 0, and some near 1."""
    return rng.choice([rng.betavariate(0.15, 2.0), rng.random(), rng.betavariate(5.0, 0.3)])


def teach(
    calibration: Calibration,
    truth: Truth,
    count: int,
    *,
    seed: int = 0,
    temperature: float = 0.0,
    levels: Sequence[int] = (1,),
) -> None:
    """So many nodes, accepted by what their confidence is truly worth."""
    rng = random.Random(seed)
    for _ in range(count):
        confidence = confidence_of(rng)
        accepted = rng.random() < truth(confidence)
        calibration.observe(Band.of(temperature), rng.choice(levels), confidence, accepted)


def corrected(
    calibration: Calibration, confidences: Sequence[float], level: int = 1, temperature: float = 0.0
) -> list[float]:
    log = torch.tensor([[list(confidences)]]).log()
    return calibration.correct([Band.of(temperature)], level, log).exp().flatten().tolist()


def errors(calibration: Calibration, truth: Truth, level: int = 1) -> tuple[float, float]:
    """Errors of raw and of corrected confidences over fresh nodes; 20 thousand, so good to about 0.005."""
    rng = random.Random(99)
    raw, mended = Reliability(), Reliability()
    confidences = [confidence_of(rng) for _ in range(20_000)]
    for before, after in zip(confidences, corrected(calibration, confidences, level), strict=True):
        accepted = rng.random() < truth(before)
        raw.observe(before, accepted)
        mended.observe(after, accepted)
    return raw.error(), mended.error()


# What a round says of its nodes


def test_siblings_of_the_root_and_of_every_accepted_node_are_observed_and_nothing_else() -> None:
    assert observations(TREE, ALL, (1, 4), False) == [
        (1, True),
        (2, False),
        (3, False),
        (4, True),
        (5, False),
        (7, False),
    ]
    assert observations(TREE, ALL, (2,), False) == [(1, False), (2, True), (3, False), (6, False)]


def test_when_nothing_is_accepted_the_children_of_the_root_are_refused() -> None:
    assert observations(TREE, ALL, (), False) == [(1, False), (2, False), (3, False)]


def test_nodes_that_were_not_verified_say_nothing() -> None:
    assert observations(TREE, 0b10111, (1, 4), False) == [(1, True), (2, False), (4, True)]
    assert observations(TREE, 0b1, (), False) == []


def test_nothing_is_known_of_the_children_of_a_node_that_ended_the_text() -> None:
    assert observations(TREE, ALL, (1,), True) == [(1, True), (2, False), (3, False)]
    assert observations(TREE, ALL, (1,), False) == [
        *((1, True), (2, False), (3, False)),
        *((4, False), (5, False)),
    ]


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    """Any tree whose tokens are few, so that walks go deep."""
    parents, depths, tokens = [-1], [0], [0]
    taken: set[tuple[int, int]] = set()
    for i in range(1, draw(st.integers(1, 14))):
        lowest = next(j for j in range(i) if depths[j] >= depths[-1] - 1)
        parent, token = draw(st.integers(lowest, i - 1)), draw(st.integers(0, 3))
        if (parent, token) in taken:
            break
        taken.add((parent, token))
        parents.append(parent)
        depths.append(depths[parent] + 1)
        tokens.append(token)
    return DraftTree(tuple(tokens), tuple(parents), (1.0,) * len(tokens))


@given(
    tree=trees(),
    script=st.lists(st.integers(0, 3), min_size=15, max_size=15),
    ends=st.frozensets(st.integers(0, 3), max_size=2),
    data=st.data(),
)
def test_what_a_round_says_is_what_the_target_would_have_answered_had_it_been_asked_at_each_node(
    tree: DraftTree, script: list[int], ends: frozenset[int], data: st.DataObject
) -> None:
    """`script[d]` is drawn behind the node of depth d on the target's own path."""
    kept = [0]
    for node in range(1, len(tree)):
        if tree.parents[node] in kept and data.draw(st.booleans()):
            kept.append(node)
    shown = tree.keep(kept)
    ((path, bonus),) = [
        (w.path, w.bonus) for w in walk([shown], lambda at: [script[shown.depths[node]] for _, node in at])
    ]
    said = (*(shown.tokens[node] for node in path), bonus)
    tokens, _ = cut(said, len(said), ends)
    accepted = [kept[node] for node in path[: len(tokens)]]
    expected = []
    for node in kept[1:]:
        above = [tree.tokens[i] for i in tree.path(tree.parents[node])]
        # The target was at the parent when it drew: the path to it was drawn and did not end the text.
        if above == script[: len(above)] and not ends & {*above}:
            expected.append((node, tree.tokens[node] == script[len(above)]))
    word = sum(1 << node for node in kept)
    assert observations(tree, word, accepted, len(tokens) == len(accepted)) == expected


# Bands and the reliability curve


@pytest.mark.parametrize(
    ("temperature", "band"),
    [
        (0.0, Band.GREEDY),
        (0.01, Band.COLD),
        (0.5, Band.COLD),
        (0.7, Band.COOL),
        (0.9, Band.COOL),
        (1.0, Band.NATURAL),
        (1.1, Band.NATURAL),
        (1.5, Band.HOT),
    ],
)
def test_every_temperature_has_its_band(temperature: float, band: Band) -> None:
    assert Band.of(temperature) is band
    coupled = Band.of(temperature, coupled=True)
    assert coupled == (band if band is Band.GREEDY else f"coupled {band}")


def test_the_curve_has_the_mean_confidence_and_the_share_accepted_of_each_bin() -> None:
    calibration = Calibration()
    for confidence, accepted in ((0.96, True), (0.97, False), (0.3, True), (0.0, False), (1.0, True)):
        calibration.observe(Band.GREEDY, 2, confidence, accepted)
    none, some, most, all = calibration.bins(Band.GREEDY, 2)
    assert (none.low, none.high, none.count, none.confidence, none.accepted) == (0.0, 0.001, 1, 0.0, 0.0)
    assert (some.low, some.high, some.accepted) == (0.3, 0.4, 1.0)
    assert (most.low, most.high, most.count, most.accepted) == (0.95, 0.98, 2, 0.5)
    assert most.confidence == pytest.approx(0.965)
    assert (all.high, all.confidence) == (1.0, 1.0)
    assert calibration.error() == pytest.approx((0.7 + 2 * 0.465) / 5)
    assert calibration.bins(Band.GREEDY, 1) == calibration.bins(Band.COLD) == []
    assert calibration.error(Band.HOT, 1) == 0.0


def test_curves_of_all_levels_and_bands_are_those_of_their_parts_together() -> None:
    calibration = Calibration()
    teach(calibration, square, 300, levels=(1, 2, 3))
    teach(calibration, right, 200, temperature=1.0)
    assert sum(bin.count for bin in calibration.bins()) == 500
    assert sum(bin.count for bin in calibration.bins(Band.GREEDY)) == 300
    assert sum(bin.count for bin in calibration.bins(Band.NATURAL)) == 200
    by_level = [sum(bin.count for bin in calibration.bins(None, level)) for level in (1, 2, 3)]
    assert sum(by_level) == 500


def test_a_head_that_is_right_has_hardly_an_error_and_others_have_theirs() -> None:
    calibration = Calibration()
    # About 20 thousand observations in 18 bins: chance alone makes an error of some thousandths.
    teach(calibration, right, 19_000)
    assert calibration.error() < 0.01
    wrong = Calibration()
    teach(wrong, square, 19_000)
    assert wrong.error() > 0.05


# The correction

TRUTHS = st.sampled_from([square, square_root, right, lambda c: 0.0, lambda c: 1.0, lambda c: 1 - c])
LOGS = st.lists(st.floats(-200.0, 0.0, width=32) | st.just(-math.inf), min_size=1, max_size=12)


@given(
    truth=TRUTHS,
    count=st.integers(LEAST, 3 * LEAST),
    seed=st.integers(0, 9),
    levels=st.sampled_from([(1,), (1, 2), (2, 3)]),
    logs=LOGS,
)
def test_a_correction_is_bounded_and_never_puts_a_lesser_confidence_before_a_greater_one(
    truth: Truth, count: int, seed: int, levels: tuple[int, ...], logs: list[float]
) -> None:
    calibration = Calibration()
    teach(calibration, truth, count, seed=seed, levels=levels)
    raw = torch.tensor([[sorted(logs)]])
    mended = calibration.correct([Band.GREEDY], 1, raw)
    assert mended.shape == raw.shape
    assert mended.dtype is torch.float32
    values = mended.flatten().tolist()
    assert all(value <= 0 for value in values)
    assert all(low <= high for low, high in pairwise(values))
    for before, after in zip(raw.flatten().tolist(), values, strict=True):
        if math.isinf(before):
            assert after == before
        else:
            assert abs(after - before) <= math.log(MOST) + 1e-4


@given(count=st.integers(0, LEAST - 1), logs=LOGS, truth=TRUTHS)
def test_where_data_are_few_nothing_is_corrected(count: int, logs: list[float], truth: Truth) -> None:
    calibration = Calibration()
    teach(calibration, truth, count)
    raw = torch.tensor([[logs]])
    assert torch.equal(calibration.correct([Band.GREEDY], 1, raw), raw)


def test_sessions_of_one_batch_are_corrected_by_their_own_bands_and_the_others_not_at_all() -> None:
    calibration = Calibration()
    teach(calibration, square, 2000)
    teach(calibration, square_root, 2000, temperature=1.0)
    raw = torch.tensor([0.02, 0.5, 0.8]).log().expand(4, 2, 3)
    bands = [Band.NATURAL, Band.COUPLED_NATURAL, Band.GREEDY, Band.NATURAL]
    mended = calibration.correct(bands, 1, raw)
    alone = [calibration.correct([band], 1, raw[:1])[0] for band in bands]
    assert torch.equal(mended, torch.stack(alone))
    assert torch.equal(mended[1], raw[1])
    assert (mended[0] > raw[0]).all()
    assert (mended[2] < raw[2]).all()


def test_a_level_of_few_data_is_corrected_as_its_band_and_one_of_many_by_its_own() -> None:
    calibration = Calibration()
    teach(calibration, square, 6000)
    teach(calibration, square_root, LEAST // 2, levels=(5,))
    teach(calibration, square_root, 6000, levels=(2,), seed=1)
    assert corrected(calibration, [0.5], 5) == corrected(calibration, [0.5], 6)
    low, pooled, high = (corrected(calibration, [0.5], level)[0] for level in (1, 5, 2))
    assert low == pytest.approx(0.25, abs=0.1)
    assert high == pytest.approx(0.71, abs=0.1)
    assert low < pooled < high


def test_of_a_head_that_is_surer_of_what_is_refused_nothing_is_learnt_but_how_often_it_is_right() -> None:
    calibration = Calibration()
    for i in range(8000):
        calibration.observe(Band.GREEDY, 1, 0.35 if i % 2 else 0.65, bool(i % 2))
    lesser, greater = corrected(calibration, [0.35, 0.65])
    assert 0.48 < lesser <= greater < 0.52


@pytest.mark.parametrize("truth", [square, square_root])
def test_a_head_that_says_too_much_or_too_little_is_put_right(truth: Truth) -> None:
    calibration = Calibration()
    teach(calibration, truth, 15_000)
    raw, mended = errors(calibration, truth)
    assert raw > 0.05
    assert mended < 0.2 * raw


def test_a_head_that_is_right_is_left_nearly_as_it_is() -> None:
    calibration = Calibration()
    teach(calibration, right, 15_000)
    points = [i / 100 for i in range(1, 100)]
    moved = [abs(a - b) for a, b in zip(corrected(calibration, points), points, strict=True)]
    # Some 500 observations in the middle bins: three standard deviations of a share are 0.07.
    assert max(moved) < 0.07
    assert errors(calibration, right)[1] < 0.015


def test_what_was_learnt_of_a_head_is_forgotten_when_it_changes() -> None:
    calibration = Calibration()
    teach(calibration, square, 60_000)
    teach(calibration, square_root, 60_000, seed=1)
    raw, mended = errors(calibration, square_root)
    assert mended < 0.2 * raw
    assert sum(bin.count for bin in calibration.bins(Band.GREEDY, 1)) <= MEMORY


def test_maps_are_made_anew_only_every_so_many_observations() -> None:
    calibration = Calibration()
    teach(calibration, square, 4 * REFRESH)
    before = corrected(calibration, [0.5])
    teach(calibration, square_root, REFRESH - 1, seed=1)
    assert corrected(calibration, [0.5]) == before
    teach(calibration, square_root, 1, seed=2)
    assert corrected(calibration, [0.5]) > before


@pytest.mark.parametrize("truth", [square, square_root])
def test_trees_of_corrected_confidences_are_trees_whose_values_never_rise_and_whose_siblings_keep_their_order(
    truth: Truth,
) -> None:
    calibration = Calibration()
    teach(calibration, truth, 6000, levels=(1, 2, 3))
    generator = torch.Generator().manual_seed(1)

    def log_probs(rows: int) -> Tensor:
        logits = 3 * torch.randn(2, rows, 30, generator=generator)
        return logits.log_softmax(-1)

    first = log_probs(1)[:, 0]
    passes = [log_probs(4) for _ in range(2)]
    level = iter((2, 3))

    def mended(at: int, raw: Tensor) -> Tensor:
        return calibration.correct([Band.GREEDY, Band.GREEDY], at, raw)

    candidates = grow(
        mended(1, first[:, None])[:, 0],
        lambda tokens, parents: mended(at := next(level), passes[at - 2]),
        DynamicPlan(3, 4),
        torch.arange(30),
        score=as_given,
    )
    for tree in flatten(candidates, rerank(candidates, 25), [0, 0]):
        assert all(tree.values[i] <= tree.values[tree.parents[i]] for i in range(1, len(tree)))
        for children in tree.children:
            siblings = [tree.confidences[node] for node in children.values()]
            assert siblings == sorted(siblings, reverse=True)


# A head that does not belong to its target


def head_rounds(calibration: Calibration, rounds: int, right_one: float, temperature: float = 0.0) -> None:
    """Rounds of ten children, the first of which is accepted with a chance of its own, the others never."""
    rng = random.Random(3)
    confidences = (0.55, 0.2, 0.08, 0.05, 0.03, 0.02, 0.015, 0.01, 0.005, 0.005)
    for _ in range(rounds):
        first = rng.random() < right_one
        for rank, confidence in enumerate(confidences):
            calibration.observe(Band.of(temperature), 1, confidence, first and rank == 0)


def test_a_head_whose_promises_do_not_come_true_is_reported_once_there_are_data_enough() -> None:
    calibration = Calibration()
    head_rounds(calibration, 90, 0.02)
    assert calibration.badly_off() is None
    head_rounds(calibration, 20, 0.02)
    report = calibration.badly_off()
    assert report is not None
    assert "greedy" in report
    assert "--speculative-model" in report
    # The plain error of this hopeless head is small, as most of its nodes are rightly held to be hopeless.
    assert calibration.error() < 0.15


def test_heads_that_are_somewhat_wrong_or_merely_modest_are_not_reported() -> None:
    overdone, modest, hot = Calibration(), Calibration(), Calibration()
    head_rounds(overdone, 500, 0.6)
    head_rounds(modest, 500, 0.95)
    head_rounds(hot, 500, 0.0, temperature=2.0)
    assert overdone.badly_off() is modest.badly_off() is hot.badly_off() is None
