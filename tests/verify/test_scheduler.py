"""What enters a target step, one step at a time: budgets, holds, waiting, preemption."""

import math
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.engine.target import Target
from services.speculation.forest import Entry, rank
from services.types.configuration import Priority, VerifyLimits
from services.types.errors import ErrorCode
from services.types.messages import Close, Failure, Open, Proposal, Proposals, Replies, Reply, Response
from services.types.sampling import SamplingParams
from services.types.session import Session
from services.types.tree import DraftTree
from services.verify.grammar import Grammars
from services.verify.scheduler import MAX_HOLD_S, Step
from services.verify.service import VerifyService
from services.verify.verifier import Verifier

Make = Callable[..., Any]

HOLDS_LAST, HOLDS_END = 0.0, 1e9
"""Times for a step: before any hold can have ended, and after all have."""


class Far:
    """The far end of a stream: it remembers what it has been told."""

    def __init__(self) -> None:
        self.congested = False
        self.said: list[Response] = []

    def post(self, responses: Sequence[Response]) -> None:
        self.said.extend(responses)

    @property
    def replies(self) -> list[Reply]:
        return [reply for said in self.said if isinstance(said, Replies) for reply in said.replies]

    @property
    def failures(self) -> list[Failure]:
        return [said for said in self.said if isinstance(said, Failure)]

    @property
    def texts(self) -> dict[str, tuple[int, ...]]:
        texts: dict[str, tuple[int, ...]] = {}
        for reply in self.replies:
            texts[reply.session] = texts.get(reply.session, ()) + reply.outcome.tokens
        return texts


class Bench:
    """A verify service without its thread: it takes what it is given at once, and steps when it is told."""

    def __init__(
        self,
        target: Target,
        num_pages: int,
        max_model_len: int = 48,
        grammars: Grammars | None = None,
        **limits: Any,
    ) -> None:
        """Pages are of 4 slots."""
        self.verifier = Verifier(
            target, num_pages=num_pages, page_size=4, max_model_len=max_model_len, grammars=grammars
        )
        self.limits = VerifyLimits(**limits)
        self.service = VerifyService(self.verifier, self.limits, b"")
        self.scheduler = self.service._scheduler
        self.far = Far()

    @property
    def counters(self) -> Counter[str]:
        return self.scheduler.counters

    @property
    def waiting(self) -> list[str]:
        return [seat.id for seat in self.scheduler.waiting]

    def open(
        self,
        session: Session,
        speculative: bool = False,
        far: Far | None = None,
        priced: bool = False,
        priority: Priority = Priority.NORMAL,
    ) -> None:
        self._take(Open(session, 1, b"", speculative, 0, priced=priced, priority=priority), far)

    def close(self, id: str) -> None:
        self._take(Close(id, 1))

    def pending(self, id: str) -> int:
        return self.verifier.pending(id)[1]

    def offer(self, id: str, tree: DraftTree, position: int | None = None) -> None:
        at = self.verifier.pending(id)[0] if position is None else position
        rounds = [reply.round for reply in self.far.replies if reply.session == id]
        self._take(Proposals((Proposal(id, 1, max(rounds, default=0), at, tree),)))

    def step(self, now: float = HOLDS_END) -> Step | None:
        """Form and run a step, which stays within its limits and the pages there are."""
        step = self.scheduler.form(now)
        if step:
            rows = {id: len(tree) for id, tree in step.trees.items()} | step.chunks
            assert len(rows) == len(step.trees) + len(step.chunks) <= self.limits.max_num_seqs
            assert 0 < sum(rows.values()) <= self.limits.max_num_batched_tokens
            assert self.pages_taken(rows) <= self.verifier.pool.free_pages
            self.service._serve(step)
        self.verifier.check()
        return step

    def pages_taken(self, rows: dict[str, int]) -> int:
        return sum(self.verifier.pages_missing(id, count) for id, count in rows.items())

    def hear(self) -> None:
        """Take in one grammar, once it is compiled."""
        self.service._receive(60)

    def finish(self) -> dict[str, tuple[int, ...]]:
        """Step until every session is over; the texts."""
        while self.scheduler.seats:
            assert self.step()
        assert self.verifier.pool.free_pages == self.verifier.pool.num_pages
        return self.far.texts

    def _take(self, request: Open | Proposals | Close, far: Far | None = None) -> None:
        self.service._take(far or self.far, request, time.monotonic())


