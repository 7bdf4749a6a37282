"""What a pass takes by its rows: learnt from noisy measurements, kept up to date, never falling."""

import math
from collections.abc import Callable
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.speculation.cost import Cost

Truth = Callable[[int], float]
SHAPES: dict[str, Truth] = {
    "memory-bound": lambda rows: 1 + rows / 2000,
    "compute-bound": lambda rows: 0.2 + 0.05 * rows,
    "in proportion": lambda rows: 0.05 * rows,
    "stairs": lambda rows: 0.5 + 0.5 * math.ceil(rows / 32),
}
SIZES = (1, 3, 5, 7, 20, 33, 100, 300)
MEASUREMENTS = st.lists(st.tuples(st.integers(1, 3000), st.floats(1e-5, 1e3)), min_size=1, max_size=40)


def learn(measurements: list[tuple[int, float]]) -> Cost:
    cost = Cost()
    for rows, seconds in measurements:
        cost.observe(rows, seconds)
    return cost


def busy(cost: Cost, truth: Truth, random: Random, passes: int, factor: float = 1.0) -> None:
    """Passes of all sizes, with a tenth of noise; one in fifty is interrupted and takes ten times as long."""
    for _ in range(passes):
        rows = random.choice(SIZES)
        noise = math.exp(random.gauss(0, 0.1)) * (10 if random.random() < 0.02 else 1)
        cost.observe(rows, factor * truth(rows) * noise)


def error(cost: Cost, truth: Truth, factor: float = 1.0) -> float:
    """By how much it is off at the worst of the sizes, as a factor."""
    return max(math.exp(abs(math.log(cost.seconds(rows) / factor / truth(rows)))) for rows in SIZES)


@pytest.fixture
def settled(request: pytest.FixtureRequest) -> Cost:
    """A cost that knows its truth at all sizes exactly."""
    return learn([(rows, SHAPES[request.param](rows)) for _ in range(100) for rows in SIZES])


@given(measurements=MEASUREMENTS)
def test_seconds_never_fall_with_rows_and_lie_on_lines_between_the_knots(
    measurements: list[tuple[int, float]],
) -> None:
    cost = learn(measurements)
    curve = cost.curve()
    assert [rows for rows, _ in curve] == sorted({rows for rows, _ in curve})
    assert all(cost.seconds(rows) == pytest.approx(seconds) for rows, seconds in curve)
    steepest = 0.0
    for (low, fast), (high, slow) in pairwise(curve):
        assert fast <= slow
        steepest = max(steepest, (slow - fast) / (high - low))
        assert cost.seconds((low + high) / 2) == pytest.approx((fast + slow) / 2)
    line = [cost.seconds(rows) for rows in range(1, 2 * curve[-1][0] + 50, 7)]
    for before, after in pairwise(line):
        assert -1e-12 * before <= after - before <= 7 * steepest + 1e-9 * after


@given(measurements=MEASUREMENTS, further=st.floats(0, 1e5))
def test_outside_of_what_was_measured_it_is_flat_below_and_not_lower_above(
    measurements: list[tuple[int, float]], further: float
) -> None:
    cost = learn(measurements)
    (first, least), (last, most) = cost.curve()[0], cost.curve()[-1]
    assert first <= min(rows for rows, _ in measurements)
    assert last >= max(rows for rows, _ in measurements)
    assert cost.seconds(0) == cost.seconds(first) == least
    assert cost.seconds(last + further) >= most


def test_nothing_is_known_before_the_first_measurement_and_one_tells_of_all_sizes() -> None:
    cost = Cost()
    assert (cost.known, cost.seconds(7), list(cost.curve())) == (False, 0.0, [])
    cost.observe(8, 0.25)
    assert cost.known
    assert cost.seconds(1) == cost.seconds(8) == cost.seconds(1000) == 0.25


@given(rows=st.integers(1, 3000), seconds=st.floats(1e-6, 1e3), times=st.integers(1, 50))
def test_a_constant_is_known_exactly_from_the_first_time_on(rows: int, seconds: float, times: int) -> None:
    assert learn([(rows, seconds)] * times).seconds(rows) == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize("settled", SHAPES, indirect=True)
def test_sizes_that_always_take_the_same_are_all_known_exactly(
    settled: Cost, request: pytest.FixtureRequest
) -> None:
    truth = SHAPES[request.node.callspec.params["settled"]]
    assert error(settled, truth) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_noise_and_interruptions_leave_every_size_within_an_eighth(shape: str) -> None:
    for seed in range(3):
        cost, random = Cost(), Random(seed)
        busy(cost, SHAPES[shape], random, 200 * len(SIZES))
        assert error(cost, SHAPES[shape]) < 1.125


@pytest.mark.parametrize("factor", [3, 1 / 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_machine_that_gets_slower_or_faster_is_known_after_sixty_passes_of_each_size(
    shape: str, factor: float
) -> None:
    cost, random = Cost(), Random(5)
    busy(cost, SHAPES[shape], random, 100 * len(SIZES))
    assert error(cost, SHAPES[shape], factor) > 2.5
    busy(cost, SHAPES[shape], random, 60 * len(SIZES), factor)
    assert error(cost, SHAPES[shape], factor) < 1.15


@pytest.mark.parametrize("factor", [3, 1 / 3])
@pytest.mark.parametrize("size", [1, 33, 300])
@pytest.mark.parametrize("settled", SHAPES, indirect=True)
def test_where_one_size_is_seen_to_change_the_others_follow_part_of_the_way(
    settled: Cost, size: int, factor: float, request: pytest.FixtureRequest
) -> None:
    truth = SHAPES[request.node.callspec.params["settled"]]
    for _ in range(300):
        settled.observe(size, factor * truth(size))
    assert settled.seconds(size) == pytest.approx(factor * truth(size), rel=0.08)
    for rows in SIZES:
        moved = math.log(settled.seconds(rows) / truth(rows)) / math.log(factor)
        assert 0.25 < moved < 1.05


@pytest.mark.parametrize("settled", ["compute-bound"], indirect=True)
def test_a_single_interruption_moves_nothing_by_more_than_a_thirtieth(settled: Cost) -> None:
    before = [settled.seconds(rows) for rows in SIZES]
    settled.observe(33, 1000 * settled.seconds(33))
    after = [settled.seconds(rows) for rows in SIZES]
    assert all(a / b < 31 / 30 for a, b in zip(after, before, strict=True))


def test_a_first_measurement_that_was_an_interruption_is_forgotten() -> None:
    cost = learn([(16, 10.0), *[(16, 1.0)] * 100])
    assert cost.seconds(16) == pytest.approx(1, rel=0.06)


def test_more_rows_that_seem_faster_are_pooled_and_do_not_wind_up() -> None:
    cost = learn([(1, 2.0), (256, 1.0)] * 200)
    assert cost.seconds(1) == cost.seconds(256) == pytest.approx(math.sqrt(2), rel=0.05)
    for _ in range(120):
        cost.observe(1, 1.0)
        cost.observe(256, 4.0)
    assert cost.seconds(1) == pytest.approx(1, rel=0.05)
    assert cost.seconds(256) == pytest.approx(4, rel=0.05)


@pytest.mark.parametrize(
    ("rows", "seconds"), [(0, 1.0), (-3, 1.0), (1, 0.0), (1, -1.0), (1, math.nan), (1, math.inf)]
)
def test_a_pass_without_rows_or_time_is_refused(rows: int, seconds: float) -> None:
    cost = Cost()
    with pytest.raises(ValueError, match="rows and takes time"):
        cost.observe(rows, seconds)
    assert not cost.known
