"""The verifier: runs the target over draft trees and commits what the target itself would have said."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from services.engine.attention import Batch, causal_segment, tree_segment
from services.engine.pages import PagePool
from services.engine.target import Target
from services.speculation.acceptance import Walk, walk
from services.speculation.sampling import Context, draw
from services.speculation.stopping import cut, end_tokens
from services.types.errors import ErrorCode, WealdError, invalid
from services.types.outcome import Outcome
from services.types.session import FinishReason, Session
from services.types.tree import MAX_NODES, DraftTree

PREFILL_CHUNK = 512
"""Prompt tokens that enter one target step."""

LookUp = Callable[[list[tuple[int, int]]], tuple[Tensor, list[Context]]]
"""(tree index, node) pairs → raw logits after each node `[R, V]`, and what precedes the token drawn."""
Rule = Callable[[Sequence[DraftTree], LookUp], list[Walk]]
"""Which path of each tree is accepted."""


def seeded_walk(forest: Sequence[DraftTree], look_up: LookUp) -> list[Walk]:
    """The rule that is served: walk where the target's own seeded draw goes."""
    return walk(forest, lambda at: draw(*look_up(at)))


@dataclass(frozen=True, slots=True)
class Verified:
    """An outcome and the features of the positions it committed."""

    outcome: Outcome
    features: Tensor
    """`[n, H]`: after `open` one for each prompt token; after a round, of the root and the accepted nodes."""


@dataclass(slots=True)
class _Running:
    session: Session
    ends: frozenset[int]
    limit: int
    """Output tokens allowed by `max_tokens` and by the context length."""
    output: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)

    @property
    def pending(self) -> int:
        """Position of the pending token: keys, values and features exist below it."""
        return len(self.session.prompt) + len(self.output) - 1

    @property
    def room(self) -> int:
        return self.limit - len(self.output)

    def context(self, path: Sequence[int] = ()) -> Context:
        session = self.session
        return Context(session.params, session.seed, session.prompt, [*self.output, *path], self.ends)


