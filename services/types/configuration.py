"""How trees are drafted, what a replica takes on, and where it serves."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Literal

from services.types.errors import invalid
from services.types.tree import MAX_NODES


class TreeShape(StrEnum):
    """The shape a drafter gives its trees."""

    DYNAMIC = "dynamic"
    """Grown by value and reranked (EAGLE-2)."""
    STATIC = "static"
    """The fixed tree of EAGLE-1, 25 draft nodes."""
    CHAIN = "chain"
    """One path of the most likely tokens."""


class Priority(StrEnum):
    """What a request prefers where sessions compete for the target's time."""

    LATENCY = "latency"
    NORMAL = "normal"
    THROUGHPUT = "throughput"

    @property
    def weight(self) -> float:
        """What a token of such a session is worth."""
        return {Priority.LATENCY: 2.0, Priority.NORMAL: 1.0, Priority.THROUGHPUT: 0.5}[self]


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """Sizes of the draft trees; the defaults are the paper's for 7B and 8B targets.

    An adaptive size is what a tree has at most: it gets what is worth its time.

    Raises `WealdError(INVALID_ARGUMENT)` on construction when a size is out of range.
    """

    shape: TreeShape = TreeShape.DYNAMIC
    levels: int = 6
    """D: depth of a tree in draft tokens."""
    beam: int = 10
    """k: nodes expanded per level, and children proposed per expanded node."""
    budget: int = 60
    """m: nodes of a tree, root included."""
    adaptive_levels: bool = False
    """Whether levels, and nodes expanded in them, are worth a head pass or are not grown."""
    adaptive_budget: bool = False
    """Whether trees and their nodes are worth the target's time, or else are not wanted, or not verified."""
    coupled: bool = True
    """Whether candidates are ranked by the noise that the target will draw with, at temperatures above 0."""

    def __post_init__(self) -> None:
        if self.levels < 1:
            raise invalid(f"a tree needs at least 1 level, got {self.levels}")
        if self.beam < 1:
            raise invalid(f"the beam must be at least 1, got {self.beam}")
        if not 1 <= self.budget <= MAX_NODES:
            raise invalid(f"the tree budget must be in [1, {MAX_NODES}], got {self.budget}")


@dataclass(frozen=True, slots=True)
class Tracing:
    """Where spans go; nowhere by default."""

    file: Path | None = None
    """Appended to."""
    endpoint: str = ""
    """Of an OpenTelemetry collector."""
    ratio: float = 1.0
    """Of the requests that come without a trace, those that are sampled."""
    content: bool = False
    """Whether spans hold token ids, of which the text can be read."""

    def __post_init__(self) -> None:
        if not 0 <= self.ratio <= 1:
            raise invalid(f"the share of requests that are traced is {self.ratio:g}; choose one of 0 to 1")


AUTO_LEVELS, AUTO_BUDGET = 8, MAX_NODES
"""What adaptive trees have at most."""


def sized(
    shape: TreeShape,
    levels: int | Literal["auto"],
    beam: int,
    budget: int | Literal["auto"],
    coupled: bool = True,
) -> DraftConfig:
    """Trees of these sizes, of which levels and budget can be `auto`: what is worth its time.

    Raises:
        WealdError: `INVALID_ARGUMENT` when a size is out of range.
    """
    return DraftConfig(
        shape,
        AUTO_LEVELS if levels == "auto" else levels,
        beam,
        AUTO_BUDGET if budget == "auto" else budget,
        adaptive_levels=levels == "auto",
        adaptive_budget=budget == "auto",
        coupled=coupled,
    )


@dataclass(frozen=True, slots=True)
class VerifyLimits:
    """What a verify replica takes on at once.

    Raises `WealdError(INVALID_ARGUMENT)` on construction when a limit is out of range.
    """

    max_num_batched_tokens: int = 2048
    """Tokens of one target step: tree nodes and prefill chunks of all sessions."""
    max_num_seqs: int = 64
    """Sessions that run at once; further ones wait."""
    max_waiting: int = 256
    """Sessions that wait at most; further ones are refused with a hint when to retry."""
    expiry_s: float = 30.0
    """Seconds after which the sessions of a vanished drafter are dropped."""

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1:
            raise invalid(f"max_num_seqs must be at least 1, got {self.max_num_seqs}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise invalid(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): every running session has a token in a step"
            )
        if self.max_waiting < 0:
            raise invalid(f"max_waiting must not be negative, got {self.max_waiting}")
        if self.expiry_s <= 0:
            raise invalid(f"the expiry must be above 0 seconds, got {self.expiry_s}")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a replica serves, where others find it, and how it leaves.

    Raises `WealdError(INVALID_ARGUMENT)` on construction when the seconds are out of range.
    """

    host: str = "127.0.0.1"
    """Address to listen at."""
    port: int = 0
    """0 takes a free one."""
    advertised: str | None = None
    """Host, or host:port, at which others reach it; None: as it listens."""
    drain_s: float = 30.0
    """How long sessions may go on at shutdown."""
    node: str = ""
    """Name of the machine, for whoever lists the replicas."""
    metrics_port: int | None = None
    """Where Prometheus can ask; 0 takes a free one, None: nowhere."""

    def __post_init__(self) -> None:
        if self.drain_s < 0:
            raise invalid(f"the time to drain must not be negative, got {self.drain_s}")

    def address(self, port: int) -> str:
        """host:port at which others reach the replica that listens at `port`."""
        named = self.advertised or self.host
        with_port = named.count(":") == 1 or "]:" in named
        return named if with_port else f"{named}:{port}"

    def metrics(self, port: int) -> str:
        """host:port where Prometheus can ask the replica that answers it at `port`."""
        return f"{self.address(0).rpartition(':')[0]}:{port}"