def session(id: str, prompt: int, max_tokens: int = 12, temperature: float = 1.0) -> Session:
    """A session with a prompt of so many random tokens, which ends at its last allowed token."""
    rng = random.Random(f"{id} {prompt}")
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, ignore_eos=True)
    return Session(id, tuple(rng.randrange(61) for _ in range(prompt)), params, rng.getrandbits(64))


def star(root: int, nodes: int, first: float = 0.9) -> DraftTree:
    """A root and its children, each a little less likely than the one before."""
    confidences = [first * 0.99**i for i in range(nodes - 1)]
    return DraftTree((root, *range(nodes - 1)), (-1, *[0] * (nodes - 1)), (1.0, *confidences))


def texts(plain: Make, *sessions: Session) -> dict[str, tuple[int, ...]]:
    return {s.id: plain("llama").text(s) for s in sessions}


def test_the_trees_of_a_step_compete_for_its_tokens(target: Make, plain: Make) -> None:
    bench = Bench(target("llama"), 200, max_num_batched_tokens=30, max_num_seqs=4)
    sessions = [session(id, 5) for id in "abc"]
    for s in sessions:
        bench.open(s, speculative=True)
    assert bench.step() == Step({}, {}, {"a": 5, "b": 5, "c": 5})
    trees = {id: star(bench.pending(id), 20, first) for id, first in {"a": 0.9, "b": 0.8, "c": 0.1}.items()}
    for id, tree in trees.items():
        bench.offer(id, tree)
    step = bench.step(HOLDS_LAST)
    assert step
    assert step.nodes == dict(zip(trees, rank(list(map(Entry, trees.values())), 27), strict=True))
    assert [len(tree) for tree in step.trees.values()] == [len(nodes) for nodes in step.nodes.values()]
    assert sum(map(len, step.trees.values())) == 30
    assert len(step.trees["a"]) > len(step.trees["b"]) > len(step.trees["c"]) == 1
    assert bench.counters["shrunk_trees"] == 0
    assert bench.finish() == texts(plain, *sessions)


@pytest.mark.parametrize(("prompt", "chunks"), [(5, [5]), (40, [16, 16, 8])])
def test_full_trees_leave_half_of_what_the_roots_leave_to_prefills(
    prompt: int, chunks: list[int], target: Make, plain: Make
) -> None:
    bench = Bench(target("llama"), 200, max_num_batched_tokens=34, max_num_seqs=4)
    sessions = [session("a", 5, 30), session("b", 5, 30), session("new", prompt, 8)]
    for s in sessions[:2]:
        bench.open(s, speculative=True)
    bench.step()
    bench.open(sessions[2])
    for chunk in chunks:
        for id in "ab":
            bench.offer(id, star(bench.pending(id), 40))
        step = bench.step(HOLDS_LAST)
        assert step
        assert step.chunks == {"new": chunk}
        assert sum(map(len, step.trees.values())) == 34 - chunk
    assert bench.counters["chunked_prefills"] == len(chunks) - 1
    assert bench.finish() == texts(plain, *sessions)


def test_trees_shrink_to_their_best_nodes_before_anyone_is_preempted(target: Make, plain: Make) -> None:
    bench = Bench(target("llama"), 12, max_num_seqs=4)
    sessions = [session(id, 8, 12) for id in "ab"]
    for s in sessions:
        bench.open(s, speculative=True)
    bench.step()
    trees = {id: star(bench.pending(id), 60) for id in "ab"}
    for id, tree in trees.items():
        bench.offer(id, tree)
    step = bench.step(HOLDS_LAST)
    assert step
    assert step.nodes["a"] == rank([Entry(trees["a"])], 27)[0]
    assert step.nodes["b"] == rank([Entry(trees["b"])], 3)[0]
    assert bench.counters["shrunk_trees"] == 2
    assert bench.counters["preemptions"] == 0
    assert bench.finish() == texts(plain, *sessions)


def test_the_youngest_are_preempted_first_and_start_again_in_the_order_they_came(
    target: Make, plain: Make
) -> None:
    bench = Bench(target("llama"), 14, max_num_seqs=4)
    sessions = [session(id, 8, 24) for id in "abc"]
    for s in sessions:
        bench.open(s)
    histories = {tuple(bench.waiting)}
    while bench.scheduler.seats:
        running = [id for id in bench.scheduler.seats if id not in bench.waiting]
        assert [*running, *bench.waiting] == sorted(bench.scheduler.seats)
        histories.add(tuple(bench.waiting))
        assert bench.step()
    assert histories >= {(), ("c",), ("b", "c")}
    assert bench.counters["preemptions"] >= 2
    assert bench.counters["prefix_hit_tokens"] > 0
    assert bench.finish() == texts(plain, *sessions)


