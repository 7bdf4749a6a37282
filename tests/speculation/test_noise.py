"""The noise is a hash, so its tests are exact, or statistical with fixed seeds.

A statistical test counts half a million values, or a million, in 256 cells. It fails where a chi-square as
high, or as low (too even is not random either), has a chance below `ALPHA`.
"""

import itertools
import math
import random
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from services.speculation.noise import gumbel, random_bits, signed

Noise = Callable[[Tensor, Tensor, int], Tensor]

ALPHA = 1e-4
CELLS = 256
SEEDS, POSITIONS, TOKENS = GRID = (64, 64, 256)
NEIGHBOURS = [step for step in itertools.product((-1, 0, 1), repeat=3) if step > (0, 0, 0)]
"""Steps in the grid to every neighbour, diagonals included, one of each two directions."""

WORD = 2**64
GOLDEN, MIX_1, MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mixed(x: int) -> int:
    """The finaliser of SplitMix64, in plain integers."""
    x = (x ^ x >> 30) * MIX_1 % WORD
    x = (x ^ x >> 27) * MIX_2 % WORD
    return x ^ x >> 31


def unmixed(y: int) -> int:
    """The inverse of `mixed`."""
    for shift, factor in ((31, MIX_2), (27, MIX_1), (30, 1)):
        x = y
        for _ in range(64 // shift):
            x = y ^ x >> shift
        y = x * pow(factor, -1, WORD) % WORD
    return y


def expected_bits(seed: int, position: int, token: int) -> int:
    stream = mixed(mixed((seed + GOLDEN) % WORD) + (position + 1) * GOLDEN & WORD - 1)
    return mixed((stream + (token + 1) * GOLDEN) % WORD) >> 11


def seed_that_draws(bits: int, position: int, token: int) -> int:
    stream = unmixed(bits << 11) - (token + 1) * GOLDEN
    return (unmixed((unmixed(stream % WORD) - (position + 1) * GOLDEN) % WORD) - GOLDEN) % WORD


def chi_square(cells: Tensor) -> float:
    """Chance of counts at least as uneven as these if all cells are equally likely."""
    return float(stats.chisquare(torch.bincount(cells.flatten(), minlength=CELLS).numpy()).pvalue)


def pairs(first: Tensor, second: Tensor, shift: int) -> float:
    """`chi_square` of 4 bits of one value and the same 4 bits of its partner."""
    return chi_square(((first >> shift) & 15) * 16 + ((second >> shift) & 15))


def power(n: int, effect: float) -> float:
    """Chance that `chi_square` of n values notices cells whose chances are off by `effect`, relative, rms."""
    critical = stats.chi2.isf(ALPHA, CELLS - 1)
    return float(stats.ncx2.sf(critical, CELLS - 1, n * effect**2))


def sample(noise: Noise, seed: int = 0, stride: int = 1, position: int = 0) -> Tensor:
    """Bits of a grid of seeds `stride` apart and consecutive positions and tokens."""
    seeds = torch.tensor([signed(seed + i * stride) for i in range(SEEDS)])
    positions = torch.arange(position, position + POSITIONS)
    return noise(seeds.repeat_interleave(POSITIONS), positions.repeat(SEEDS), TOKENS).view(GRID)


def chances(bits: Tensor) -> Iterator[float]:
    """Uniformity of high, middle and low bits; then independence of all neighbours, in high and low bits.

    The first axis of a step that moves is divided into even and odd, so that no value is in two pairs.
    """
    for shift in (45, 22, 0):
        yield chi_square((bits >> shift) & 255)
    for step, shift in itertools.product(NEIGHBOURS, (49, 0)):
        lead = next(axis for axis in range(3) if step[axis])
        here = {-1: slice(1, None), 0: slice(None), 1: slice(-1)}
        there = {-1: slice(-1), 0: slice(None), 1: slice(1, None)}
        first, second = [here[s] for s in step], [there[s] for s in step]
        first[lead], second[lead] = slice(0, None, 2), slice(1, None, 2)
        yield pairs(bits[tuple(first)], bits[tuple(second)], shift)


def passes(chance: float) -> bool:
    return ALPHA < chance < 1 - ALPHA


@pytest.mark.parametrize(
    ("seed", "stride", "position"),
    [(0, 1, 0), (2**63 - 32, 1, 1_000_000), (WORD - 32, 1, 131_072), (7, GOLDEN, 0), (7, 2**32, 0)],
)
def test_the_noise_is_uniform_and_independent_across_seeds_positions_and_tokens(
    seed: int, stride: int, position: int
) -> None:
    assert all(map(passes, chances(sample(random_bits, seed, stride, position))))


def test_seeds_that_differ_in_one_bit_have_independent_noise() -> None:
    rng = random.Random(0)
    seeds = [rng.randrange(WORD) for _ in range(64)]
    one_bit_off = [seed ^ 1 << bit for bit, seed in enumerate(seeds)]
    first, second = (
        random_bits(torch.tensor([signed(seed) for seed in row]).repeat(64), torch.arange(4096), TOKENS)
        for row in (seeds, one_bit_off)
    )
    assert all(passes(pairs(first, second, shift)) for shift in (49, 24, 0))


def test_the_statistics_notice_three_percent_off() -> None:
    smallest = SEEDS // 2 * (POSITIONS - 1) * (TOKENS - 1)
    assert power(smallest, effect=0.03) > 0.9999
    assert power(SEEDS * POSITIONS * TOKENS, effect=0.02) > 0.9999


def token_ignored(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    return random_bits(seeds, positions, 1).expand(-1, vocab_size)


def position_and_token_added(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    bits = random_bits(seeds, positions * 0, POSITIONS + vocab_size)
    return bits.gather(1, positions[:, None] + torch.arange(vocab_size))


def not_mixed(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    counter = (seeds * POSITIONS + positions)[:, None] * vocab_size + torch.arange(vocab_size)
    return (counter * signed(GOLDEN) >> 11) & (2**53 - 1)


def three_percent_uneven(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    uniform = random_bits(seeds, positions, vocab_size).double() / 2**53
    return (uniform**1.03 * 2**53).long()


def one_token_in_256_repeated(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    bits = random_bits(seeds, positions, vocab_size)
    bits[:, 255::256] = bits[:, 254::256]
    return bits


@pytest.mark.parametrize(
    "broken",
    [
        pytest.param(lambda s, p, v: random_bits(s * 0, p, v), id="seed ignored"),
        pytest.param(lambda s, p, v: random_bits(s, p * 0, v), id="position ignored"),
        token_ignored,
        pytest.param(lambda s, p, v: random_bits(s + p, p * 0, v), id="seed and position added"),
        position_and_token_added,
        not_mixed,
        three_percent_uneven,
        one_token_in_256_repeated,
    ],
)
def test_broken_noise_is_noticed_by_the_same_statistics(broken: Noise) -> None:
    assert not all(map(passes, chances(sample(broken))))


def law(noise: Tensor) -> float:
    """Kolmogorov-Smirnov against the standard Gumbel law."""
    return float(stats.kstest(noise.flatten().numpy(), stats.gumbel_r.cdf).pvalue)


def test_the_noise_follows_the_gumbel_law() -> None:
    """Of 2^18 values; a distribution function off by 0.01 anywhere is noticed (critical distance 0.0044)."""
    noise = gumbel(torch.arange(16).repeat_interleave(64), torch.arange(64).repeat(16), 256)
    assert law(noise) > ALPHA
    assert law(noise * 1.04) < ALPHA
    assert law(noise + 0.03) < ALPHA


def test_the_reference_is_the_published_generator() -> None:
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert [mixed((1234567 + i * GOLDEN) % WORD) for i in range(1, 5)] == published


@given(seeds=st.lists(st.integers(-(2**70), 2**70), min_size=1, max_size=3), position=st.integers(0, 2**40))
def test_the_bits_are_those_of_plain_integers_for_any_seed(seeds: list[int], position: int) -> None:
    rows = torch.tensor([signed(seed) for seed in seeds])
    bits = random_bits(rows, torch.full_like(rows, position), 5)
    assert bits.tolist() == [[expected_bits(seed, position, token) for token in range(5)] for seed in seeds]


def test_the_bits_never_change() -> None:
    bits = random_bits(torch.tensor([0, signed(2**64 - 1)]), torch.tensor([0, 1000]), 3)
    assert bits.tolist() == [
        [1249383295688599, 8746909956485189, 2502496043069471],
        [8191583492780336, 3574481772844290, 6198200662312200],
    ]
    noise = gumbel(torch.tensor([42]), torch.tensor([7]), 4)
    expected = [4.828384019977038, 2.3237610219887515, -0.22627858507647367, -0.12415163919528102]
    assert noise[0].tolist() == pytest.approx(expected, rel=1e-13)


@given(
    seed=st.integers(0, WORD - 1),
    position=st.integers(0, 2**20),
    small=st.integers(0, 60),
    large=st.integers(0, 60),
)
def test_a_row_depends_on_its_own_seed_and_position_and_a_token_on_no_vocabulary(
    seed: int, position: int, small: int, large: int
) -> None:
    alone = random_bits(torch.tensor([signed(seed)]), torch.tensor([position]), small)
    batch = random_bits(torch.tensor([5, signed(seed)]), torch.tensor([3, position]), small + large)
    assert torch.equal(alone[0], batch[1, :small])


@given(word=st.integers(-(2**130), 2**130))
def test_signed_keeps_the_low_64_bits(word: int) -> None:
    assert -(2**63) <= signed(word) < 2**63
    assert (signed(word) - word) % WORD == 0


@pytest.mark.parametrize("bits", [0, 1, 2**52 - 1, 2**52, 2**53 - 2, 2**53 - 1])
def test_the_noise_is_finite_at_the_ends_of_the_53_bits(bits: int) -> None:
    seed, position = signed(seed_that_draws(bits, position=9, token=4)), 9
    rows = torch.tensor([seed]), torch.tensor([position])
    assert random_bits(*rows, 5)[0, 4] == bits
    uniform = min((bits + 0.5) / 2**53, 1 - 2.0**-53)
    assert gumbel(*rows, 5)[0, 4].item() == pytest.approx(-math.log(-math.log1p(-uniform)), rel=1e-14)


def test_no_noise_of_a_million_is_infinite() -> None:
    noise = gumbel(torch.arange(64).repeat(64), torch.arange(4096), 256)
    assert noise.dtype == torch.float64
    assert noise.isfinite().all()
