"""Calibration: what the head's confidences have been worth, and what they should be (DESIGN section 6).

A node whose parent is accepted is accepted with the probability that the target gives its token. A head that
is right about the target sees a share of `c` accepted of the nodes of confidence `c` (EAGLE-2, section 3.2 of
arXiv 2406.16858). How far it is from that depends on the temperature, of which it knows nothing, and on the
level, since it feeds on its own predictions.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

import torch
from torch import Tensor

from services.types.tree import DraftTree

EDGES = (
    *(0.001, 0.003, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5),
    *(0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99),
)
"""Between the bins of confidence: finer where nodes are nearly hopeless or nearly certain."""
MEMORY = 20_000.0
"""Observations of a band and level that count at most; old ones fade for new ones."""
LEAST = 500
"""Observations without which nothing is corrected."""
REFRESH = 500
"""Observations after which the maps are made anew."""
PRIOR = 10.0
"""A bin of confidence c is believed to be right as if so many / (c (1 - c)) observations said so: near 0 and
near 1, it takes more of them to tell one share from another.
"""
MOST = 4.0
"""A corrected confidence is at most so many times the raw one, and at least this part of it."""
JUDGED, PROMISED, SHORTFALL = 1000, 50.0, 0.5
"""Of so many observations or more, and accepted nodes promised, a head that is badly off lacks this part."""


class Band(StrEnum):
    """A range of temperatures in which confidences are worth about the same.

    Those of coupled trees are chances given the noise, another matter than chances before it.
    """

    GREEDY = "greedy"
    """0."""
    COLD = "cold"
    """Up to 0.5."""
    COOL = "cool"
    """Up to 0.9."""
    NATURAL = "natural"
    """Up to 1.1: the temperature that the head's probabilities are made for."""
    HOT = "hot"
    """Above."""
    COUPLED_COLD = "coupled cold"
    COUPLED_COOL = "coupled cool"
    COUPLED_NATURAL = "coupled natural"
    COUPLED_HOT = "coupled hot"

    @classmethod
    def of(cls, temperature: float, coupled: bool = False) -> "Band":
        """The band that a temperature is in; at 0 there is no noise."""
        at = bisect_left(_UP_TO, temperature)
        return _BANDS[at + len(_UP_TO) if coupled and at else at]

    @property
    def coupled(self) -> bool:
        """Whether it is one of coupled trees."""
        return self.name.startswith("COUPLED")


def observations(
    tree: DraftTree, nodes: int, accepted: Sequence[int], finished: bool
) -> list[tuple[int, bool]]:
    """The draft nodes that a round decided on, and whether each was accepted.

    The target decides on the children of a node by the token it draws behind it. It draws one behind the root
    and behind every accepted node, except where the text ends with that node.

    Args:
        tree: as it was proposed.
        nodes: bit i is set when node i stood in the target step.
        accepted: indices of the accepted nodes, root excluded, from the root down.
        finished: whether the text ends with the last accepted node, so that nothing was drawn behind it:
            `len(outcome.tokens) == len(outcome.accepted)`. A text that ends with a bonus token does not.
    """
    path = (0, *accepted)
    decided = set(path[:-1] if finished else path)
    return [
        (node, node in path)
        for node in range(1, len(tree))
        if nodes >> node & 1 and tree.parents[node] in decided
    ]


@dataclass(frozen=True, slots=True)
class Bin:
    """Nodes of about the same confidence."""

    low: float
    high: float
    count: float
    """Observations, of which old ones may count less."""
    confidence: float
    """Their mean."""
    accepted: float
    """Share of them that were."""