def test_a_preempted_session_stands_before_those_that_have_never_run(target: Make, plain: Make) -> None:
    bench = Bench(target("llama"), 12, max_num_seqs=2)
    sessions = [session("a", 16, 20), session("b", 16, 20), session("c", 2, 2)]
    for s in sessions:
        bench.open(s)
    while not bench.counters["preemptions"]:
        assert bench.step()
    assert bench.waiting == ["b", "c"]
    assert bench.finish() == texts(plain, *sessions)


def test_a_session_waits_for_the_pages_of_its_prompt_and_nobody_passes_it(target: Make, plain: Make) -> None:
    bench = Bench(target("llama"), 16, max_num_seqs=4)
    sessions = [session("a", 30, 8), session("b", 40, 8), session("c", 1, 2)]
    for s in sessions:
        bench.open(s)
    assert bench.step()
    while "a" in bench.scheduler.seats:
        assert bench.waiting == ["b", "c"]
        assert bench.step()
    step = bench.step()
    assert step
    assert {*step.trees, *step.chunks} == {"b", "c"}
    assert bench.counters["preemptions"] == 0
    assert bench.finish() == texts(plain, *sessions)


def test_a_session_is_held_while_its_tree_can_come_and_goes_on_alone_after_that(
    target: Make, plain: Make
) -> None:
    bench = Bench(target("llama"), 40, max_num_seqs=4)
    s = session("a", 8)
    bench.open(s, speculative=True)
    bench.step()
    for missed in range(5):
        assert bench.far.replies[-1].wanted
        assert bench.step(HOLDS_LAST) is None
        assert bench.scheduler.patience(time.monotonic()) <= MAX_HOLD_S / 2**missed
        step = bench.step(HOLDS_END)
        assert step
        assert step.nodes == {"a": (0,)}
        assert bench.counters["missed_trees"] == missed + 1
    bench.offer("a", star(bench.pending("a"), 20))
    assert bench.scheduler.seats["a"].missed == 0
    assert bench.step(HOLDS_LAST)
    assert bench.counters["trees_verified"] == 1
    assert bench.finish() == texts(plain, s)


def test_a_step_waits_for_a_tree_that_is_due_while_that_pays_and_goes_on_without_it_after(
    target: Make, plain: Make
) -> None:
    bench = Bench(target("llama"), 80, max_num_seqs=4)
    sessions = [session(id, 8) for id in "ab"]
    for s in sessions:
        bench.open(s, speculative=True)
    bench.step()
    for id in "ab":
        bench.offer(id, star(bench.pending(id), 4))
    bench.step(HOLDS_LAST)
    late, budget = bench.scheduler.seats["b"], bench.scheduler.budget
    bench.offer("a", star(bench.pending("a"), 4))
    budget._tokens = budget._seconds = 1.0
    late.held_until, late.delay = late.asked + 10, 0.4
    assert bench.scheduler.form(late.asked + 0.1) is None
    assert bench.scheduler.patience(late.asked + 0.1) == pytest.approx(0.3 + late.brought, abs=0.1)
    assert bench.scheduler.form(late.asked + 0.4) is None
    bench.open(session("prefilling", 8))
    assert bench.scheduler.form(late.asked + 0.4) is not None
    bench.close("prefilling")
    late.delay = 0.0
    assert bench.scheduler.form(late.asked + 0.1) is not None
    late.delay = 0.4
    step = bench.step(late.asked + 0.5 + late.brought)
    assert step
    assert {*step.trees} == {"a"}
    assert bench.finish() == texts(plain, *sessions)


def test_a_hold_that_has_just_ended_is_not_waited_for(target: Make) -> None:
    bench = Bench(target("llama"), 40, max_num_seqs=4)
    assert bench.scheduler.patience(time.monotonic()) == math.inf
    bench.open(session("a", 8), speculative=True)
    bench.step()
    assert 0 < bench.scheduler.patience(HOLDS_LAST) < math.inf
    assert bench.scheduler.patience(time.monotonic() + MAX_HOLD_S) == 0.0


