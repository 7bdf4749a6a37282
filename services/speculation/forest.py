"""Forest rank: the trees of all sessions in a step compete for its places (DESIGN section 3, step 4)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.types.tree import DraftTree


@dataclass(frozen=True, slots=True)
class Entry:
    """A session's tree in the forest."""

    tree: DraftTree
    weight: float = 1.0
    """What a token of the session is worth."""
    priced: bool = False
    """Whether its nodes have to be worth their time; otherwise they only compete for the places."""


Worth = Callable[[Sequence[float], int], int]
"""(gains of draft nodes, best first; rows of the step besides them) → how many are worth their time."""


def rank(forest: Sequence[Entry], budget: int, worth: Worth | None = None) -> list[tuple[int, ...]]:
    """Which nodes of each tree are verified: its root, and the best draft nodes over the forest.

    Best is of highest value V, times the weight of its session; ties go to the shallower, then the earlier
    node. V never rises along a path, so what is kept of each tree is connected.

    Args:
        forest: an entry for each session.
        budget: M, draft nodes over all trees at most, roots not counted.
        worth: asked of the nodes that are priced and would have a place.

    Returns:
        For each tree the node indices kept, ascending, 0 first.
    """
    ranked = sorted(
        (-entry.weight * entry.tree.values[node], entry.tree.depths[node], i, node)
        for i, entry in enumerate(forest)
        for node in range(1, len(entry.tree))
    )
    places = min(max(0, budget), len(ranked))
    gains = [-gain for gain, _, i, _ in ranked[:places] if forest[i].priced]
    paying = worth(gains, len(forest) + places - len(gains)) if worth else len(gains)
    kept: list[list[int]] = [[0] for _ in forest]
    for *_, i, node in ranked:
        if not places:
            break
        if forest[i].priced:
            if not paying:
                # Its place goes to the next tree that has no price.
                continue
            paying -= 1
        kept[i].append(node)
        places -= 1
    return [tuple(sorted(nodes)) for nodes in kept]
