"""Growing only what is worth a head pass (DESIGN section 6): how deep and how wide trees become."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from services.speculation.budget import affordable
from services.speculation.cost import Cost

FORGETTING = 0.05
FIRST_REACH = 0.8
"""Of a level that has not been grown yet: it has to be tried once."""


class Reach:
    """What expanding nodes brings: values of their children above the price, for each unit of their own."""

    def __init__(self) -> None:
        self._levels: dict[int, float] = {}

    def __getitem__(self, level: int) -> float:
        return self._levels.get(level, FIRST_REACH)

    def see(self, level: int, brought: float) -> None:
        """Take in what the nodes of a level have brought."""
        before = self._levels.get(level, brought)
        self._levels[level] = before + FORGETTING * (brought - before)


@dataclass(slots=True)
class AdaptivePlan:
    """EAGLE-2 as far as it pays: a level's frontier is as wide as is worth the pass, and may be empty.

    Values never rise along a path, so what a level brings never rises from one to the next: where one does
    not pay, none behind it would.
    """

    levels: int
    """D at most."""
    beam: int
    """Nodes expanded in a level at most, and children that each proposes."""
    prices: Sequence[float]
    """Of each session, the value that a node must have to be worth verifying, `[S]`."""
    pace: float
    """Tokens per second that all the sessions make: they wait together."""
    passes: Cost
    """Of the head; what the passes of this growth take is told it."""
    reach: Reach
    clock: Callable[[], float] = time.perf_counter
    _expanded: tuple[int, float] | None = field(default=None, init=False)
    """Nodes expanded last in all sessions, and their values."""
    _began: float = field(default=0.0, init=False)

    def width(self, level: int) -> int:
        """k at every level."""
        return self.beam

    def kept(self, level: int, expanded: int, width: int) -> Tensor:
        """Every proposal is a candidate."""
        return torch.arange(expanded * width)

    def frontier(self, level: int, log_values: Tensor) -> Tensor:
        """The nodes of highest value whose children are expected to be worth the pass."""
        best = log_values.sort(dim=-1, descending=True, stable=True)
        rows = best.values.exp().tolist()
        self._learn(level, rows)
        by_rank = [sum(values) for values in zip(*rows, strict=True)][: self.beam]
        gains = [self.reach[level] * value for value in by_rank]
        width = affordable(gains, lambda n: self.passes.seconds(n * len(rows)) if n else 0.0, self.pace)
        self._expanded = width * len(rows), sum(by_rank[:width])
        self._began = self.clock()
        return best.indices[:, :width]

    def _learn(self, level: int, rows: Sequence[Sequence[float]]) -> None:
        """Take in what the last pass took, and what the nodes that it expanded have brought."""
        if self._expanded and self._expanded[1] > 0:
            nodes, value = self._expanded
            self.passes.observe(nodes, self.clock() - self._began)
            brought = sum(max(v - p, 0.0) for p, row in zip(self.prices, rows, strict=True) for v in row)
            self.reach.see(level - 1, brought / value)