def test_without_speculation_or_room_for_a_draft_token_nobody_is_held(target: Make, plain: Make) -> None:
    bench = Bench(target("llama"), 40, max_num_seqs=4)
    sessions = [session("off", 8, 6), session("last", 8, 2)]
    bench.open(sessions[0])
    bench.open(sessions[1], speculative=True)
    while bench.scheduler.seats:
        assert bench.step(HOLDS_LAST)
    assert bench.far.texts == texts(plain, *sessions)
    assert not any(reply.wanted for reply in bench.far.replies)
    assert bench.counters["missed_trees"] == 0


def test_the_sessions_of_a_congested_stream_pause_and_others_go_on(target: Make, plain: Make) -> None:
    bench = Bench(target("llama"), 80, max_num_seqs=4)
    slow = Far()
    sessions = {id: session(id, 8, 6) for id in ("decoding", "prefilling", "other")}
    bench.open(sessions["decoding"], far=slow)
    bench.step()
    slow.congested = True
    bench.open(sessions["prefilling"], far=slow)
    bench.open(sessions["other"])
    while "other" in bench.scheduler.seats:
        step = bench.step()
        assert step
        assert {*step.trees, *step.chunks} == {"other"}
    assert bench.step() is None
    assert 0 < bench.scheduler.patience(time.monotonic()) < 1
    slow.congested = False
    bench.finish()
    assert bench.far.texts | slow.texts == texts(plain, *sessions.values())


def test_a_tree_that_is_not_for_the_pending_token_is_dropped_without_a_word(
    target: Make, plain: Make
) -> None:
    bench = Bench(target("llama"), 80, max_num_batched_tokens=20, max_num_seqs=2)
    sessions = [session("a", 8), session("prefilling", 40, 8), session("waiting", 8)]
    bench.open(sessions[0], speculative=True)
    bench.step()
    for s in sessions[1:]:
        bench.open(s, speculative=True)
    bench.step(HOLDS_LAST)
    root = bench.pending("a")
    bench.offer("a", star(root, 9), position=7)
    bench.offer("a", star((root + 1) % 61, 9))
    bench.offer("prefilling", star(bench.pending("prefilling"), 9))
    bench.offer("waiting", star(bench.pending("waiting"), 9))
    assert bench.counters["stale_trees"] == 4
    step = bench.step(HOLDS_LAST)
    assert step
    assert not step.trees
    assert bench.finish() == texts(plain, *sessions)
    assert bench.far.failures == []


def test_the_tree_of_a_session_that_was_preempted_meanwhile_is_stale(target: Make, plain: Make) -> None:
    bench = Bench(target("llama"), 12, max_num_seqs=2)
    sessions = [session("a", 20, 20), session("b", 16, 20)]
    for s in sessions:
        bench.open(s, speculative=True)
    while not bench.counters["preemptions"]:
        assert bench.step()
    assert bench.waiting == ["b"]
    bench.offer("b", star(bench.pending("b"), 9))
    assert bench.counters["stale_trees"] == 1
    assert bench.finish() == texts(plain, *sessions)


def test_a_full_queue_refuses_with_a_hint_when_to_try_again(target: Make, plain: Make) -> None:
    bench = Bench(target("llama"), 40, max_num_seqs=1, max_waiting=2)
    sessions = [session(id, 4, 3) for id in "abc"]
    for s in sessions:
        bench.open(s)
    bench.open(session("d", 4))
    (refused,) = bench.far.failures
    assert (refused.session, refused.epoch) == ("d", 1)
    assert refused.error.code is ErrorCode.RESOURCE_EXHAUSTED
    assert refused.error.retry_after_s == 1.0
    assert bench.finish() == texts(plain, *sessions)


def test_a_prompt_that_is_cached_is_not_computed_again(target: Make, plain: Make) -> None:
    bench = Bench(target("llama"), 40, max_num_seqs=4)
    first = session("a", 22, 6)
    again = Session("again", first.prompt, first.params, 5)
    bench.open(first)
    assert bench.step() == Step({}, {}, {"a": 22})
    bench.open(again)
    step = bench.step()
    assert step
    assert step.chunks == {"again": 2}
    assert bench.counters["prefix_hit_tokens"] == 20
    assert bench.finish() == texts(plain, first, again)


