"""The general p/q rule for *sampled* candidates, with which the paper's baseline is measured in process.

Speculative sampling (Leviathan et al. 2023; Chen et al. 2023) with several candidates at a node, drawn
without replacement (SpecInfer, Miao et al. 2024; EAGLE, appendix). It preserves the target's distribution,
not the text of a seed: its noise is its own.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from services.types.tree import DraftTree

Chance = Callable[[float], bool]
"""True with the given probability."""
Pick = Callable[[Tensor], int]
"""An index drawn from the given distribution `[V]`."""


def sample_without_replacement(q: Tensor, k: int, pick: Pick) -> list[int]:
    """Up to `k` different tokens drawn from `q` `[V]` one after the other, in the order drawn.

    Fewer when the support of `q` is smaller.
    """
    q = q.clone()
    drawn: list[int] = []
    while len(drawn) < k and q.sum() > 0:
        q /= q.sum()
        token = pick(q)
        drawn.append(token)
        q[token] = 0
    return drawn


def accept_sampled(
    p: Tensor, q: Tensor, candidates: Sequence[int], chance: Chance, pick: Pick
) -> tuple[int, bool]:
    """The token that follows a node whose children were sampled from `q`, and whether a child carries it.

    Candidates are tried in the order they were drawn: accept `x` with `min(1, p(x)/q(x))`, else continue
    with the residual `norm(max(0, p - q))` and with `q` as it stood when the next candidate was drawn.

    Args:
        p: the target's distribution at the node, `[V]`.
        q: the head's distribution the candidates were drawn from, `[V]`.
        candidates: tokens in draw order, all of them.
    """
    q = q.clone()
    for token in candidates:
        q /= q.sum()
        residual = (p - q).clamp_(min=0)
        # No residual means p = q: acceptance is certain, whatever rounding makes of the quotient.
        if residual.sum() == 0 or chance(min(1.0, float(p[token] / q[token]))):
            return token, True
        p = residual / residual.sum()
        q[token] = 0
    return pick(p), False


def walk_sampled(
    tree: DraftTree, p: Callable[[int], Tensor], q: Callable[[int], Tensor], chance: Chance, pick: Pick
) -> tuple[tuple[int, ...], int]:
    """Walk a tree of sampled candidates: accepted nodes (root excluded) and the bonus token.

    Args:
        tree: siblings stand in the order they were drawn.
        p: node → the target's distribution after it, `[V]`.
        q: expanded node → the head's distribution its children were drawn from, `[V]`.
    """
    path: list[int] = []
    node = 0
    while children := tree.children[node]:
        token, accepted = accept_sampled(p(node), q(node), list(children), chance, pick)
        if not accepted:
            return tuple(path), token
        node = children[token]
        path.append(node)
    return tuple(path), pick(p(node))