class Verifier:
    """Owns the target's pages and the committed tokens of every open session."""

    def __init__(self, target: Target, *, num_pages: int, page_size: int = 16) -> None:
        self.target = target
        self._pool = PagePool(num_pages, page_size)
        self._cache = target.new_cache(num_pages, page_size)
        self._sessions: dict[str, _Running] = {}

    @torch.inference_mode()
    def open(self, session: Session) -> Verified:
        """Prefill the prompt and draw the first token.

        Raises:
            WealdError: `ALREADY_EXISTS`, `INVALID_ARGUMENT` for tokens the target does not know,
                `CONTEXT_LENGTH_EXCEEDED`, `RESOURCE_EXHAUSTED` when too few pages are free.
        """
        self._admit(session)
        running = _Running(
            session,
            end_tokens(session.params, self.target.eos_token_ids),
            min(session.params.max_tokens, self.target.context_length - len(session.prompt)),
        )
        if running.limit == 0:
            outcome = Outcome((), (), 0, FinishReason.LENGTH)
            return Verified(outcome, self._cache.features(self._cache.slots([], 0, 0)))
        self._pool.grow(running.pages, len(session.prompt))
        self._sessions[session.id] = running
        try:
            logits = self._prefill(running)
        except BaseException:
            self.close(session.id)
            raise
        drawn = tuple(draw(logits, [running.context()]))
        tokens, finish = cut(drawn, running.room, running.ends)
        slots = self._cache.slots(running.pages, 0, len(session.prompt))
        verified = Verified(Outcome(tokens, (), 0, finish), self._cache.features(slots))
        self._commit(running, verified.outcome)
        return verified

    @torch.inference_mode()
    def verify(self, trees: Mapping[str, DraftTree], rule: Rule = seeded_walk) -> dict[str, Verified]:
        """One round for every session named: forest, target step, walk, commit.

        A tree of one node is a plain step. Nodes deeper than a session can still use are left out. `rule`
        says which path is accepted; only the in-process reference of the p/q rule replaces it.

        Raises:
            WealdError: before anything is computed, `UNKNOWN_SESSION`, `INVALID_ARGUMENT` for a tree whose
                root is not pending or whose tokens the target does not know, `RESOURCE_EXHAUSTED` when too
                few pages are free.
        """
        if not trees:
            return {}
        running = [self._expecting(id, tree) for id, tree in trees.items()]
        forest = [tree.cut(r.room - 1) for r, tree in zip(running, trees.values(), strict=True)]
        slots = [self._reserve(r, len(tree)) for r, tree in zip(running, forest, strict=True)]
        logits = self._step(forest, slots)
        walks = rule(forest, self._look_up(running, forest, logits))
        outcomes = [self._outcome(r, t, w) for r, t, w in zip(running, forest, walks, strict=True)]
        kept = self._compact(slots, outcomes)
        features = torch.split(self._cache.features(torch.cat(kept)), [len(k) for k in kept])
        for r, outcome in zip(running, outcomes, strict=True):
            self._commit(r, outcome)
        return {id: Verified(o, f) for id, o, f in zip(trees, outcomes, features, strict=True)}

    def close(self, id: str) -> None:
        """End a session and free its pages; closing one that has ended is no error."""
        if running := self._sessions.pop(id, None):
            self._pool.release(running.pages)

    def check(self) -> None:
        """Verify that every page is free or owned by exactly one session; `WealdError(INTERNAL)` if not."""
        self._pool.check(running.pages for running in self._sessions.values())

    def _admit(self, session: Session) -> None:
        if session.id in self._sessions:
            raise WealdError(ErrorCode.ALREADY_EXISTS, f"session {session.id} is already open")
        if not session.prompt:
            raise invalid("the prompt is empty; give at least one token")
        named = (*session.prompt, *session.params.logit_bias, *session.params.stop_token_ids)
        self._know(named)
        if len(session.prompt) >= self.target.context_length:
            raise WealdError(
                ErrorCode.CONTEXT_LENGTH_EXCEEDED,
                f"the prompt has {len(session.prompt)} tokens and the target's context is "
                f"{self.target.context_length}; shorten the prompt to leave room for the answer",
            )

    def _know(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if not 0 <= token < self.target.vocab_size:
                raise invalid(f"token {token} is not in the target's vocabulary of {self.target.vocab_size}")

    def _expecting(self, id: str, tree: DraftTree) -> _Running:
        running = self._sessions.get(id)
        if running is None:
            raise WealdError(ErrorCode.UNKNOWN_SESSION, f"session {id} is not open; open it first")
        if tree.tokens[0] != running.output[-1]:
            raise invalid(
                f"the tree's root is token {tree.tokens[0]}, the pending token of session {id} is "
                f"{running.output[-1]}"
            )
        self._know(tree.tokens)
        return running

    def _reserve(self, running: _Running, nodes: int) -> Tensor:
        self._pool.grow(running.pages, running.pending + nodes)
        return self._cache.slots(running.pages, 0, running.pending + nodes)

    def _prefill(self, running: _Running) -> Tensor:
        prompt, device = running.session.prompt, self.target.device
        for start in range(0, len(prompt), PREFILL_CHUNK):
            end = min(start + PREFILL_CHUNK, len(prompt))
            segment = causal_segment(self._cache.slots(running.pages, 0, end), end - start)
            last = torch.arange(end - start - (end == len(prompt)), end - start, device=device)
            tokens = torch.tensor(prompt[start:end], device=device)
            logits = self.target.forward(tokens, Batch([segment], self._cache), last)
        return logits

    def _step(self, forest: Sequence[DraftTree], slots: Sequence[Tensor]) -> Tensor:
        """Logits `[N, V]` of all nodes of the forest, tree after tree."""
        segments = [tree_segment(s, tree) for s, tree in zip(slots, forest, strict=True)]
        tokens = torch.tensor([t for tree in forest for t in tree.tokens], device=self.target.device)
        rows = torch.arange(tokens.numel(), device=self.target.device)
        return self.target.forward(tokens, Batch(segments, self._cache), rows)

    def _look_up(self, running: Sequence[_Running], forest: Sequence[DraftTree], logits: Tensor) -> LookUp:
        first = [0]
        for tree in forest:
            first.append(first[-1] + len(tree))

        def look_up(at: list[tuple[int, int]]) -> tuple[Tensor, list[Context]]:
            paths = [[forest[i].tokens[n] for n in forest[i].path(node)] for i, node in at]
            contexts = [running[i].context(path) for (i, _), path in zip(at, paths, strict=True)]
            return logits[[first[i] + node for i, node in at]], contexts

        return look_up

    def _outcome(self, running: _Running, tree: DraftTree, walk: Walk) -> Outcome:
        said = (*(tree.tokens[node] for node in walk.path), walk.bonus)
        tokens, finish = cut(said, running.room, running.ends)
        return Outcome(tokens, walk.path[: len(tokens)], len(tree), finish)

    def _compact(self, slots: Sequence[Tensor], outcomes: Sequence[Outcome]) -> list[Tensor]:
        """Move accepted nodes next to their prefix; gives the slots of root and accepted nodes."""
        kept, sources, destinations = [], [], []
        for table, outcome in zip(slots, outcomes, strict=True):
            tree = table[-outcome.verified :]
            kept.append(tree[: len(outcome.accepted) + 1])
            for destination, node in enumerate(outcome.accepted, 1):
                if node != destination:
                    sources.append(tree[node])
                    destinations.append(tree[destination])
        if sources:
            self._cache.move(torch.stack(sources), torch.stack(destinations))
        return kept

    def _commit(self, running: _Running, outcome: Outcome) -> None:
        running.output.extend(outcome.tokens)
        if outcome.finish:
            self.close(running.session.id)


def pages_for(tokens: int, page_size: int = 16) -> int:
    """Pages that hold a session of so many tokens and the largest tree behind it."""
    return -(-(tokens + MAX_NODES) // page_size)