def test_whatever_comes_and_goes_steps_stay_within_their_limits_and_texts_are_right(
    target: Make, plain: Make, hidden: Make
) -> None:
    rng = random.Random(0)
    shared = session("shared", 24).prompt
    kinds = [session(str(i), rng.choice([1, 4, 7, 16, 25]), rng.randint(1, 20), i % 2) for i in range(8)]
    kinds += [Session("s", shared[:n], kinds[0].params, n) for n in (13, 20, 24)]
    expected = [plain("llama").text(kind) for kind in kinds]
    seen: Counter[str] = Counter()

    def offer(bench: Bench, texts: dict[str, tuple[int, ...]], id: str, rng: random.Random) -> None:
        said = len(bench.far.texts.get(id, ()))
        tree = hidden(bench.pending(id), texts[id][said : said + rng.randint(0, 6)], 61, 40, rng)[0]
        bench.offer(id, tree)

    @settings(max_examples=15)
    @given(seed=st.integers(0, 2**32))
    def run(seed: int) -> None:
        rng = random.Random(seed)
        seats = rng.randint(1, 4)
        limits = {"max_num_seqs": seats, "max_num_batched_tokens": rng.randint(seats, 40)}
        bench = Bench(target("llama"), rng.randint(12, 24), **limits)
        right: dict[str, tuple[int, ...]] = {}
        left: set[str] = set()
        for turn in range(60):
            bench.far.congested = rng.random() < 0.1
            if rng.random() < 0.3:
                kind = rng.randrange(len(kinds))
                id = str(turn)
                right[id] = expected[kind]
                opened = Session(id, kinds[kind].prompt, kinds[kind].params, kinds[kind].seed)
                speculative, priority = rng.random() < 0.7, rng.choice(list(Priority))
                bench.open(opened, speculative, priced=rng.random() < 0.5, priority=priority)
            for id in list(bench.scheduler.seats):
                if rng.random() < 0.02:
                    bench.close(id)
                    left.add(id)
                elif rng.random() < 0.4:
                    offer(bench, right, id, rng)
            bench.step(rng.choice([HOLDS_LAST, HOLDS_END]))
        bench.far.congested = False
        said = bench.finish()
        assert bench.far.failures == []
        assert {id: said[id] for id in right.keys() - left} == {id: right[id] for id in right.keys() - left}
        assert all(right[id][: len(said.get(id, ()))] == said.get(id, ()) for id in left)
        seen.update(bench.counters)
        seen["left"] += len(left)

    run()
    for event in (
        *("trees_verified", "plain_steps", "missed_trees", "stale_trees", "shrunk_trees"),
        *("preemptions", "prefix_hit_tokens", "chunked_prefills", "left"),
    ):
        assert seen[event] > 0, event


def seeded(bench: Bench, row_s: float) -> None:
    """Let a bench believe that a step takes a second, and so much more for each row; trees take less."""
    budget = bench.scheduler.budget
    for rows in (1, 2, 4, 8, 16, 32, 64):
        for _ in range(50):
            budget.cost.observe(rows, 1.0 + rows * row_s)
    for now in range(100):
        budget.idle()
        budget.stepped(now, now + 1, 1.0)
        budget.waited(0.3, first=False)
    budget.idle()


def test_a_priced_tree_gets_as_many_nodes_as_are_worth_their_time_and_others_all(target: Make) -> None:
    verified: dict[tuple[float, bool], int] = {}
    for row_s in (0.0, 1.0):
        for priced in (True, False):
            bench = Bench(target("llama"), 200)
            bench.open(session("a", 5), True, priced=priced)
            bench.step()
            seeded(bench, row_s)
            bench.offer("a", star(bench.pending("a"), 20, first=0.06))
            step = bench.step(HOLDS_LAST)
            assert step
            verified[row_s, priced] = len(step.trees["a"])
    assert verified[0.0, False] == verified[1.0, False] == 20
    assert verified[0.0, True] > 15
    assert verified[1.0, True] < 3


def test_an_outcome_tells_priced_sessions_what_a_node_must_be_worth(target: Make, plain: Make) -> None:
    told = {}
    for row_s in (0.0, 1 / 16):
        bench = Bench(target("llama"), 200)
        talks = [session("priced", 5, 20), session("fixed", 5, 20)]
        for talk in talks:
            bench.open(talk, True, priced=talk.id == "priced")
        bench.step()
        seeded(bench, row_s)
        for talk in talks:
            coming = plain("llama").text(talk)[1:9]
            bench.offer(talk.id, DraftTree.chain((bench.pending(talk.id), *coming), (1.0, *[0.9] * 8)))
        bench.step(HOLDS_LAST)
        priced, fixed = bench.far.replies[-2:]
        assert (fixed.wanted, fixed.price, fixed.pace) == (True, 0.0, 0.0)
        assert priced.wanted
        told[row_s] = priced
    assert told[0.0].price <= told[1 / 16].price
    assert told[0.0].pace > told[1 / 16].pace > 0


