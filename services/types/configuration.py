"""How trees are drafted."""

from dataclasses import dataclass
from enum import StrEnum

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


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """Sizes of the draft trees; the defaults are the paper's for 7B and 8B targets.

    Raises `WealdError(INVALID_ARGUMENT)` on construction when a size is out of range.
    """

    shape: TreeShape = TreeShape.DYNAMIC
    levels: int = 6
    """D: depth of a tree in draft tokens."""
    beam: int = 10
    """k: nodes expanded per level, and children proposed per expanded node."""
    budget: int = 60
    """m: nodes of a tree, root included."""

    def __post_init__(self) -> None:
        if self.levels < 1:
            raise invalid(f"a tree needs at least 1 level, got {self.levels}")
        if self.beam < 1:
            raise invalid(f"the beam must be at least 1, got {self.beam}")
        if not 1 <= self.budget <= MAX_NODES:
            raise invalid(f"the tree budget must be in [1, {MAX_NODES}], got {self.budget}")
