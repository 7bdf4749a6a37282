"""What a pass of a model takes, against the rows in it: measured at work, and never believed to fall.

The verifier keeps one of these for target steps, T(N) of DESIGN section 6, the drafter one for head passes.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

FORGETTING = 0.05
"""Weight of a new measurement at a knot that has seen many."""
MOST_SURPRISE = 0.5
"""Of the logarithm of a measurement: what is further off counts as much as this and no more."""
STALING = 0.0025
"""Part of its weight that a knot loses while others are measured: what it says next counts the more."""
SHARED = 0.3
"""How much of what one knot learns the others are moved by: a machine gets slower as a whole."""


@dataclass(slots=True)
class _Knot:
    rows: int
    log_s: float
    """Logarithm of the seconds."""
    weight: float = 0.0
    """Measurements that it rests on."""


class Cost:
    """Seconds of a pass by its rows: monotone, linear between knots, robust, with forgetting.

    Knots stand at 1, 2, 3, 4, 6, 8, 12, 16, 24 and so on, each from the first measurement beside it.
    """

    def __init__(self) -> None:
        self._knots: list[_Knot] = []
        self._rows: list[int] = []
        self._seconds: list[float] = []

    @property
    def known(self) -> bool:
        """Whether anything has been measured."""
        return bool(self._knots)

    def curve(self) -> Sequence[tuple[int, float]]:
        """Rows and seconds of the knots, both ascending."""
        return list(zip(self._rows, self._seconds, strict=True))

    def seconds(self, rows: float) -> float:
        """Of a pass with so many rows; 0.0 before the first measurement.

        Below the first knot it is flat; above the last one it rises as between the last two. Where there is
        but one it is flat too: what is believed to be dear is not tried, and what is not tried not measured.
        """
        xs, ys = self._rows, self._seconds
        if not xs:
            return 0.0
        at = bisect_left(xs, rows)
        if at == 0:
            return ys[0]
        if at == len(xs):
            if at == 1:
                return ys[0]
            at -= 1
        slope = (ys[at] - ys[at - 1]) / (xs[at] - xs[at - 1])
        return ys[at - 1] + slope * (rows - xs[at - 1])

    def observe(self, rows: int, seconds: float) -> None:
        """Take a measurement in: robustly, since a pass that was interrupted says little of the next.

        Raises:
            ValueError: for a pass without rows, or that took no time.
        """
        if rows < 1 or not 0 < seconds < math.inf:
            raise ValueError(f"a pass has rows and takes time, not {rows} rows in {seconds} s")
        surprise = math.log(seconds / (self.seconds(rows) or seconds))
        near = self._beside(rows, seconds)
        new = any(knot.weight < 1 for knot, _ in near)
        if not new:
            surprise = max(-MOST_SURPRISE, min(MOST_SURPRISE, surprise))
        for knot in self._knots:
            if all(knot is not other for other, _ in near):
                knot.log_s += 0.0 if new else SHARED * FORGETTING * surprise
                knot.weight = max(knot.weight * (1 - STALING), min(knot.weight, 1.0))
        # With this divisor the curve moves by the whole surprise where it was measured, were the gain 1.
        squares = sum(share * share for _, share in near)
        for knot, share in near:
            gain = max(FORGETTING, share / (knot.weight + share))
            knot.log_s += gain * share / squares * surprise
            knot.weight = min(knot.weight + share, 1 / FORGETTING)
        self._straighten()

    def _beside(self, rows: int, seconds: float) -> list[tuple[_Knot, float]]:
        """The knots next to so many rows, made if they are missing, and their shares in the curve there."""
        power = 1 << (rows.bit_length() - 1)
        knots = sorted({power, power * 3 // 2, power * 2})
        high = next(at for at in knots if at >= rows)
        low = max(at for at in knots if at <= rows)
        share = (rows - low) / (high - low) if high > low else 1.0
        near = [(self._knot(high, seconds), share)]
        return near if high == low else [(self._knot(low, seconds), 1 - share), *near]

    def _knot(self, rows: int, seconds: float) -> _Knot:
        at = bisect_left(self._knots, rows, key=lambda knot: knot.rows)
        if at == len(self._knots) or self._knots[at].rows != rows:
            self._knots.insert(at, _Knot(rows, math.log(self.seconds(rows) or seconds)))
        return self._knots[at]

    def _straighten(self) -> None:
        """Make of the knots the nearest curve that never falls: neighbours that do are pooled."""
        pools: list[tuple[float, float, int]] = []
        for knot in self._knots:
            weight, log_s, members = max(knot.weight, FORGETTING), knot.log_s, 1
            while pools and pools[-1][1] > log_s:
                other, log_other, more = pools.pop()
                log_s = (weight * log_s + other * log_other) / (weight + other)
                weight, members = weight + other, members + more
            pools.append((weight, log_s, members))
        levels = [log_s for _, log_s, members in pools for _ in range(members)]
        for knot, log_s in zip(self._knots, levels, strict=True):
            knot.log_s = log_s
        self._rows = [knot.rows for knot in self._knots]
        self._seconds = [math.exp(log_s) for log_s in levels]
