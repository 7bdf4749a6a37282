"""The drafter: extends the head with true features, grows draft trees and reranks them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from services.engine.attention import Batch, Segment, causal_segment
from services.engine.head import EagleHead
from services.engine.pages import PagePool
from services.speculation.growth import Candidates, Choose, flatten, grow, most_likely, rerank
from services.speculation.shapes import plan_for
from services.types.configuration import DraftConfig, TreeShape
from services.types.errors import ErrorCode, WealdError
from services.types.tree import DraftTree

EXTEND_CHUNK = 512
"""Entries of one session that enter one head pass."""


@dataclass(slots=True)
class _Drafting:
    pending: int
    """The pending token, the root of the next tree."""
    features: Tensor
    """feature[i] of the entries to be extended, `[n, H]`."""
    tokens: list[int]
    """x[i+1] of the entries to be extended, `[n]`."""
    pages: list[int] = field(default_factory=list)
    entries: int = 0
    """True entries in the head's cache: i pairs feature[i] with x[i+1]. Scratch entries stand behind them."""
    root: Tensor | None = None
    """The feature predicted for the pending token's position, `[H]`."""


class Drafter:
    """Owns the head's pages and what it has been told of every open session."""

    def __init__(
        self,
        head: EagleHead,
        config: DraftConfig,
        *,
        num_pages: int,
        page_size: int = 16,
        choose: Choose = most_likely,
    ) -> None:
        """Draft with `head`; `choose` proposes the children of a node (the sampled reference replaces it)."""
        self.head = head
        self.config = config
        self._plan = plan_for(config)
        self._choose = choose
        self._pool = PagePool(num_pages, page_size)
        self._cache = head.new_cache(num_pages, page_size)
        self._sessions: dict[str, _Drafting] = {}

    def open(self, id: str, tokens: Sequence[int], features: Tensor) -> None:
        """Begin a session.

        Args:
            id: the session's id.
            tokens: committed tokens `x[0..L]`, the pending one last.
            features: of the positions below it, `[L, H]`.

        Raises:
            WealdError: `ALREADY_EXISTS`.
        """
        if id in self._sessions:
            raise WealdError(ErrorCode.ALREADY_EXISTS, f"session {id} is already open")
        self._sessions[id] = _Drafting(tokens[-1], features, list(tokens[1:]))

    def advance(self, id: str, tokens: Sequence[int], features: Tensor) -> None:
        """Tell what a round committed: its tokens, and the features of root and accepted nodes, `[n, H]`.

        Raises:
            WealdError: `UNKNOWN_SESSION`.
        """
        state = self._session(id)
        state.pending = tokens[-1]
        state.tokens.extend(tokens)
        state.features = torch.cat([state.features, features])

    @torch.inference_mode()
    def propose(self, ids: Sequence[str]) -> list[DraftTree]:
        """One draft tree for each session: extend, grow, rerank.

        Raises:
            WealdError: `UNKNOWN_SESSION`, `RESOURCE_EXHAUSTED` when too few pages are free.
        """
        sessions = [self._session(id) for id in ids]
        if not sessions:
            return []
        while waiting := [state for state in sessions if state.tokens]:
            self._extend(waiting)
        candidates = self._grow(sessions)
        return flatten(candidates, self._rerank(candidates), [state.pending for state in sessions])

    def close(self, id: str) -> None:
        """End a session and free its pages; closing one that has ended is no error."""
        if state := self._sessions.pop(id, None):
            self._pool.release(state.pages)

    def check(self) -> None:
        """Verify that every page is free or owned by exactly one session; `WealdError(INTERNAL)` if not."""
        self._pool.check(state.pages for state in self._sessions.values())

    def _session(self, id: str) -> _Drafting:
        state = self._sessions.get(id)
        if state is None:
            raise WealdError(ErrorCode.UNKNOWN_SESSION, f"session {id} is not open; open it first")
        return state

    def _extend(self, waiting: Sequence[_Drafting]) -> None:
        """Append true entries for positions committed since the last round, a chunk of each session."""
        segments, tokens, features = [], [], []
        for state in waiting:
            count = min(EXTEND_CHUNK, len(state.tokens))
            end = state.entries + count
            self._pool.grow(state.pages, end)
            segments.append(causal_segment(self._cache.slots(state.pages, 0, end), count))
            tokens += state.tokens[:count]
            features.append(state.features[:count])
        predicted = self.forward(
            torch.cat(features), torch.tensor(tokens, device=features[0].device), segments
        )
        # Only now is it extended: a round that fails before, for want of pages, can be tried again.
        last = -1
        for state, segment in zip(waiting, segments, strict=True):
            last += segment.rows
            state.root = predicted[last]
            state.entries += segment.rows
            state.tokens = state.tokens[segment.rows :]
            state.features = state.features[segment.rows :]

    def _grow(self, sessions: Sequence[_Drafting]) -> Candidates:
        roots = torch.stack([state.root for state in sessions if state.root is not None])
        scratch = _Scratch(self, sessions, roots)
        first = self.head.log_probs(roots)
        return grow(first, scratch.expand, self._plan, self.head.vocabulary, self._choose)

    def _rerank(self, candidates: Candidates) -> Tensor:
        if self.config.shape is TreeShape.DYNAMIC:
            return rerank(candidates, self.config.budget - 1)
        everything = torch.arange(candidates.tokens.shape[1], device=candidates.tokens.device)
        return everything.expand(len(candidates.tokens), -1)

    def forward(self, features: Tensor, tokens: Tensor, segments: Sequence[Segment]) -> Tensor:
        """One head pass over flat rows `[N, H]`, `[N]`: the predicted features `[N, H]`."""
        batch = Batch(segments, self._cache)
        predicted: Tensor = self.head(features[None], tokens[None], batch.positions[None], batch)[0]
        return predicted

    def scratch(self, state: _Drafting, entries: int) -> Tensor:
        """Slots of a session's true entries and of so many scratch entries behind them."""
        end = state.entries + entries
        self._pool.grow(state.pages, end)
        return self._cache.slots(state.pages, 0, end)


class _Scratch:
    """Head entries of the trees being grown; they are overwritten by the next round's true entries."""

    def __init__(self, drafter: Drafter, sessions: Sequence[_Drafting], roots: Tensor) -> None:
        self._drafter = drafter
        self._sessions = sessions
        self._predicted = roots[:, None]
        self._visible = torch.zeros(len(sessions), 1, 0, dtype=torch.bool, device=roots.device)
        self._depths = torch.zeros(0, dtype=torch.long, device=roots.device)

    def expand(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """One head pass over the frontier of all sessions: `Expand` of growth."""
        drafter, (sessions, rows) = self._drafter, tokens.shape
        depth = 0 if not len(self._depths) else int(self._depths[-1]) + 1
        self._depths = torch.cat([self._depths, self._depths.new_full((rows,), depth)])
        each = torch.arange(sessions, device=tokens.device)[:, None]
        itself = torch.eye(rows, dtype=torch.bool, device=tokens.device).expand(sessions, -1, -1)
        self._visible = torch.cat([self._visible[each, parents], itself], -1)
        features = self._predicted[each, parents]
        segments = []
        for state, visible in zip(self._sessions, self._visible, strict=True):
            slots = drafter.scratch(state, len(self._depths))
            segments.append(Segment(slots, self._depths + state.entries, visible))
        predicted = drafter.forward(features.flatten(0, 1), tokens.flatten(), segments)
        self._predicted = predicted.view(sessions, rows, -1)
        return drafter.head.log_probs(self._predicted)