class Reliability:
    """Confidences and what became of their nodes, by bins: one reliability curve."""

    def __init__(self, memory: float = math.inf) -> None:
        """Empty; `memory` is how many observations count at most, old ones fade for new ones."""
        self._memory = memory
        self.count = 0.0
        """Observations, as far as they still count."""
        self._counts, self._confidences, self._accepted = ([0.0] * (len(EDGES) + 1) for _ in range(3))

    def observe(self, confidence: float, accepted: bool) -> None:
        """Take in one node that the target decided on."""
        at = bisect_right(EDGES, confidence)
        self.count += 1
        self._counts[at] += 1
        self._confidences[at] += confidence
        self._accepted[at] += accepted
        if self.count > self._memory:
            self._scale(0.5)

    def add(self, other: "Reliability") -> None:
        """Take in all that another one has seen."""
        self.count += other.count
        for mine, theirs in zip(self._sums(), other._sums(), strict=True):
            mine[:] = (a + b for a, b in zip(mine, theirs, strict=True))

    def bins(self) -> list[Bin]:
        """The reliability curve: the bins that have been observed, in ascending order."""
        return [
            Bin(low, high, count, confidence / count, accepted / count)
            for (low, high), count, confidence, accepted in zip(_ranges(), *self._sums(), strict=True)
            if count
        ]

    def error(self) -> float:
        """Expected calibration error: the mean over observations of how far their bin's confidence and share
        accepted are apart; 0.0 without any.

        Most children of a node are hopeless, and rightly held to be so. Ten of one node promise one accepted
        node at most, so that this cannot exceed 0.2, however wrong they are; `shortfall` can.
        """
        off = sum(bin.count * abs(bin.accepted - bin.confidence) for bin in self.bins())
        return off / self.count if self.count else 0.0

    @property
    def promised(self) -> float:
        """How many nodes would be accepted if the confidences were right."""
        return sum(self._confidences)

    @property
    def shortfall(self) -> float:
        """Part of the accepted nodes promised that did not come; 0.0 where none were promised."""
        return max(1 - sum(self._accepted) / self.promised, 0.0) if self.promised else 0.0

    def corrected(self, prior: Callable[[float], float]) -> "Curve":
        """The monotone map from confidences to the shares accepted, as near to `prior` as data are few."""
        knots, shares, weights = [], [], []
        for (low, high), count, confidence, accepted in zip(_ranges(), *self._sums(), strict=True):
            centre = (low + high) / 2
            believed = PRIOR / (centre * (1 - centre))
            weights.append(count + believed)
            knots.append((confidence + believed * centre) / weights[-1])
            shares.append((accepted + believed * prior(centre)) / weights[-1])
        bounded = [
            min(max(y, x / MOST), MOST * x, 1.0)
            for x, y in zip(knots, _never_falling(shares, weights), strict=True)
        ]
        return Curve(knots, bounded)

    def _sums(self) -> tuple[list[float], list[float], list[float]]:
        return self._counts, self._confidences, self._accepted

    def _scale(self, factor: float) -> None:
        self.count *= factor
        for sums in self._sums():
            sums[:] = (factor * value for value in sums)


class Curve:
    """A monotone map of confidences: pieces `a + b * c` between its knots, the first one from (0, 0) on."""

    def __init__(self, knots: Sequence[float], values: Sequence[float]) -> None:
        """Through the points (knot, value): knots ascending in (0, 1), values never falling in [0, 1].

        Behind the last one, it is a confidence's part in the value that stays the same.
        """
        self.knots = tuple(knots)
        last = min(values[-1] / knots[-1], 1.0)
        points = [(0.0, 0.0), *zip(knots, values, strict=True), (1.0, last)]
        self.b = tuple((v - u) / (y - x) for (x, u), (y, v) in pairwise(points))
        self.a = tuple(u - b * x for (x, u), b in zip(points, self.b, strict=False))

    def __call__(self, confidence: float) -> float:
        """The corrected confidence."""
        at = bisect_left(self.knots, confidence)
        return self.a[at] + self.b[at] * confidence


