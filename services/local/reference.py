"""Decoding by the general p/q rule with sampled candidates: the paper's baseline, measured in process.

It serves the target's distribution, but not the text of a seed: it draws from a generator of its own.
"""

import time
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from services.draft.drafter import Drafter
from services.engine.head import EagleHead
from services.local.decoder import Step
from services.speculation.acceptance import Walk
from services.speculation.rejection import walk_sampled
from services.speculation.sampling import process
from services.types.configuration import DraftConfig
from services.types.session import Session
from services.types.tree import DraftTree
from services.verify.verifier import LookUp, Verifier, pages_for


def decode_sampled(
    verifier: Verifier, head: EagleHead, config: DraftConfig, session: Session
) -> Iterator[Step]:
    """Decode one session with candidates sampled from the head at the session's temperature, above 0.

    Args:
        verifier: its own walk is replaced by the p/q rule.
        head: the draft head.
        config: a chain or static shape.
        session: its seed seeds the generator of candidates and acceptance.
    """
    rule = _SampledRule(session, head.vocabulary, verifier.target.vocab_size)
    pages = pages_for(len(session.prompt) + session.params.max_tokens)
    drafter = Drafter(head, config, num_pages=pages, choose=rule.choose)
    started = time.perf_counter()
    result = verifier.open(session)
    try:
        yield Step(session.id, None, result.outcome, 0.0, time.perf_counter() - started)
        needed = drafter.open(session.id, (*session.tokens, *result.outcome.tokens))
        drafter.advance(session.id, (), result.features[needed:])
        while result.outcome.finish is None:
            started = time.perf_counter()
            (tree,) = drafter.propose([session.id])
            drafted = time.perf_counter()
            result = verifier.verify({session.id: tree}, rule.accept)[session.id]
            verified = time.perf_counter()
            drafter.advance(session.id, result.outcome.tokens, result.features)
            yield Step(session.id, tree, result.outcome, drafted - started, verified - drafted)
    finally:
        verifier.close(session.id)


class _SampledRule:
    """Remembers the distributions that one tree's candidates were drawn from until the tree is verified."""

    def __init__(self, session: Session, vocabulary: Tensor, vocab_size: int) -> None:
        self._temperature = session.params.temperature
        self._generator = torch.Generator().manual_seed(session.seed % (1 << 63))
        self._vocabulary = vocabulary
        self._vocab_size = vocab_size
        self._drawn_from: list[Tensor] = []

    def choose(self, log_probs: Tensor, k: int) -> Tensor:
        """Draw k children of each row without replacement, in draw order: `Choose` of growth.

        Adding Gumbel noise and taking the k best is drawing one after the other (Gumbel-top-k).
        """
        tempered = (log_probs.double() / self._temperature).log_softmax(-1)
        self._drawn_from.extend(tempered[0].exp())
        uniform = torch.rand(tempered.shape, generator=self._generator, dtype=torch.float64)
        return (tempered.cpu() - (-uniform.log()).log()).topk(k, dim=-1).indices.to(log_probs.device)

    def accept(self, forest: Sequence[DraftTree], look_up: LookUp) -> list[Walk]:
        """`Rule` of the verifier for a forest of one tree."""
        (tree,) = forest
        # Nodes were expanded, and their distributions remembered, breadth-first. A tree cut at the end of a
        # text has lost the deepest.
        expanded = (node for node, children in enumerate(tree.children) if children)
        q = dict(zip(expanded, self._drawn_from, strict=False))
        path, bonus = walk_sampled(
            tree,
            lambda node: process(*look_up([(0, node)]))[0].double().softmax(-1),
            lambda node: self._spread(q[node]),
            self._chance,
            self._pick,
        )
        self._drawn_from.clear()
        return [Walk(path, bonus)]

    def _spread(self, q: Tensor) -> Tensor:
        over_all = torch.zeros(self._vocab_size, dtype=q.dtype, device=q.device)
        over_all[self._vocabulary] = q
        return over_all

    def _chance(self, probability: float) -> bool:
        return bool(torch.rand((), generator=self._generator, dtype=torch.float64) < probability)

    def _pick(self, distribution: Tensor) -> int:
        return int(torch.multinomial(distribution.cpu(), 1, generator=self._generator))
