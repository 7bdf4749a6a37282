"""The walk: which path of a draft tree the target would have said (DESIGN section 4)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.types.tree import DraftTree

Draw = Callable[[list[tuple[int, int]]], list[int]]
"""Given (tree index, node) pairs, the token the target draws after each node."""


@dataclass(frozen=True, slots=True)
class Walk:
    """Where the target went in one tree."""

    path: tuple[int, ...]
    """Accepted nodes, root excluded."""
    bonus: int
    """The token drawn after the last accepted node: no child carries it."""


def walk(trees: Sequence[DraftTree], draw: Draw) -> list[Walk]:
    """Walk every tree from its root, one level at a time for all trees together.

    At each node the target draws `t ~ p`; a child that carries `t` is accepted and the walk goes on there,
    else `t` is the bonus token. A child `x` is thus accepted with probability `p(x)`: the rule
    `min(1, p/q)` for the point-mass proposals that a tree fixed beforehand makes.
    """
    paths: list[list[int]] = [[] for _ in trees]
    bonus = [0] * len(trees)
    going = [(tree, 0) for tree in range(len(trees))]
    while going:
        moved: list[tuple[int, int]] = []
        for (tree, node), token in zip(going, draw(going), strict=True):
            child = trees[tree].children[node].get(token)
            if child is None:
                bonus[tree] = token
            else:
                paths[tree].append(child)
                moved.append((tree, child))
        going = moved
    return [Walk(tuple(path), token) for path, token in zip(paths, bonus, strict=True)]