class Calibration:
    """What has been seen of one head, per band and level, and the correction learnt from it."""

    def __init__(self) -> None:
        self._seen: dict[tuple[Band, int], Reliability] = {}
        self._fresh = 0
        self._maps: dict[tuple[Band, int | None], Curve | None] = {}
        """By band and level; level None is that of all levels together."""
        self._tables: dict[tuple[int, torch.device], Tensor] = {}

    def observe(self, band: Band, level: int, confidence: float, accepted: bool) -> None:
        """Take in one draft node that the target decided on: one that `observations` names.

        Args:
            band: of its session.
            level: its depth, from 1 on.
            confidence: raw, before any correction.
            accepted: whether it was.
        """
        key = band, level
        if key not in self._seen:
            self._seen[key] = Reliability(MEMORY)
        self._seen[key].observe(confidence, accepted)
        self._fresh += 1
        if self._fresh >= REFRESH:
            self._fresh = 0
            self._maps.clear()
            self._tables.clear()

    def correct(self, bands: Sequence[Band | None], level: int, log_confidences: Tensor) -> Tensor:
        """Confidences as they should have been, as far as that is known; where it is not, as they are.

        Args:
            bands: of S sessions; None: as they are.
            level: from 1 on.
            log_confidences: raw, float32 `[S, f, k]`, at most 0.

        Returns:
            float32 `[S, f, k]`, at most 0: in every session a monotone map, which moves no confidence by a
            factor of more than `MOST`.
        """
        if all(band is None or self._map(band, level) is None for band in set(bands)):
            return log_confidences
        device = log_confidences.device
        rows = torch.tensor([_BANDS.index(band) if band else len(_BANDS) for band in bands], device=device)
        knots, a, b = self._table(level, device)[:, rows].unbind()
        # In double precision, and as a factor: neither rounding nor underflow moves one past another.
        raw = log_confidences.double().flatten(1).contiguous()
        confidences = raw.exp().clamp_(min=_TINY)
        piece = torch.searchsorted(knots, confidences)
        factor = torch.addcdiv(b.gather(1, piece), a.gather(1, piece), confidences)
        return factor.log_().add_(raw).clamp_(max=0.0).to(log_confidences.dtype).view_as(log_confidences)

    def bins(self, band: Band | None = None, level: int | None = None) -> list[Bin]:
        """The reliability curve of raw confidences in a band, at a level; None is all of them together."""
        return self._together(band, level).bins()

    def error(self, band: Band | None = None, level: int | None = None) -> float:
        """Their expected calibration error, likewise."""
        return self._together(band, level).error()

    def badly_off(self) -> str | None:
        """A sentence for the log when head and target probably do not belong together; None otherwise.

        Too little confidence is no sign of that, and in hot sessions any head promises too much.
        """
        for band in Band:
            seen = self._together(band, None)
            enough = seen.count >= JUDGED and seen.promised >= PROMISED
            if band not in (Band.HOT, Band.COUPLED_HOT) and enough and seen.shortfall > SHORTFALL:
                return (
                    f"the head's confidences promised {seen.promised:.0f} accepted nodes in {band} sessions, "
                    f"and {seen.shortfall:.0%} of them did not come: the head was probably not made for "
                    "this target; give --speculative-model the one that was"
                )
        return None

    def _together(self, band: Band | None, level: int | None) -> Reliability:
        together = Reliability()
        # A list, since another thread may look at the curves while this one observes.
        for (of, at), seen in list(self._seen.items()):
            if band in (of, None) and level in (at, None):
                together.add(seen)
        return together

    def _map(self, band: Band, level: int | None) -> Curve | None:
        """The correction of a level: its own, or else that of its band, or else None."""
        key = band, level
        if key not in self._maps:
            seen = self._together(band, level)
            pool = None if level is None else self._map(band, None)
            self._maps[key] = pool if seen.count < LEAST else seen.corrected(pool or _unchanged)
        return self._maps[key]

    def _table(self, level: int, device: torch.device) -> Tensor:
        """Knots, a and b of a level's maps for every band and for none, float64 `[3, bands + 1, n + 1]`."""
        key = level, device
        if key not in self._tables:
            maps = [*(self._map(band, level) or _IDENTITY for band in Band), _IDENTITY]
            # A last knot that no confidence is above makes the three of one length.
            columns = ([(*m.knots, 1.0) for m in maps], [m.a for m in maps], [m.b for m in maps])
            self._tables[key] = torch.tensor(columns, dtype=torch.float64, device=device)
        return self._tables[key]


def _unchanged(confidence: float) -> float:
    return confidence


def _ranges() -> Iterable[tuple[float, float]]:
    return pairwise((0.0, *EDGES, 1.0))


def _never_falling(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The nearest sequence that never falls, in weighted squares: neighbours that do are pooled."""
    pools: list[tuple[float, float, int]] = []
    for value, weight in zip(values, weights, strict=True):
        size = 1
        while pools and pools[-1][0] >= value:
            mean, mass, members = pools.pop()
            value = (mass * mean + weight * value) / (mass + weight)
            weight, size = mass + weight, members + size
        pools.append((value, weight, size))
    return [value for value, _, size in pools for _ in range(size)]


_BANDS, _UP_TO = tuple(Band), (0.0, 0.5, 0.9, 1.1)
_TINY = 1e-300
"""Above 0, so that it can be divided by."""
_CENTRES = [(low + high) / 2 for low, high in _ranges()]
_IDENTITY = Curve(_CENTRES, _CENTRES)
