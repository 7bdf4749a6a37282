"""Drafter and verifier linked in one process: the plain twin of every fast path."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from services.draft.drafter import Terms
from services.speculation.budget import Budget, Offer, Prospect
from services.speculation.coupling import LIKELIEST, Drawing
from services.speculation.forest import Entry, rank
from services.types.configuration import DraftConfig
from services.types.outcome import Outcome
from services.types.session import Session
from services.types.tree import DraftTree
from services.verify.verifier import Verified, Verifier


class TreeSource(Protocol):
    """What proposes trees: a drafter, or a stand-in that knows more."""

    def open(
        self, id: str, tokens: Sequence[int], config: DraftConfig | None = None, drawing: Drawing = LIKELIEST
    ) -> int:
        """Begin a session with its committed tokens; the first position whose feature is needed."""

    def advance(self, id: str, tokens: Sequence[int], features: Tensor) -> None:
        """Tell tokens that were committed since, and the features of further positions."""

    def propose(self, ids: Sequence[str], terms: Mapping[str, Terms] | None = None) -> list[DraftTree]:
        """One tree for each session, when all features below its pending token are there."""

    def learn(self, id: str, nodes: int, accepted: Sequence[int]) -> int:
        """Take in what became of a session's last tree: which nodes were verified, which accepted."""

    def close(self, id: str) -> None:
        """End a session."""


@dataclass(frozen=True, slots=True)
class Step:
    """What one step did for one session. The first has no tree: it is the prefill's token."""

    session: str
    tree: DraftTree | None
    outcome: Outcome
    draft_s: float
    """Seconds the drafter took, for all sessions of the step."""
    verify_s: float
    """Seconds the verifier took, for all sessions of the step."""


@dataclass(slots=True)
class _Decoding:
    """A session that goes on."""

    pending: int
    """Its pending token."""
    offer: Offer
    streak: int = 0
    """Trees that it wanted in a row."""
    prospect: Prospect = field(default_factory=Prospect)


def decode(
    verifier: Verifier,
    drafter: TreeSource | None,
    sessions: Sequence[Session],
    budget: Budget | None = None,
) -> Iterator[Step]:
    """Decode sessions in one batch, round after round, until each is finished.

    Without a drafter every step is a plain one; with a budget, trees and their nodes have to be worth their
    time. Leaving the iterator early closes what is open.

    Raises:
        WealdError: as `Verifier.open` does; nothing stays open.
    """
    opened: list[str] = []
    going: dict[str, _Decoding] = {}
    first = Offer(drafter is not None and budget is None, 0.0, 0.0)
    try:
        for session in sessions:
            started = time.perf_counter()
            result = verifier.open(session)
            opened.append(session.id)
            yield Step(session.id, None, result.outcome, 0.0, time.perf_counter() - started)
            if result.outcome.finish:
                continue
            known = (*session.tokens, *result.outcome.tokens)
            drawing = Drawing(session.params, session.seed, len(session.prompt))
            needed = drafter.open(session.id, known, None, drawing) if drafter else 0
            going[session.id] = _Decoding(known[-1], first)
            if drafter:
                drafter.advance(session.id, (), result.features[needed:])
        while going:
            started = time.perf_counter()
            proposed = _propose(drafter, going)
            drafted = time.perf_counter()
            kept = _worth(budget, proposed)
            trees = {id: tree.keep(kept[id]) for id, tree in proposed.items()}
            results = verifier.verify(trees)
            ended = time.perf_counter()
            if drafter and budget:
                _account(budget, going, proposed, trees, results, (started, drafted, ended))
            for id, result in results.items():
                _advance(drafter, going, id, kept[id], result)
                yield Step(id, trees[id], result.outcome, drafted - started, ended - drafted)
    finally:
        for id in opened:
            verifier.close(id)
        for id in going:
            if drafter:
                drafter.close(id)


def _propose(drafter: TreeSource | None, going: Mapping[str, _Decoding]) -> dict[str, DraftTree]:
    trees = {id: DraftTree.root(session.pending) for id, session in going.items()}
    wanting = {id: Terms(s.offer.price, s.offer.pace) for id, s in going.items() if s.offer.wanted}
    if drafter and wanting:
        trees.update(zip(wanting, drafter.propose(list(wanting), wanting), strict=True))
    return trees


def _worth(budget: Budget | None, trees: Mapping[str, DraftTree]) -> dict[str, tuple[int, ...]]:
    """The nodes of each tree that are to be verified."""
    if budget is None:
        return {id: tuple(range(len(tree))) for id, tree in trees.items()}
    forest = [Entry(tree, priced=True) for tree in trees.values()]
    return dict(zip(trees, rank(forest, sum(map(len, trees.values())), budget.nodes), strict=True))


def _account(
    budget: Budget,
    going: Mapping[str, _Decoding],
    proposed: Mapping[str, DraftTree],
    trees: Mapping[str, DraftTree],
    results: Mapping[str, Verified],
    times: tuple[float, float, float],
) -> None:
    """Enter a round in the books, and decide who is to have a tree in the next."""
    started, drafted, ended = times
    rows = sum(map(len, trees.values()))
    budget.cost.observe(rows, ended - drafted)
    budget.stepped(started, ended, sum(len(result.outcome.tokens) for result in results.values()))
    for id, result in results.items():
        session = going[id]
        if session.offer.wanted:
            budget.waited(drafted - started, first=session.streak == 1)
            budget.verified(session.prospect, proposed[id], trees[id], len(result.outcome.accepted))
        session.offer = budget.offer(session.prospect, 1.0, len(going), session.streak)
        session.streak = session.streak + 1 if session.offer.wanted else 0


def _advance(
    drafter: TreeSource | None,
    going: dict[str, _Decoding],
    id: str,
    kept: Sequence[int],
    result: Verified,
) -> None:
    outcome = result.outcome
    if outcome.finish:
        del going[id]
        if drafter:
            drafter.close(id)
        return
    going[id].pending = outcome.tokens[-1]
    if drafter:
        if len(kept) > 1:
            nodes = kept[: outcome.verified]
            drafter.learn(id, sum(1 << node for node in nodes), [nodes[node] for node in outcome.accepted])
        drafter.advance(id, outcome.tokens, result.features)
