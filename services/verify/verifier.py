"""The verifier: runs the target over draft trees and commits what the target itself would have said."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, islice

import torch
from torch import Tensor

from services.engine.attention import Batch, Segment, causal_segment, tree_segment
from services.engine.pages import PAGE_SIZE, PagePool, extend_keys
from services.engine.target import Target
from services.speculation.acceptance import Walk, walk
from services.speculation.sampling import Context, draw, logprobs
from services.speculation.stopping import cut, end_tokens
from services.types.errors import ErrorCode, WealdError, invalid
from services.types.messages import StepTimings
from services.types.outcome import Outcome
from services.types.session import FinishReason, Session
from services.types.tree import MAX_NODES, DraftTree
from services.verify.grammar import Grammar, Grammars

PREFILL_CHUNK = 512
"""Prompt tokens that enter one target step of `Verifier.open`."""

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
    """`[n, H]`: after `open` one for each prompt token; after a round, of the root and the accepted nodes.
    None of them once the session has finished: it needs no further tree."""


@dataclass(frozen=True, slots=True)
class Stepped:
    """What one target step committed, and where its time went."""

    outcomes: dict[str, Outcome]
    """Of the sessions that drew a token; those still in their prefill are not among them."""
    timings: StepTimings
    failures: Mapping[str, WealdError] = field(default_factory=dict)
    """Why sessions cannot go on; they committed nothing in this step and are closed."""


@dataclass(slots=True)
class _Running:
    """One session. Keys, values and features exist for the first `computed` of its tokens."""

    session: Session
    ends: frozenset[int]
    limit: int
    """Output tokens allowed by `max_tokens` and by the context length."""
    tokens: list[int]
    """Prompt and output; the last is the pending one once all before it are computed."""
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    """Content hashes of the full pages of computed tokens."""
    grammar: Grammar | None = None
    failed: WealdError | None = None
    """Why its grammar cannot go on."""

    @property
    def pending(self) -> int:
        """Position of the pending token."""
        return len(self.tokens) - 1

    @property
    def room(self) -> int:
        return self.limit - (len(self.tokens) - len(self.session.prompt))

    def commit(self, outcome: Outcome) -> None:
        """Take in what a step has committed."""
        self.computed = self.pending + 1 + len(outcome.accepted)
        self.tokens.extend(outcome.tokens)
        if self.grammar and not outcome.finish:
            self.grammar.advance(outcome.tokens)

    def context(self, path: Sequence[int] = ()) -> Context:
        session = self.session
        output = self.tokens[len(session.prompt) :]
        allowed = self._allowed(path)
        return Context(session.params, session.seed, session.prompt, [*output, *path], self.ends, allowed)

    def _allowed(self, path: Sequence[int]) -> Tensor | None:
        try:
            return self.grammar.allowed(path) if self.grammar else None
        except WealdError as error:
            self.failed = error
            return None


@dataclass(frozen=True, slots=True)
class _Row:
    """One session's part of a step."""

    running: _Running
    segment: Segment
    tokens: Sequence[int]
    tree: DraftTree | None
    """What is walked; None for a chunk that ends inside the prompt, and draws nothing."""


