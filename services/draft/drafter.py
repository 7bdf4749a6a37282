"""The drafter: extends the head with true features, grows draft trees and reranks them."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from services.engine.attention import Batch, Segment, causal_segment
from services.engine.head import EagleHead
from services.engine.pages import PAGE_SIZE, PagePool, extend_keys
from services.speculation.adaptive import AdaptivePlan, Reach
from services.speculation.calibration import Band, Calibration, observations
from services.speculation.cost import Cost
from services.speculation.coupling import LIKELIEST, Drawing, Odds
from services.speculation.growth import (
    Candidates,
    Choose,
    Plan,
    flatten,
    grow,
    most_likely,
    rerank,
)
from services.speculation.shapes import plan_for
from services.types.configuration import DraftConfig, TreeShape
from services.types.errors import ErrorCode, WealdError, invalid
from services.types.tree import DraftTree

EXTEND_CHUNK = 512
"""Entries of one session that enter one head pass."""
SLACK = 0.5
"""Nodes are sent down to this part of the price: it may have fallen when they arrive."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What the verifier says of a session's next tree."""

    price: float = 0.0
    """Value that a node must have to be worth verifying."""
    pace: float = 0.0
    """Tokens per second that the session makes meanwhile."""


FREE = Terms()
"""Whatever is grown is welcome."""


@dataclass(slots=True)
class Times:
    """Where the time of the latest trees went, nanoseconds."""

    extend: int = 0
    grow: int = 0
    rerank: int = 0


@dataclass(slots=True)
class _Drafting:
    """One session. Intervals of its head entries, entry i pairing feature[i] with x[i+1]:

    [0, entries)              true entries in the cache; full pages of them can be found and are never written
    [entries, told)           features are here, the entries are still to be made
    [told, len(tokens))       features have not come yet; a tree needs them
    [entries, entries + s)    while a tree grows, its s scratch entries; the next true ones overwrite them
    """

    config: DraftConfig
    plan: Plan
    origin: bytes
    """Digest of x[0], on which all entries depend: the root of the page keys."""
    tokens: list[int]
    """x[i+1] of every entry; the last is the pending token, the root of the next tree."""
    keys: list[bytes]
    """Of the pages, as far as their tokens are known."""
    pages: list[int]
    entries: int
    blocks: list[Tensor] = field(default_factory=list)
    """Features of the positions [entries, told) in consecutive blocks `[n, H]`."""
    first: int = 0
    """x[0]."""
    drawing: Drawing = LIKELIEST
    proposed: DraftTree | None = None
    """The last tree, with confidences as they were before any correction."""
    root: Tensor | None = None
    """The feature predicted by the last true entry, for the pending token's position, `[H]`."""
    retired: bool = False

    @property
    def committed(self) -> list[int]:
        """x[0..L]."""
        return [self.first, *self.tokens]

    @property
    def band(self) -> Band:
        """What its confidences are like."""
        return Band.of(self.drawing.params.temperature, bool(self.drawing.coupled))

    @property
    def told(self) -> int:
        """Positions whose features have come, from 0 on."""
        return self.entries + sum(map(len, self.blocks))

    @property
    def ready(self) -> bool:
        """Whether the features below the pending token's position, and no others, have come."""
        return not self.retired and 0 < len(self.tokens) == self.told


