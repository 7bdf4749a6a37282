"""Drafter and verifier linked in one process: the plain twin of every fast path."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from services.types.outcome import Outcome
from services.types.session import Session
from services.types.tree import DraftTree
from services.verify.verifier import Verified, Verifier


class TreeSource(Protocol):
    """What proposes trees: a drafter, or a stand-in that knows more."""

    def open(self, id: str, tokens: Sequence[int]) -> int:
        """Begin a session with its committed tokens; the first position whose feature is needed."""

    def advance(self, id: str, tokens: Sequence[int], features: Tensor) -> None:
        """Tell tokens that were committed since, and the features of further positions."""

    def propose(self, ids: Sequence[str]) -> list[DraftTree]:
        """One tree for each session, when all features below its pending token are there."""

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


def decode(verifier: Verifier, drafter: TreeSource | None, sessions: Sequence[Session]) -> Iterator[Step]:
    """Decode sessions in one batch, round after round, until each is finished.

    Without a drafter every step is a plain one. Leaving the iterator early closes what is open.

    Raises:
        WealdError: as `Verifier.open` does; nothing stays open.
    """
    opened: list[str] = []
    pending: dict[str, int] = {}
    try:
        for session in sessions:
            started = time.perf_counter()
            first = verifier.open(session)
            opened.append(session.id)
            yield Step(session.id, None, first.outcome, 0.0, time.perf_counter() - started)
            if first.outcome.finish:
                continue
            known = (*session.tokens, *first.outcome.tokens)
            needed = drafter.open(session.id, known) if drafter else 0
            pending[session.id] = known[-1]
            if drafter:
                drafter.advance(session.id, (), first.features[needed:])
        while pending:
            started = time.perf_counter()
            trees = _propose(drafter, pending)
            drafted = time.perf_counter()
            results = verifier.verify(trees)
            verified = time.perf_counter()
            for id, result in results.items():
                _advance(drafter, pending, id, result)
                yield Step(id, trees[id], result.outcome, drafted - started, verified - drafted)
    finally:
        for id in opened:
            verifier.close(id)
        for id in pending:
            if drafter:
                drafter.close(id)


def _propose(drafter: TreeSource | None, pending: dict[str, int]) -> dict[str, DraftTree]:
    if drafter is None:
        return {id: DraftTree.root(token) for id, token in pending.items()}
    return dict(zip(pending, drafter.propose(list(pending)), strict=True))


def _advance(drafter: TreeSource | None, pending: dict[str, int], id: str, result: Verified) -> None:
    outcome = result.outcome
    if outcome.finish:
        del pending[id]
        if drafter:
            drafter.close(id)
        return
    pending[id] = outcome.tokens[-1]
    if drafter:
        drafter.advance(id, outcome.tokens, result.features)
