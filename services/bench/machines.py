"""What steps, head passes and messages take on machines that are known by numbers alone."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from services.bench.hardware import ETHERNET
from services.bench.paper import Plan
from services.bench.rounds import Choice, Step, link_seconds, pass_seconds
from services.bench.shards import DTYPE
from services.engine.pages import PAGE_SIZE
from services.types.tree import MAX_NODES


class Machine(Protocol):
    """What a verify and a draft replica run on."""

    @property
    def shared(self) -> bool:
        """Whether both run on the same processors, so that one waits while the other computes."""

    @property
    def pages(self) -> int:
        """Pages of a verify replica."""

    def step(self, rows: int, sessions: int, context: int) -> float:
        """Seconds of a target step: rows in it, sessions that have them, tokens before these altogether."""

    def head_pass(self, rows: int, sessions: int, context: int) -> float:
        """Seconds of a head pass, likewise."""

    def link(self, features: int) -> float:
        """Seconds of a message one way, with so many features."""


@dataclass(frozen=True, slots=True)
class Linear:
    """A machine where everything takes a time of its own, and more for each row and each session."""

    step_s: tuple[float, float, float]
    """Of a target step: of itself, of a row, of a session."""
    pass_s: tuple[float, float, float]
    """Of a head pass, likewise."""
    link_s: float = 0.0
    shared: bool = False
    pages: int = 1 << 20

    def step(self, rows: int, sessions: int, context: int) -> float:
        """Of a target step."""
        return _linear(self.step_s, rows, sessions)

    def head_pass(self, rows: int, sessions: int, context: int) -> float:
        """Of a head pass."""
        return _linear(self.pass_s, rows, sessions)

    def link(self, features: int) -> float:
        """Of any message."""
        return self.link_s


def _linear(seconds: tuple[float, float, float], rows: int, sessions: int) -> float:
    itself, row, session = seconds
    return itself + row * rows + session * sessions


class OnPaper:
    """GPUs by their data sheets, as `weald bench paper` plans with them."""

    shared = False

    def __init__(self, plan: Plan, choice: Choice) -> None:
        """The machines of a plan, and the draft card and vocabulary of one of its choices."""
        served, held = plan.served, plan.step.shard
        self._head, self._choice, self._config = plan.head, choice, served.config
        self._step = plan.step
        # A step without trees sends what a plain one does for each of its rows.
        grown = (
            replace(one, size=one.size * MAX_NODES) if one.kind in ("all-reduce", "all-gather") else one
            for one in plan.step.plain
        )
        self._plain = replace(plan.step, tree=tuple(grown))
        self.pages = int(served.card.usable - held.weights) // held.page

    def step(self, rows: int, sessions: int, context: int) -> float:
        """Weights are read once for all rows, the pages of every session once for its own."""
        kind: Step = self._plain if rows == sessions else self._step
        read = replace(kind, context=context).compute(1)
        computed = replace(kind, context=context // max(1, sessions)).compute(rows)
        return max(read, computed) + kind.talk(rows, True) + kind.talk(rows, False)

    def head_pass(self, rows: int, sessions: int, context: int) -> float:
        """Likewise, on the draft card."""
        return pass_seconds(self._choice.card, self._head, self._choice.vocabulary, rows, context)

    def link(self, features: int) -> float:
        """Half of what a round's messages take, and what further features do."""
        size = features * self._config.hidden_size * DTYPE.itemsize
        return (
            link_seconds(self._config, self._choice.budget, self._choice.tau) / 2 + size / ETHERNET.bandwidth
        )


def fitted(counts: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """What each thing that was counted takes, none less than nothing: the least squares of relative errors.

    Args:
        counts: of the things, in each measurement.
        seconds: that each measurement took.
    """
    taken = np.array(seconds)
    matrix = np.array(counts) / taken[:, None]
    parts = list(range(matrix.shape[1]))
    while True:
        found = np.linalg.lstsq(matrix[:, parts], np.ones(len(taken)), rcond=None)[0]
        if (found >= 0).all():
            return [float(found[parts.index(i)]) if i in parts else 0.0 for i in range(matrix.shape[1])]
        # What would come out negative has no part in it.
        del parts[int(found.argmin())]


def pages_of(tokens: int) -> int:
    """Pages that hold so many tokens."""
    return -(-tokens // PAGE_SIZE)