class Verifier:
    """Owns the target's pages and the committed tokens of every open session."""

    def __init__(
        self,
        target: Target,
        *,
        num_pages: int,
        page_size: int = PAGE_SIZE,
        max_model_len: int | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        self.target = target
        self.max_model_len = min(max_model_len or target.context_length, target.context_length)
        self.tokens_forwarded = 0
        """Tokens that entered a target step, tree nodes included."""
        self.tokens_prefilled = 0
        """Of these, tokens of prefill chunks."""
        self.pool = PagePool(num_pages, page_size)
        self._cache = target.new_cache(num_pages, page_size)
        self._grammars = grammars
        self._sessions: dict[str, _Running] = {}

    def grammar(self, session: Session) -> Grammar:
        """The grammar of a session with a JSON schema, behind its output so far; any thread may ask.

        Raises:
            WealdError: `INVALID_ARGUMENT` as `Grammars.begin` does.
        """
        if self._grammars is None:
            raise invalid("json_schema needs the target's tokenizer, which is not known here; leave it out")
        ends = end_tokens(session.params, self.target.eos_token_ids)
        return self._grammars.begin(session.params.json_schema or "", session.output, ends)

    def constrain(self, id: str, grammar: Grammar) -> None:
        """Give a session its grammar, before its first step."""
        self._session(id).grammar = grammar

    def admit(self, session: Session) -> Outcome | None:
        """Take a session in, without pages; `constrain`, `place` and `step` do the work.

        Returns:
            The finish, when there is nothing to generate: the session is then not open.

        Raises:
            WealdError: `ALREADY_EXISTS`, `INVALID_ARGUMENT` for tokens the target does not know,
                `CONTEXT_LENGTH_EXCEEDED`.
        """
        self._check(session)
        running = _Running(
            session,
            end_tokens(session.params, self.target.eos_token_ids),
            min(session.params.max_tokens, self.max_model_len - len(session.prompt)),
            list(session.tokens),
        )
        if running.room <= 0:
            return Outcome((), (), 0, FinishReason.LENGTH)
        self._sessions[session.id] = running
        return None

    def place(self, id: str) -> int:
        """Give a session without pages the cached pages of its prefix; tokens still to be computed.

        At least its newest token is computed anew, since the next one is drawn from its logits; hence every
        page that is written later has one owner.
        """
        running = self._session(id)
        keys: list[bytes] = []
        extend_keys(keys, running.tokens[: running.pending], self.pool.page_size)
        running.pages = self.pool.match(keys)
        running.keys = keys[: len(running.pages)]
        running.computed = len(running.pages) * self.pool.page_size
        return self.lacking(id)

    @property
    def free_pages(self) -> int:
        """Pages that no session holds."""
        return self.pool.free_pages

    def lacking(self, id: str) -> int:
        """Tokens of a session that are not computed yet; 1 when only the pending one is missing."""
        running = self._session(id)
        return len(running.tokens) - running.computed

    def computed(self, id: str) -> int:
        """Positions of a session whose keys, values and features exist."""
        return self._session(id).computed

    def pending(self, id: str) -> tuple[int, int]:
        """Position and token of the pending token."""
        running = self._session(id)
        return running.pending, running.tokens[-1]

    def room(self, id: str) -> int:
        """Output tokens a session may still generate."""
        return self._session(id).room

    def pages_missing(self, id: str, rows: int) -> int:
        """Pages a session has to be given before so many rows behind its computed tokens can be written."""
        running = self._session(id)
        return max(0, -(-(running.computed + rows) // self.pool.page_size) - len(running.pages))

    def rows_within(self, id: str, pages: int) -> int:
        """Rows that can be written behind a session's computed tokens when it is given so many pages."""
        running = self._session(id)
        return (len(running.pages) + pages) * self.pool.page_size - running.computed

    @torch.inference_mode()
    def step(
        self,
        trees: Mapping[str, DraftTree],
        chunks: Mapping[str, int] | None = None,
        rule: Rule = seeded_walk,
    ) -> Stepped:
        """One target step: forest and prefill chunks, walk, commit.

        A tree of one node is a plain step. Nodes deeper than a session can still use are left out. A chunk is
        so many further tokens of a session that lacks more than its pending one; the chunk that reaches the
        newest token draws the next, as a plain step does. `rule` says which path is accepted; only the
        in-process reference of the p/q rule replaces it.

        Raises:
            WealdError: before anything is computed, `UNKNOWN_SESSION`, `INVALID_ARGUMENT` for a tree whose
                root is not pending or whose tokens the target does not know, `RESOURCE_EXHAUSTED` when too
                few pages are free.
        """
        started = time.perf_counter_ns()
        expected = [(self._expecting(id, tree), tree) for id, tree in trees.items()]
        rows = [self._tree_row(running, tree.cut(running.room - 1)) for running, tree in expected]
        rows += [self._chunk_row(self._session(id), count) for id, count in (chunks or {}).items()]
        if not rows:
            return Stepped({}, StepTimings())
        logits = self._forward(rows)
        forwarded = time.perf_counter_ns()
        drawing = [row for row in rows if row.tree]
        forest = [row.tree for row in drawing if row.tree]
        first = list(accumulate(map(len, forest), initial=0))
        walks = rule(forest, self._look_up(drawing, first, logits))
        outcomes = [self._outcome(row, walk) for row, walk in zip(drawing, walks, strict=True)]
        outcomes = self._with_logprobs(drawing, first, logits, outcomes)
        accepted = time.perf_counter_ns()
        drawn = [pair for pair in zip(drawing, outcomes, strict=True) if not pair[0].running.failed]
        self._compact(drawn)
        for row in rows:
            row.running.computed += row.segment.rows if row.tree is None else 0
        for row, outcome in drawn:
            row.running.commit(outcome)
        for row in rows:
            self._register(row.running)
        done = {row.running.session.id: outcome for row, outcome in drawn}
        failures = {row.running.session.id: e for row in drawing if (e := row.running.failed)}
        for id in (*failures, *(id for id, outcome in done.items() if outcome.finish)):
            self.close(id)
        committed = time.perf_counter_ns()
        timings = StepTimings(0, forwarded - started, accepted - forwarded, committed - accepted)
        return Stepped(done, timings, failures)

    @torch.inference_mode()
    def features(self, spans: Mapping[str, tuple[int, int]]) -> dict[str, Tensor]:
        """Features `[end - start, H]` of the positions [start, end) of each session, all computed."""
        slots = [self._cache.slots(self._session(id).pages, *span) for id, span in spans.items()]
        if not slots:
            return {}
        rows = torch.split(self._cache.features(torch.cat(slots)), [len(s) for s in slots])
        return dict(zip(spans, rows, strict=True))

    def open(self, session: Session) -> Verified:
        """Prefill a session on its own and draw its first token.

        Raises:
            WealdError: as `admit`, and `RESOURCE_EXHAUSTED` when too few pages are free.
        """
        if finished := self.admit(session):
            return Verified(finished, self._no_features())
        id = session.id
        try:
            if session.params.json_schema is not None:
                self.constrain(id, self.grammar(session))
            lacking = self.place(id)
            outcomes: dict[str, Outcome] = {}
            while not outcomes:
                count = min(lacking, PREFILL_CHUNK)
                outcomes = _sound(self.step({}, {id: count}))
                lacking -= count
        except BaseException:
            self.close(id)
            raise
        return self._verified(id, outcomes[id], 0)

    def verify(self, trees: Mapping[str, DraftTree], rule: Rule = seeded_walk) -> dict[str, Verified]:
        """One round of the sessions named, as `step`, and the features of what it committed.

        Raises:
            WealdError: as `step`, and why a session cannot go on by its grammar.
        """
        starts = {id: self.pending(id)[0] for id in trees}
        outcomes = _sound(self.step(trees, rule=rule))
        return {id: self._verified(id, outcome, starts[id]) for id, outcome in outcomes.items()}

    def suspend(self, id: str) -> None:
        """Take a session's pages away; it can be placed and computed again, with the same result."""
        running = self._session(id)
        self.pool.release(running.pages)
        running.keys.clear()
        running.computed = 0

    def close(self, id: str) -> None:
        """End a session and free its pages; closing one that has ended is no error."""
        if running := self._sessions.pop(id, None):
            self.pool.release(running.pages)

    def check(self) -> None:
        """Verify that every page is accounted for; `WealdError(INTERNAL)` if not."""
        self.pool.check(running.pages for running in self._sessions.values())

    def _check(self, session: Session) -> None:
        if session.id in self._sessions:
            raise WealdError(ErrorCode.ALREADY_EXISTS, f"session {session.id} is already open")
        if not session.prompt:
            raise invalid("the prompt is empty; give at least one token")
        self.know((*session.tokens, *session.params.logit_bias, *session.params.stop_token_ids))
        if len(session.prompt) >= self.max_model_len:
            raise WealdError(
                ErrorCode.CONTEXT_LENGTH_EXCEEDED,
                f"the prompt has {len(session.prompt)} tokens and the target's context is "
                f"{self.max_model_len}; shorten the prompt to leave room for the answer",
            )

    def know(self, tokens: Iterable[int]) -> None:
        """Raise `WealdError(INVALID_ARGUMENT)` for a token the target's vocabulary does not have."""
        for token in tokens:
            if not 0 <= token < self.target.vocab_size:
                raise invalid(f"token {token} is not in the target's vocabulary of {self.target.vocab_size}")

    def _session(self, id: str) -> _Running:
        running = self._sessions.get(id)
        if running is None:
            raise WealdError(ErrorCode.UNKNOWN_SESSION, f"session {id} is not open; open it first")
        return running

    def _expecting(self, id: str, tree: DraftTree) -> _Running:
        running = self._session(id)
        if running.computed != running.pending:
            raise invalid(f"session {id} is in its prefill; a tree has to wait until that has drawn a token")
        if tree.tokens[0] != running.tokens[-1]:
            raise invalid(
                f"the tree's root is token {tree.tokens[0]}, the pending token of session {id} is "
                f"{running.tokens[-1]}"
            )
        self.know(tree.tokens)
        return running

    def _tree_row(self, running: _Running, tree: DraftTree) -> _Row:
        return _Row(running, tree_segment(self._reserve(running, len(tree)), tree), tree.tokens, tree)

    def _chunk_row(self, running: _Running, count: int) -> _Row:
        end = running.computed + count
        segment = causal_segment(self._reserve(running, count), count)
        tree = DraftTree.root(running.tokens[-1]) if end == len(running.tokens) else None
        self.tokens_prefilled += count
        return _Row(running, segment, running.tokens[running.computed : end], tree)

    def _reserve(self, running: _Running, rows: int) -> Tensor:
        """Slots of all computed tokens and of so many rows behind them, which this session alone owns."""
        end = running.computed + rows
        self.pool.grow(running.pages, end)
        self.pool.require_sole(running.pages[running.computed // self.pool.page_size :])
        return self._cache.slots(running.pages, 0, end)

    def _forward(self, rows: Sequence[_Row]) -> Tensor:
        """Logits `[R, V]` of the rows that can draw: all nodes of trees, the last row of a chunk."""
        tokens = [token for row in rows for token in row.tokens]
        needed, end = list[int](), 0
        for row in rows:
            end += len(row.tokens)
            if row.tree:
                needed.extend(range(end - len(row.tree), end))
        self.tokens_forwarded += len(tokens)
        device = self.target.device
        return self.target.forward(
            torch.tensor(tokens, device=device),
            Batch([row.segment for row in rows], self._cache),
            torch.tensor(needed, dtype=torch.long, device=device),
        )

    def _look_up(self, drawing: Sequence[_Row], first: Sequence[int], logits: Tensor) -> LookUp:
        """`first` are the rows in the logits at which the trees begin."""
        forest = [row.tree for row in drawing if row.tree]

        def look_up(at: list[tuple[int, int]]) -> tuple[Tensor, list[Context]]:
            paths = [[forest[i].tokens[n] for n in forest[i].path(node)] for i, node in at]
            contexts = [drawing[i].running.context(path) for (i, _), path in zip(at, paths, strict=True)]
            return logits[[first[i] + node for i, node in at]], contexts

        return look_up

    def _outcome(self, row: _Row, walk: Walk) -> Outcome:
        assert row.tree
        said = (*(row.tree.tokens[node] for node in walk.path), walk.bonus)
        tokens, finish = cut(said, row.running.room, row.running.ends)
        return Outcome(tokens, walk.path[: len(tokens)], len(row.tree), finish)

    def _with_logprobs(
        self, drawing: Sequence[_Row], first: Sequence[int], logits: Tensor, outcomes: Sequence[Outcome]
    ) -> list[Outcome]:
        """The outcomes, with logprobs for the sessions that ask for them; all are computed together."""
        rows: list[int] = []
        tokens: list[int] = []
        tops: list[int] = []
        for row, root, outcome in zip(drawing, first, outcomes, strict=False):
            top = row.running.session.params.logprobs
            if top is not None:
                rows += [root + node for node in (0, *outcome.accepted)][: len(outcome.tokens)]
                tokens += outcome.tokens
                tops += [top] * len(outcome.tokens)
        told = iter(logprobs(logits[rows], tokens, tops) if rows else ())
        return [
            outcome
            if row.running.session.params.logprobs is None
            else replace(outcome, logprobs=tuple(islice(told, len(outcome.tokens))))
            for row, outcome in zip(drawing, outcomes, strict=True)
        ]

    def _compact(self, drawn: Sequence[tuple[_Row, Outcome]]) -> None:
        """Move accepted nodes next to their prefix."""
        sources, destinations = [], []
        for row, outcome in drawn:
            nodes = row.segment.slots[-outcome.verified :]
            for destination, node in enumerate(outcome.accepted, 1):
                if node != destination:
                    sources.append(nodes[node])
                    destinations.append(nodes[destination])
        if sources:
            self._cache.move(torch.stack(sources), torch.stack(destinations))

    def _register(self, running: _Running) -> None:
        """Let full pages of computed tokens be found by their content."""
        known = len(running.keys)
        extend_keys(running.keys, running.tokens[: running.computed], self.pool.page_size)
        for page, key in zip(running.pages[known:], running.keys[known:], strict=False):
            self.pool.register(page, key)

    def _verified(self, id: str, outcome: Outcome, start: int) -> Verified:
        if outcome.finish:
            return Verified(outcome, self._no_features())
        return Verified(outcome, self.features({id: (start, self.pending(id)[0])})[id])

    def _no_features(self) -> Tensor:
        return torch.empty(0, self.target.hidden_size, dtype=self.target.dtype, device=self.target.device)


def _sound(stepped: Stepped) -> dict[str, Outcome]:
    """The outcomes of a step, where no session has failed."""
    for error in stepped.failures.values():
        raise error
    return stepped.outcomes


def pages_for(tokens: int, page_size: int = PAGE_SIZE) -> int:
    """Pages that hold a session of so many tokens and the largest tree behind it."""
    return -(-(tokens + MAX_NODES) // page_size)
