"""The draft tree: the candidates of one session for one round (EAGLE-2, arXiv 2406.16858, section 4)."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from services.types.errors import invalid

MAX_NODES = 64
"""Nodes of a tree at most, root included: a node's ancestors are one 64-bit word."""


@dataclass(frozen=True)
class DraftTree:
    """Candidate tokens flattened breadth-first. Node 0 is the pending token, the root.

    Raises `WealdError(INVALID_ARGUMENT)` on construction when the arrays are not a tree.
    """

    tokens: tuple[int, ...]
    """Token of each node, `[n]`."""
    parents: tuple[int, ...]
    """Index of each node's parent, `[n]`; -1 for the root, else smaller than the node's own."""
    confidences: tuple[float, ...]
    """The head's probability of each node's token given its path, `[n]`, in [0, 1]; 1 for the root."""

    def __post_init__(self) -> None:
        n = len(self.tokens)
        if not 1 <= n <= MAX_NODES:
            raise invalid(f"a draft tree has 1 to {MAX_NODES} nodes, got {n}")
        if len(self.parents) != n or len(self.confidences) != n:
            raise invalid(
                f"a tree of {n} tokens needs as many parents and confidences, "
                f"got {len(self.parents)} and {len(self.confidences)}"
            )
        if self.parents[0] != -1:
            raise invalid(f"node 0 is the root, its parent must be -1, got {self.parents[0]}")
        for i in range(1, n):
            if not 0 <= self.parents[i] < i:
                raise invalid(f"node {i} needs a parent in [0, {i}), got {self.parents[i]}")
        if len(set(zip(self.parents, self.tokens, strict=True))) != n:
            raise invalid("siblings of a draft tree must carry different tokens")
        if any(self.depths[i] < self.depths[i - 1] for i in range(1, n)):
            raise invalid("nodes of a draft tree must be in breadth-first order")
        if not all(0.0 <= c <= 1.0 for c in self.confidences):
            raise invalid("confidences of a draft tree must be in [0, 1]")

    @classmethod
    def root(cls, token: int) -> "DraftTree":
        """The tree of one node: verifying it is a plain step."""
        return cls((token,), (-1,), (1.0,))

    @classmethod
    def chain(cls, tokens: Sequence[int], confidences: Sequence[float] | None = None) -> "DraftTree":
        """A tree with one path, root first."""
        n = len(tokens)
        return cls(tuple(tokens), tuple(range(-1, n - 1)), tuple(confidences or (1.0,) * n))

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Edges between the root and each node, `[n]`."""
        depths = [0] * len(self.parents)
        for i in range(1, len(depths)):
            depths[i] = depths[self.parents[i]] + 1
        return tuple(depths)

    @cached_property
    def values(self) -> tuple[float, ...]:
        """V: product of confidences from the root to each node, `[n]` (EAGLE-2, section 4.1)."""
        values = list(self.confidences)
        for i in range(1, len(values)):
            values[i] *= values[self.parents[i]]
        return tuple(values)

    @cached_property
    def ancestors(self) -> tuple[int, ...]:
        """Bit j of word i is set when j is i or an ancestor of i, `[n]`, unsigned 64 bits."""
        words = [1] * len(self.parents)
        for i in range(1, len(words)):
            words[i] = words[self.parents[i]] | 1 << i
        return tuple(words)

    @cached_property
    def children(self) -> tuple[dict[int, int], ...]:
        """For each node, its children as token → node index, `[n]`."""
        children: list[dict[int, int]] = [{} for _ in self.parents]
        for i in range(1, len(children)):
            children[self.parents[i]][self.tokens[i]] = i
        return tuple(children)

    def path(self, node: int) -> tuple[int, ...]:
        """Node indices from the root's child down to `node`; empty for the root."""
        path: list[int] = []
        while node > 0:
            path.append(node)
            node = self.parents[node]
        return tuple(reversed(path))

    def cut(self, depth: int) -> "DraftTree":
        """The connected tree of all nodes at most `depth` edges below the root."""
        if self.depths[-1] <= depth:
            return self
        n = sum(d <= depth for d in self.depths)
        return DraftTree(self.tokens[:n], self.parents[:n], self.confidences[:n])

    def keep(self, nodes: Sequence[int]) -> "DraftTree":
        """The tree of the given nodes only: ascending indices, 0 first, each with its parent."""
        if len(nodes) == len(self):
            return self
        index = {node: i for i, node in enumerate(nodes)}
        parents = (-1, *(index[self.parents[node]] for node in nodes[1:]))
        return DraftTree(
            tuple(self.tokens[n] for n in nodes), parents, tuple(self.confidences[n] for n in nodes)
        )
