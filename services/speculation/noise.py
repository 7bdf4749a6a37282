"""Counter-based Gumbel noise: a pure function of (seed, position, token), equal on every device.

Integers are mixed by the finaliser of SplitMix64 (Steele, Lea, Flood 2014), in wrapping int64 tensor
operations, so the 53 random bits are identical everywhere; only the two float64 logarithms can differ in
their last bit between math libraries.
"""

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)
_BITS = 53


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Logical right shift; int64 shifts in torch are arithmetic."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mixed(x: Tensor) -> Tensor:
    x = (x ^ _shifted(x, 30)) * _MIX_1
    x = (x ^ _shifted(x, 27)) * _MIX_2
    return x ^ _shifted(x, 31)


def signed(word: int) -> int:
    """The int64 with the same 64 bits as `word` modulo 2**64."""
    word &= (1 << 64) - 1
    return word - (1 << 64) if word >> 63 else word


def random_bits(seeds: Tensor, positions: Tensor, tokens: int | Tensor) -> Tensor:
    """53 random bits for every (row, token).

    Args:
        seeds: int64 `[R]`, the 64 bits of each row's seed.
        positions: int64 `[R]`, absolute position of the token each row draws.
        tokens: int64 `[V]`, or how many, from 0 on.

    Returns:
        int64 `[R, V]`, uniform on [0, 2**53).
    """
    if isinstance(tokens, int):
        tokens = torch.arange(tokens, device=seeds.device)
    streams = _mixed(_mixed(seeds + _GOLDEN) + (positions + 1) * _GOLDEN)
    return _shifted(_mixed(streams[:, None] + (tokens + 1) * _GOLDEN), 64 - _BITS)


def gumbel(seeds: Tensor, positions: Tensor, tokens: int | Tensor) -> Tensor:
    """Standard Gumbel noise `G`, finite everywhere, float64 `[R, V]`; arguments as for `random_bits`.

    `argmax(logits/T + G)` is a draw from `softmax(logits/T)` (Gumbel-max; Maddison et al. 2014).
    """
    bits = random_bits(seeds, positions, tokens)
    uniform = (bits.to(torch.float64) + 0.5) * 2.0**-_BITS
    # Rounding can lift the largest value to 1, whose exponential would be infinite.
    exponential = -torch.log1p(-uniform.clamp_(max=1 - 2.0**-_BITS))
    return -torch.log(exponential)
