"""Growing draft trees, all sessions in one batch (EAGLE-2, arXiv 2406.16858, section 4.1).

Which nodes a level expands and which of their children are kept is the *plan*: by value for dynamic trees,
fixed beforehand for the tree of EAGLE-1 and for a chain. The loop is the same.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from services.types.errors import invalid
from services.types.tree import DraftTree

Expand = Callable[[Tensor, Tensor], Tensor]
"""One head pass: (tokens `[S, f]`, which row of the previous pass each one's parent was `[S, f]`) →
logits of the next token over the draft vocabulary `[S, f, V]`."""
Score = Callable[[int, Tensor, Tensor], Tensor]
"""(level, logits `[S, f, V]`, tokens from the root to each row `[S, f, level - 1]`) → the logarithms of the
chances of being drawn, by which children are ranked, `[S, f, V]`."""
Choose = Callable[[Tensor, int], Tensor]
"""(logarithms of chances `[S, f, V]`, k) → the k children proposed for each row, best first, `[S, f, k]`."""


class Plan(Protocol):
    """The shape of the trees to grow."""

    @property
    def levels(self) -> int:
        """D, depth in draft tokens."""

    def width(self, level: int) -> int:
        """Children to propose for each expanded node (1-based level)."""

    def kept(self, level: int, expanded: int, width: int) -> Tensor:
        """Which proposals become candidates: indices into the `expanded * width` of this level."""

    def frontier(self, level: int, log_values: Tensor) -> Tensor:
        """Which candidates of this level `[S, n]` the next one expands: indices `[S, f]`; none: the end."""


@dataclass(frozen=True, slots=True)
class DynamicPlan:
    """EAGLE-2: the `beam` candidates of highest value are expanded, each proposes `beam` children."""

    levels: int
    beam: int

    def width(self, level: int) -> int:
        """k at every level."""
        return self.beam

    def kept(self, level: int, expanded: int, width: int) -> Tensor:
        """Every proposal is a candidate."""
        return torch.arange(expanded * width)

    def frontier(self, level: int, log_values: Tensor) -> Tensor:
        """The k of highest value; among equals the earlier node."""
        return log_values.sort(dim=-1, descending=True, stable=True).indices[:, : self.beam]


class StaticPlan:
    """A shape fixed beforehand, as paths of child ranks: `(0, 1)` is the second child of the best child."""

    def __init__(self, paths: Sequence[tuple[int, ...]]) -> None:
        self.levels = max(map(len, paths))
        by_level = [[p for p in paths if len(p) == level] for level in range(1, self.levels + 1)]
        parents = [{p[:-1] for p in level} for level in by_level]
        self._width = [max(p[-1] for p in level) + 1 for level in by_level]
        self._kept: list[Tensor] = []
        self._frontier: list[Tensor] = []
        rows: dict[tuple[int, ...], int] = {(): 0}
        for level, nodes in enumerate(by_level):
            nodes.sort(key=lambda p: (rows[p[:-1]], p[-1]))
            self._kept.append(torch.tensor([[rows[p[:-1]], p[-1]] for p in nodes]).T)
            expanded = [i for i, p in enumerate(nodes) if level + 1 < self.levels and p in parents[level + 1]]
            self._frontier.append(torch.tensor(expanded, dtype=torch.long))
            rows = {nodes[i]: row for row, i in enumerate(expanded)}

    def width(self, level: int) -> int:
        """One more than the highest child rank of the level."""
        return self._width[level - 1]

    def kept(self, level: int, expanded: int, width: int) -> Tensor:
        """The nodes of the shape.

        Raises `WealdError(INVALID_ARGUMENT)` when the vocabulary is smaller than the shape is wide.
        """
        if width < self.width(level):
            raise invalid(
                f"the tree proposes {self.width(level)} children at level {level}, but the draft vocabulary "
                f"has only {width} tokens; use a chain or a dynamic tree"
            )
        rows, ranks = self._kept[level - 1].unbind()
        return rows * width + ranks

    def frontier(self, level: int, log_values: Tensor) -> Tensor:
        """The nodes of the shape that have children."""
        frontier = self._frontier[level - 1].to(log_values.device)
        return frontier.expand(log_values.shape[0], -1)


@dataclass(frozen=True, slots=True)
class Candidates:
    """Everything grown for S sessions, C candidates each, in the order of creation (breadth-first)."""

    tokens: Tensor
    """Target token ids, int64 `[S, C]`."""
    parents: Tensor
    """Index of the parent candidate, -1 for children of the root, int64 `[S, C]`."""
    log_confidences: Tensor
    """float32 `[S, C]`, at most 0: those used for ranking."""
    log_values: Tensor
    """log V, float32 `[S, C]`; a child never exceeds its parent."""
    raw: Tensor
    """Log-confidences before they were corrected, float32 `[S, C]`."""


Correct = Callable[[int, Tensor], Tensor]
"""(level, log-confidences `[S, f, k]`) → the same as they should have been, monotone in each session."""


def as_they_are(level: int, log_confidences: Tensor) -> Tensor:
    """Confidences are what the head says."""
    return log_confidences


def by_the_head(level: int, logits: Tensor, paths: Tensor) -> Tensor:
    """A token is as likely to be drawn as the head says."""
    return logits.log_softmax(-1)


def as_given(level: int, log_chances: Tensor, paths: Tensor) -> Tensor:
    """What comes in place of logits are logarithms of chances already."""
    return log_chances


def most_likely(log_chances: Tensor, k: int) -> Tensor:
    """The k most likely tokens of each row, best first."""
    return log_chances.topk(k, dim=-1).indices


def grow(
    first: Tensor,
    expand: Expand,
    plan: Plan,
    vocabulary: Tensor,
    choose: Choose = most_likely,
    correct: Correct = as_they_are,
    score: Score = by_the_head,
) -> Candidates:
    """Grow one tree for each of S sessions.

    Args:
        first: logits of level 1, float32 `[S, V]` over the draft vocabulary.
        expand: a head pass over frontier nodes; level 1 costs none, each further level one.
        plan: which nodes to expand and keep.
        vocabulary: target id of each draft token, int64 `[V]`.
        choose: how the children of a node are proposed.
        correct: what is made of confidences.
        score: what is made of the head's logits.
    """
    sessions, device = first.shape[0], first.device
    logits, paths = first[:, None], torch.empty(sessions, 1, 0, dtype=torch.long, device=device)
    frontier = torch.full((sessions, 1), -1, device=device)
    frontier_values = first.new_zeros(sessions, 1)
    grown: list[tuple[Tensor, ...]] = []
    count = 0
    for level in range(1, plan.levels + 1):
        width = min(plan.width(level), logits.shape[-1])
        chances = score(level, logits, paths)
        proposed = choose(chances, width)
        raw = chances.gather(-1, proposed).clamp(max=0)
        log_c = correct(level, raw)
        log_v = torch.minimum(frontier_values[..., None] + log_c, frontier_values[..., None])
        kept = plan.kept(level, proposed.shape[1], width).to(device)
        tokens, log_c, values, raw = (
            column.flatten(1)[:, kept] for column in (vocabulary[proposed], log_c, log_v, raw)
        )
        grown.append((tokens, frontier[:, kept // width], log_c, values, raw))
        if level == plan.levels:
            break
        chosen = plan.frontier(level, values)
        if not chosen.numel():
            break
        parents = (kept // width)[chosen]
        logits = expand(tokens.gather(1, chosen), parents)
        behind = paths.gather(1, parents[..., None].expand(-1, -1, paths.shape[-1]))
        paths = torch.cat([behind, tokens.gather(1, chosen)[..., None]], -1)
        frontier, frontier_values = chosen + count, values.gather(1, chosen)
        count += kept.numel()
    return Candidates(*(torch.cat(column, 1) for column in zip(*grown, strict=True)))


def rerank(candidates: Candidates, nodes: int) -> Tensor:
    """The `nodes` candidates of highest value over all levels, ascending indices `[S, min(nodes, C)]`.

    Ties go to the earlier candidate. A parent stands before its children and is worth no less, so the choice
    is a connected tree (EAGLE-2, section 4.2).
    """
    order = candidates.log_values.sort(dim=-1, descending=True, stable=True).indices
    return order[:, :nodes].sort(dim=-1).values


def flatten(
    candidates: Candidates, chosen: Tensor, roots: Sequence[int], least: Sequence[float] | None = None
) -> list[DraftTree]:
    """The draft trees of the chosen candidates.

    Args:
        candidates: of S sessions.
        chosen: connected, indices `[S, n]`.
        roots: root tokens `[S]`.
        least: values `[S]`; what is worth less is left out. None leaves out nothing.
    """
    log_c, log_v = candidates.log_confidences, candidates.log_values
    picked = (candidates.tokens, candidates.parents, log_c.exp(), log_v.exp())
    columns = (column.gather(1, chosen).tolist() for column in picked)
    trees = []
    bounds = least or [0.0] * len(roots)
    for root, bound, *row in zip(roots, bounds, chosen.tolist(), *columns, strict=True):
        kept = [node for node in zip(*row, strict=True) if node[-1] >= bound]
        node_of = {-1: 0} | {index: node for node, (index, *_) in enumerate(kept, 1)}
        trees.append(
            DraftTree(
                (root, *(token for _, token, *_ in kept)),
                (-1, *(node_of[parent] for _, _, parent, *_ in kept)),
                (1.0, *(confidence for *_, confidence, _ in kept)),
            )
        )
    return trees