def test_a_session_whose_trees_do_not_pay_goes_on_without_and_sends_no_features(
    target: Make, plain: Make
) -> None:
    bench = Bench(target("llama"), 200, max_model_len=200)
    talk = session("a", 5, max_tokens=120)
    bench.open(talk, True, priced=True)
    bench.step()
    wanted = []
    while "a" in bench.scheduler.seats:
        seeded(bench, 1.0)
        if bench.far.replies[-1].wanted:
            bench.offer("a", star(bench.pending("a"), 9, first=0.1))
        bench.step()
        reply = bench.far.replies[-1]
        wanted.append(reply.wanted)
        assert reply.wanted or reply.features is None
    assert sum(wanted[:10]) > 5, "they are looked at first"
    assert sum(wanted[60:]) <= 6
    assert bench.far.texts == texts(plain, talk)


def documents(*schemas: str) -> list[Session]:
    """A session for each JSON schema."""
    prompts = [tuple(random.Random(schema).randrange(2, 200) for _ in range(9)) for schema in schemas]
    return [
        Session(f"document {i}", prompt, SamplingParams(max_tokens=24, json_schema=schema), i)
        for i, (prompt, schema) in enumerate(zip(prompts, schemas, strict=True))
    ]


def test_who_waits_for_a_grammar_holds_nobody_up_and_may_leave_meanwhile(writer: Any, run: Make) -> None:
    bench = Bench(writer.target, 80, grammars=writer.grammars, max_num_seqs=1)
    stays, leaves = documents('{"type": "object"}', '{"type": "integer"}')
    free = session("free", 9)
    for s in (stays, leaves, free):
        bench.open(s)
    step = bench.step()
    assert step
    assert step.chunks.keys() == {"free"}
    assert bench.waiting == [stays.id, leaves.id]
    bench.close(leaves.id)
    bench.hear()
    while "free" in bench.scheduler.seats:
        bench.step()
    expected = run(writer.target, [stays, free], grammars=writer.grammars)
    assert bench.finish() == expected
    assert bench.far.failures == []


def test_a_schema_that_does_not_compile_is_refused_before_it_reaches_a_step(writer: Any, run: Make) -> None:
    bench = Bench(writer.target, 80, grammars=writer.grammars, max_num_seqs=4)
    bad, good = documents('{"type": "objekt"}', '{"type": "integer"}')
    bench.open(good)
    bench.hear()
    bench.step()
    bench.open(bad)
    bench.hear()
    (refused,) = bench.far.failures
    assert (refused.session, refused.error.code) == (bad.id, ErrorCode.INVALID_ARGUMENT)
    assert refused.error.message == "json_schema does not compile: Invalid type: objekt"
    assert bench.finish() == run(writer.target, [good], grammars=writer.grammars)


def test_preempted_documents_go_on_as_if_nothing_had_been(writer: Any, run: Make) -> None:
    bench = Bench(writer.target, 14, grammars=writer.grammars, max_num_seqs=4)
    sessions = documents(
        '{"type": "object"}', '{"type": "array"}', '{"type": "string"}', '{"type": "integer"}'
    )
    for s in sessions:
        bench.open(s)
        bench.hear()
    assert bench.finish() == run(writer.target, sessions, grammars=writer.grammars)
    assert bench.counters["preemptions"] > 0


def test_a_document_that_cannot_go_on_ends_alone_and_its_drafter_is_told(writer: Any, run: Make) -> None:
    bench = Bench(writer.target, 80, grammars=writer.grammars, max_num_seqs=4)
    closing = tuple(i for word, i in writer.ids.items() if "}" in word)
    good, bad = documents('{"type": "object"}', '{"const": "12}"}')
    bad = replace(bad, params=replace(bad.params, stop_token_ids=closing))
    for s in (good, bad):
        bench.open(s, speculative=True)
        bench.hear()
    bench.finish()
    (failed,) = bench.far.failures
    assert (failed.session, failed.error.code) == (bad.id, ErrorCode.INVALID_ARGUMENT)
    assert "cannot go on by its json_schema" in failed.error.message
    assert bench.far.texts[good.id] == run(writer.target, [good], grammars=writer.grammars)[good.id]
