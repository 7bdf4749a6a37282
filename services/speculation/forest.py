"""Forest rank: the trees of all sessions in a step compete for its places (DESIGN section 3, step 4)."""

from collections.abc import Sequence

from services.types.tree import DraftTree


def rank(forest: Sequence[DraftTree], budget: int) -> list[tuple[int, ...]]:
    """Which nodes of each tree are verified: its root, and the `budget` best draft nodes over the forest.

    Best is of highest value V; ties go to the shallower, then the earlier node. V never rises along a path,
    so what is kept of each tree is connected.

    Args:
        forest: trees, one for each session.
        budget: M, draft nodes over all trees, roots not counted.

    Returns:
        For each tree the node indices kept, ascending, 0 first.
    """
    if sum(len(tree) - 1 for tree in forest) <= budget:
        return [tuple(range(len(tree))) for tree in forest]
    draft = [
        (-tree.values[node], tree.depths[node], i, node)
        for i, tree in enumerate(forest)
        for node in range(1, len(tree))
    ]
    kept: list[list[int]] = [[0] for _ in forest]
    for *_, i, node in sorted(draft)[: max(0, budget)]:
        kept[i].append(node)
    return [tuple(sorted(nodes)) for nodes in kept]