class Drafter:
    """Owns the head's pages and what it has been told of every open session."""

    def __init__(
        self,
        head: EagleHead,
        config: DraftConfig,
        *,
        num_pages: int,
        page_size: int = PAGE_SIZE,
        choose: Choose = most_likely,
        calibration: Calibration | None = None,
    ) -> None:
        """Draft with `head`.

        Args:
            head: the draft head.
            config: of trees of sessions that ask for none.
            num_pages: of the head's cache.
            page_size: slots of a page.
            choose: proposes the children of a node; the sampled reference replaces it.
            calibration: what is known of the head's confidences; None: nothing yet.
        """
        self.head = head
        self.config = config
        self.tokens_forwarded = 0
        """True entries that went through the head; those found in the cache did not."""
        self.trees_coupled = 0
        """Trees ranked by the noise of the draws."""
        self.times = Times()
        self.passes = Cost()
        """What a head pass over growing trees takes, by its rows."""
        self.calibration = calibration or Calibration()
        """What the head's confidences have been worth."""
        self._reach = Reach()
        self._choose = choose
        self.pool = PagePool(num_pages, page_size)
        self._cache = head.new_cache(num_pages, page_size)
        self._sessions: dict[str, _Drafting] = {}

    def open(
        self,
        id: str,
        tokens: Sequence[int],
        config: DraftConfig | None = None,
        drawing: Drawing = LIKELIEST,
    ) -> int:
        """Begin a session; true entries of the same tokens are taken from the cache as far as it has them.

        Args:
            id: the session's id.
            tokens: committed tokens `x[0..L]`, the prompt first.
            config: the trees of this session; None for the drafter's own.
            drawing: how the target draws its tokens.

        Returns:
            The first position whose feature is needed; `advance` tells it and those behind it. It is at most
            L - 1: the last entry is always made anew, as its output is where a tree begins.

        Raises:
            WealdError: `ALREADY_EXISTS`, `INVALID_ARGUMENT` without a token.
        """
        if id in self._sessions:
            raise WealdError(ErrorCode.ALREADY_EXISTS, f"session {id} is already open")
        if not tokens:
            raise invalid(f"session {id} has no tokens; give at least one")
        first, *rest = tokens
        size = self.pool.page_size
        origin: list[bytes] = []
        extend_keys(origin, [first], 1)
        keys: list[bytes] = []
        extend_keys(keys, rest, size, origin[0])
        pages = self.pool.match(keys[: max(0, len(rest) - 1) // size])
        config = config or self.config
        if drawing.coupled is None:
            drawing = replace(drawing, coupled=config.coupled)
        entries = len(pages) * size
        plan = plan_for(config)
        state = _Drafting(config, plan, origin[0], rest, keys, pages, entries, first=first, drawing=drawing)
        self._sessions[id] = state
        return entries

    def advance(self, id: str, tokens: Sequence[int], features: Tensor) -> None:
        """Tell what has become known of a session, in any portions, each in order.

        Args:
            id: the session's id.
            tokens: committed since the last call, `[t]`; the last becomes the pending token.
            features: of the positions behind those told before, `[n, H]`.

        Raises:
            WealdError: `UNKNOWN_SESSION`.
        """
        state = self._session(id)
        if not state.retired:
            state.tokens.extend(tokens)
            if len(features):
                state.blocks.append(features)

    def ready(self, id: str) -> bool:
        """Whether a tree can be drafted: the features of all positions below the pending token have come.

        Raises:
            WealdError: `UNKNOWN_SESSION`.
        """
        return self._session(id).ready

    @torch.inference_mode()
    def propose(self, ids: Sequence[str], terms: Mapping[str, Terms] | None = None) -> list[DraftTree]:
        """One draft tree for each session: extend, grow, rerank.

        Args:
            ids: sessions that are ready.
            terms: of those whose trees are adaptive; absent ones are `FREE`.

        Raises:
            WealdError: before anything is computed, `UNKNOWN_SESSION`, `INVALID_ARGUMENT` for a session that
                is not ready; `RESOURCE_EXHAUSTED` when too few pages are free.
        """
        sessions, began = {id: self._ready(id) for id in ids}, time.monotonic_ns()
        while waiting := [state for state in sessions.values() if state.entries < len(state.tokens)]:
            self._extend(waiting)
        self.times = Times(time.monotonic_ns() - began)
        alike: dict[DraftConfig, list[str]] = {}
        for id, state in sessions.items():
            alike.setdefault(state.config, []).append(id)
        trees: dict[str, DraftTree] = {}
        for members in alike.values():
            told = [(terms or {}).get(id, FREE) for id in members]
            trees.update(zip(members, self._grow([sessions[id] for id in members], told), strict=True))
        return [trees[id] for id in ids]

    def learn(self, id: str, nodes: int, accepted: Sequence[int]) -> int:
        """Take in what became of a session's last tree, where its text goes on.

        Args:
            id: the session's id.
            nodes: bit i is set when node i was verified.
            accepted: indices of the accepted nodes, root excluded, from the root down.

        Returns:
            How many nodes the target decided on.
        """
        state = self._session(id)
        if state.proposed is None:
            return 0
        tree, decided = state.proposed, observations(state.proposed, nodes, accepted, finished=False)
        for node, was in decided:
            level, confidence = tree.depths[node], tree.confidences[node]
            self.calibration.observe(state.band, level, confidence, was)
        return len(decided)

    def retire(self, id: str) -> None:
        """Free the pages and features of a session for good; it stays open, but never becomes ready again.

        Raises:
            WealdError: `UNKNOWN_SESSION`.
        """
        state = self._session(id)
        state.retired = True
        state.blocks.clear()
        self.pool.release(state.pages)

    def close(self, id: str) -> None:
        """End a session and free its pages; closing one that has ended is no error."""
        if state := self._sessions.pop(id, None):
            self.pool.release(state.pages)

    def check(self) -> None:
        """Verify that every page is accounted for (`PagePool.check`); `WealdError(INTERNAL)` if not."""
        self.pool.check(state.pages for state in self._sessions.values())

    @cached_property
    def _known(self) -> dict[int, int]:
        """The draft token of each target id that the head knows."""
        return {token: index for index, token in enumerate(self.head.vocabulary.tolist())}

    def _session(self, id: str) -> _Drafting:
        state = self._sessions.get(id)
        if state is None:
            raise WealdError(ErrorCode.UNKNOWN_SESSION, f"session {id} is not open; open it first")
        return state

    def _ready(self, id: str) -> _Drafting:
        state = self._session(id)
        if state.retired:
            raise invalid(f"session {id} has been retired; go on by plain steps")
        if not state.ready:
            raise invalid(
                f"session {id} has features of {state.told} positions and {len(state.tokens)} below its "
                "pending token; propose when they are as many, and at least one"
            )
        return state

    def _extend(self, waiting: Sequence[_Drafting]) -> None:
        """Append true entries for positions committed since the last round, a chunk of each session."""
        segments, tokens, features = [], [], []
        for state in waiting:
            if len(state.blocks) > 1:
                state.blocks = [torch.cat(state.blocks)]
            end = min(state.entries + EXTEND_CHUNK, len(state.tokens))
            count = end - state.entries
            segments.append(causal_segment(self._reserve(state, state.entries, end), count))
            tokens += state.tokens[state.entries : end]
            features.append(state.blocks[0][:count])
        predicted = self.forward(
            torch.cat(features), torch.tensor(tokens, device=features[0].device), segments
        )
        # Only now is it extended: a round that fails before, for want of pages, can be tried again.
        last = -1
        for state, segment in zip(waiting, segments, strict=True):
            last += segment.rows
            state.root = predicted[last]
            self._extended(state, segment.rows)
        self.tokens_forwarded += len(tokens)

    def _extended(self, state: _Drafting, count: int) -> None:
        """Account for `count` new true entries; pages that they filled can be found from now on."""
        left = state.blocks[0][count:]
        state.blocks = [left] if len(left) else []
        size, before = self.pool.page_size, state.entries
        state.entries += count
        extend_keys(state.keys, state.tokens, size, state.origin)
        for page in range(before // size, state.entries // size):
            self.pool.register(state.pages[page], state.keys[page])

    def _grow(self, sessions: Sequence[_Drafting], terms: Sequence[Terms]) -> list[DraftTree]:
        """Grow and rerank the trees of sessions of one configuration."""
        config, plan = sessions[0].config, sessions[0].plan
        if config.adaptive_levels and config.shape is TreeShape.DYNAMIC:
            pace = sum(each.pace for each in terms)
            prices = [each.price for each in terms]
            plan = AdaptivePlan(config.levels, config.beam, prices, pace, self.passes, self._reach)
        least = [SLACK * each.price if config.adaptive_budget else 0.0 for each in terms]
        roots = torch.stack([state.root for state in sessions if state.root is not None])
        scratch = _Scratch(self, sessions, roots)
        first = self.head.logits(roots)
        learnt = [s.band if config.adaptive_budget or s.band.coupled else None for s in sessions]
        correct = partial(self.calibration.correct, learnt)
        drawings, pending = [s.drawing for s in sessions], [len(s.tokens) for s in sessions]
        odds = Odds(drawings, pending, lambda i: sessions[i].committed, self.head.vocabulary, self._known)
        self.trees_coupled += len(odds.coupled)
        began = time.monotonic_ns()
        candidates = grow(first, scratch.expand, plan, self.head.vocabulary, self._choose, correct, odds)
        grown = time.monotonic_ns()
        chosen, tokens = _rerank(candidates, config), [state.tokens[-1] for state in sessions]
        trees = flatten(candidates, chosen, tokens, least)
        asked = replace(candidates, log_confidences=candidates.raw)
        raw = flatten(asked, chosen, tokens, least) if any(learnt) else trees
        for state, tree in zip(sessions, raw, strict=True):
            state.proposed = tree
        self.times.grow += grown - began
        self.times.rerank += time.monotonic_ns() - grown
        return trees

    def forward(self, features: Tensor, tokens: Tensor, segments: Sequence[Segment]) -> Tensor:
        """One head pass over flat rows `[N, H]`, `[N]`: the predicted features `[N, H]`."""
        batch = Batch(segments, self._cache)
        predicted: Tensor = self.head(features[None], tokens[None], batch.positions[None], batch)[0]
        return predicted

    def scratch(self, state: _Drafting, written: int, entries: int) -> Tensor:
        """Slots of a session's true entries and of so many scratch entries behind them.

        The first `written` scratch entries are there already, the others are about to be written.
        """
        return self._reserve(state, state.entries + written, state.entries + entries)

    def _reserve(self, state: _Drafting, start: int, end: int) -> Tensor:
        """Slots of a session's entries below `end`; those from `start` on are about to be written."""
        self.pool.grow(state.pages, end)
        size = self.pool.page_size
        self.pool.require_sole(state.pages[start // size : -(-end // size)])
        return self._cache.slots(state.pages, 0, end)


def _rerank(candidates: Candidates, config: DraftConfig) -> Tensor:
    if config.shape is TreeShape.DYNAMIC:
        return rerank(candidates, config.budget - 1)
    everything = torch.arange(candidates.tokens.shape[1], device=candidates.tokens.device)
    return everything.expand(len(candidates.tokens), -1)


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
        written = len(self._depths)
        depth = 0 if not written else int(self._depths[-1]) + 1
        self._depths = torch.cat([self._depths, self._depths.new_full((rows,), depth)])
        each = torch.arange(sessions, device=tokens.device)[:, None]
        itself = torch.eye(rows, dtype=torch.bool, device=tokens.device).expand(sessions, -1, -1)
        self._visible = torch.cat([self._visible[each, parents], itself], -1)
        features = self._predicted[each, parents]
        segments = []
        for state, visible in zip(self._sessions, self._visible, strict=True):
            slots = drafter.scratch(state, written, len(self._depths))
            segments.append(Segment(slots, self._depths + state.entries, visible))
        predicted = drafter.forward(features.flatten(0, 1), tokens.flatten(), segments)
        self._predicted = predicted.view(sessions, rows, -1)
        return drafter.head.logits(self._predicted)
