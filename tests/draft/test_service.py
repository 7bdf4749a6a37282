"""The draft service over a verify service of the same process: what callers hear, and what is left behind."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest

from services.draft.drafter import Drafter
from services.draft.service import DraftService, RoundTimes
from services.engine.target import Target
from services.sessions.memory import MemoryStore
from services.sessions.store import Append
from services.types.configuration import DraftConfig, TreeShape, VerifyLimits
from services.types.errors import ErrorCode, WealdError
from services.types.messages import (
    Call,
    Draining,
    Event,
    Finished,
    Load,
    Moved,
    Request,
    Response,
    Round,
    Started,
)
from services.types.replica import ReplicaKind
from services.types.sampling import SamplingParams
from services.types.session import MOVES, FinishReason, Session
from services.types.tree import DraftTree
from services.verify.grammar import Grammars
from services.verify.service import VerifyService
from services.verify.verifier import Verifier

Make = Callable[..., Any]

MARK = b"the target's"
SMALL = {"vocab_size": 13}
"""Of so few tokens the wide trees of a random head often hold the next ones."""
TREES = DraftConfig(levels=3, beam=5, budget=30)


class Wire:
    """Both ends of a link within one process."""

    def __init__(self, address: str, verifies: VerifyService, drafts: DraftService) -> None:
        self.address = address
        self.connected = True
        self.draining = False
        self.load = 0
        self.congested = False
        self.late: list[Request] | None = None
        """What is held back, if anything is to be."""
        self.fingerprint = MARK
        self._verifies, self._drafts = verifies, drafts
        self._loop = asyncio.get_running_loop()

    @property
    def open(self) -> bool:
        return self.connected and not self.draining

    def send(self, request: Request) -> None:
        if self.late is not None:
            self.late.append(request)
        elif self.connected:
            self._verifies.submit(self, request)

    def post(self, responses: Sequence[Response]) -> None:
        self._loop.call_soon_threadsafe(self._deliver, responses)

    def cut(self) -> None:
        self.connected = False
        self._verifies.submit(self, None)
        self._drafts.broken(self, WealdError(ErrorCode.UNAVAILABLE, f"{self.address} is gone"))  # type: ignore[arg-type]

    def mend(self) -> None:
        self.connected = True
        self._drafts.linked(self)  # type: ignore[arg-type]

    def release(self) -> None:
        for request in self.late or ():
            self._verifies.submit(self, request)
        self.late = None

    def drain(self) -> None:
        self.draining = True
        self._drafts.received(self, Draining())  # type: ignore[arg-type]

    def _deliver(self, responses: Sequence[Response]) -> None:
        for response in responses:
            if self.connected:
                self._drafts.received(self, response)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Pair:
    """A draft service and its verify services."""

    drafts: DraftService
    verifies: Sequence[VerifyService]
    wires: Sequence[Wire]

    async def idle(self) -> None:
        """Wait until no session is left anywhere; no page is lost then."""
        async with asyncio.timeout(60):
            pools = [self.drafts.drafter.pool, *(service.verifier.pool for service in self.verifies)]
            while len(self.drafts) or any(pool.free_pages < pool.num_pages for pool in pools):
                await asyncio.sleep(0.005)
        self.drafts.drafter.check()
        for service in self.verifies:
            service.verifier.check()
            assert service.load() == Load(0, 0, service.verifier.pool.num_pages)


@asynccontextmanager
async def serve(
    target: Callable[[], Target],
    drafter: Drafter,
    *,
    verifiers: int = 1,
    max_num_seqs: int = 64,
    observe: Callable[[RoundTimes], None] | None = None,
    store: MemoryStore | None = None,
    limits: VerifyLimits | None = None,
    grammars: Grammars | None = None,
) -> AsyncIterator[Pair]:
    """Running services, which hold nothing when all is over."""
    tasks = asyncio.all_tasks()
    limits = limits or VerifyLimits(expiry_s=0.1)
    verifies = [
        VerifyService(Verifier(target(), num_pages=400, page_size=4, grammars=grammars), limits, MARK)
        for _ in range(verifiers)
    ]
    drafts = DraftService(drafter, MARK, max_num_seqs=max_num_seqs, observe=observe)
    wires = [Wire(f"verify:{i}", service, drafts) for i, service in enumerate(verifies)]
    drafts.links = {wire.address: wire for wire in wires}  # type: ignore[misc]
    for service in verifies:
        service.start(lambda: None)
    drafts.start(store or MemoryStore())
    try:
        pair = Pair(drafts, verifies, wires)
        yield pair
        await pair.idle()
    finally:
        await drafts.stop()
        assert asyncio.all_tasks() == tasks
        for service in verifies:
            service.stop()


async def listen(service: DraftService, call: Call, leave_after: int | None = None) -> list[Event]:
    """The events of a generation, or so many of them."""
    heard: list[Event] = []
    async with aclosing(service.generate(call)) as events:  # type: ignore[type-var]
        async for event in events:
            heard.append(event)
            if len(heard) == leave_after:
                break
    return heard


def rounds(heard: Sequence[Event]) -> list[Round]:
    return [event for event in heard if isinstance(event, Round)]


def said(heard: Sequence[Event]) -> tuple[int, ...]:
    return tuple(token for round in rounds(heard) for token in round.tokens)


def session(id: str, prompt: int = 9, max_tokens: int = 30, **params: Any) -> Session:
    rng = random.Random(id)
    chosen = {"ignore_eos": True} | params
    tokens = tuple(rng.randrange(13) for _ in range(prompt))
    return Session(id, tokens, SamplingParams(max_tokens=max_tokens, **chosen), rng.getrandbits(64))


def call(session: Session, **options: Any) -> Call:
    params = replace(session.params, seed=session.seed)
    return Call(session.id, session.prompt, session.output, params, **options)


@pytest.fixture
def drafter(target: Make, head: Make) -> Callable[..., Drafter]:
    """`drafter(num_pages)` drafts for the small target."""

    def drafter(num_pages: int = 400, kind: type[Drafter] = Drafter) -> Drafter:
        return kind(head(target("llama", **SMALL), **SMALL), TREES, num_pages=num_pages, page_size=4)

    return drafter


@pytest.fixture
def text(plain: Make) -> Callable[[Session], tuple[int, ...]]:
    """What the target says."""
    return lambda session: plain("llama", **SMALL).text(session)


@pytest.fixture
def small(model: Make) -> Callable[[], Target]:
    """`small()` is a target of its own for each verifier, as each of them has a thread."""
    return lambda: Target(model("llama", **SMALL))


def test_callers_hear_what_the_target_says_round_by_round(small: Make, drafter: Make, text: Make) -> None:
    rng = random.Random(1)
    sessions = [
        session(
            str(i),
            rng.choice([1, 4, 5, 16, 40]),
            rng.randint(1, 40),
            temperature=i % 3 / 2,
            ignore_eos=i % 2 == 1,
        )
        for i in range(18)
    ]

    async def scenario() -> tuple[list[list[Event]], dict[str, int], dict[str, int]]:
        async with serve(small, drafter()) as pair:
            calls = [call(s, speculative=i % 4 > 0) for i, s in enumerate(sessions)]
            heard = await asyncio.gather(*(listen(pair.drafts, c) for c in calls))
            return heard, pair.drafts.counters(), pair.verifies[0].counters()

    heard, drafted, verified = asyncio.run(scenario())
    for i, (s, events) in enumerate(zip(sessions, heard, strict=True)):
        started, *middle, finished = events
        assert started == Started(s.id, s.seed, 0, "verify:0")
        assert said(events) == text(s)
        at = len(s.prompt)
        for round in middle:
            assert isinstance(round, Round)
            assert round.position == at
            at += len(round.tokens)
            assert round.finish is None or round is middle[-1]
            assert 1 <= round.verified <= max(round.drafted, 1) <= (30 if i % 4 else 1)
            assert round.tree is None
        reason = middle[-1].finish
        assert reason is (FinishReason.LENGTH if len(text(s)) == s.params.max_tokens else FinishReason.STOP)
        assert finished == Finished(reason, len(s.prompt), len(text(s)), 0)
    assert drafted["trees_drafted"] > 0
    assert verified["trees_verified"] > 0
    assert sum(len(said(events)) - len(rounds(events)) for events in heard) > 20


def test_coupling_is_the_calls_choice_or_else_the_replicas_and_changes_no_text(
    small: Make, drafter: Make, text: Make
) -> None:
    async def scenario(coupled: bool | None, draft: DraftConfig | None) -> int:
        async with serve(small, drafter()) as pair:
            sessions = [session(str(i), temperature=float(i % 2)) for i in range(6)]
            calls = [call(s, coupled=coupled, draft=draft) for s in sessions]
            heard = await asyncio.gather(*(listen(pair.drafts, c) for c in calls))
            assert [said(events) for events in heard] == [text(s) for s in sessions]
            return pair.drafts.counters()["trees_coupled"]

    off = replace(TREES, coupled=False)
    assert asyncio.run(scenario(None, None)) > 0
    assert asyncio.run(scenario(None, off)) == 0
    assert asyncio.run(scenario(False, None)) == 0
    assert asyncio.run(scenario(True, off)) > 0


def test_a_caller_who_wants_trees_sees_which_path_of_each_was_accepted(
    small: Make, drafter: Make, text: Make
) -> None:
    s = session("a")
    config = DraftConfig(TreeShape.CHAIN, levels=2)

    async def scenario() -> tuple[list[Event], list[Event]]:
        async with serve(small, drafter()) as pair:
            heard = await listen(pair.drafts, call(s, want_trees=True))
            chain = call(replace(s, id="chain"), want_trees=True, draft=config)
            return heard, await listen(pair.drafts, chain)

    wide, chain = asyncio.run(scenario())
    accepted = 0
    for heard in (wide, chain):
        assert said(heard) == text(s)
        pending = None
        for round in rounds(heard):
            if tree := round.tree:
                assert (len(tree), tree.tokens[0]) == (round.drafted, pending)
                assert round.accepted == (tree.path(round.accepted[-1]) if round.accepted else ())
                path = tuple(tree.tokens[node] for node in round.accepted)
                assert round.tokens[: len(path)] == path
                accepted += len(path)
            pending = round.tokens[-1]
    assert accepted > 0
    assert max(len(round.tree) for round in rounds(wide) if round.tree) == 30
    assert {round.tree.parents for round in rounds(chain) if round.tree} == {(-1, 0, 1)}


def test_where_the_pages_of_the_head_run_out_sessions_go_on_by_plain_steps(
    small: Make, drafter: Make, text: Make
) -> None:
    sessions = [session(str(i), 12, 40) for i in range(8)]

    async def scenario() -> tuple[list[list[Event]], dict[str, int], dict[str, int]]:
        async with serve(small, drafter(num_pages=40)) as pair:
            heard = await asyncio.gather(*(listen(pair.drafts, call(s)) for s in sessions))
            return heard, pair.drafts.counters(), pair.verifies[0].counters()

    heard, drafted, verified = asyncio.run(scenario())
    assert [said(events) for events in heard] == [text(s) for s in sessions]
    assert 0 < drafted["retired_sessions"] < 8
    assert verified["trees_verified"] > 0
    assert verified["plain_steps"] > 8


def test_a_seed_that_is_drawn_is_told_and_gives_the_same_text_again(
    small: Make, drafter: Make, text: Make
) -> None:
    s = session("a")
    unseeded = replace(call(s), params=s.params)

    async def scenario() -> list[list[Event]]:
        async with serve(small, drafter()) as pair:
            return [await listen(pair.drafts, replace(unseeded, session=id)) for id in "ab"]

    first, second = asyncio.run(scenario())
    seeds = [heard[0].seed for heard in (first, second) if isinstance(heard[0], Started)]
    assert seeds[0] != seeds[1]
    for seed, heard in zip(seeds, (first, second), strict=True):
        assert said(heard) == text(replace(s, seed=seed))


def test_a_call_goes_on_behind_what_was_delivered_elsewhere(small: Make, drafter: Make, text: Make) -> None:
    s = session("a", presence_penalty=0.8)
    whole = text(s)

    async def scenario() -> None:
        async with serve(small, drafter()) as pair:
            for count in (1, 14, 29):
                heard = await listen(pair.drafts, call(replace(s, output=whole[:count])))
                assert said(heard) == whole[count:]
                assert rounds(heard)[0].position == 9 + count
                finished = heard[-1]
                assert isinstance(finished, Finished)
                assert (finished.prompt_tokens, finished.output_tokens) == (9, 30)

    asyncio.run(scenario())


def test_whoever_leaves_leaves_nothing_behind(small: Make, drafter: Make, text: Make) -> None:
    rng = random.Random(2)

    async def one(service: DraftService, s: Session) -> None:
        listening = asyncio.create_task(listen(service, call(s), leave_after=rng.choice([None, 1, 2, 5])))
        if rng.random() < 0.3:
            await asyncio.sleep(rng.random() * 0.05)
            listening.cancel()
        try:
            heard = await listening
        except asyncio.CancelledError:
            return
        assert said(heard) == text(s)[: len(said(heard))]

    async def scenario() -> None:
        kinds = [session(str(i), i + 1, 8 + i) for i in range(10)]
        async with serve(small, drafter(), verifiers=2) as pair:
            crowd = (one(pair.drafts, replace(rng.choice(kinds), id=f"crowd {i}")) for i in range(60))
            await asyncio.gather(*crowd)

    asyncio.run(scenario())


def test_the_next_turn_of_a_chat_takes_its_prefix_from_both_caches(
    small: Make, drafter: Make, text: Make
) -> None:
    first = session("first", 21, 30)
    prompt = (*first.prompt, *text(first), 1, 2, 3, 4, 5)
    second = replace(session("second", max_tokens=12), prompt=prompt)

    async def scenario() -> None:
        async with serve(small, drafter()) as pair:
            await listen(pair.drafts, call(first))
            await pair.idle()
            before, told = pair.verifies[0].counters(), pair.drafts.counters()
            started, *heard = await listen(pair.drafts, call(second))
            assert said(heard) == text(second)
            after, since = pair.verifies[0].counters(), pair.drafts.counters()
            # 50 of the first session's 51 tokens were computed, in 12 full pages.
            assert after["tokens_prefilled"] - before["tokens_prefilled"] == 56 - 48
            assert isinstance(started, Started)
            assert started.cached_tokens >= 40
            new = 56 + 12 - started.cached_tokens
            assert 0 < since["tokens_forwarded"] - told["tokens_forwarded"] < new

    asyncio.run(scenario())


def test_what_cannot_be_served_is_refused_and_neighbours_go_on(
    small: Make, drafter: Make, text: Make
) -> None:
    neighbour = session("neighbour", max_tokens=100)
    bad = {
        "unknown": (Call("bad", (), (), SamplingParams()), ErrorCode.UNKNOWN_SESSION),
        "token": (Call("bad", (1, 13), (), SamplingParams()), ErrorCode.INVALID_ARGUMENT),
        "output token": (Call("bad", (1,), (-1,), SamplingParams()), ErrorCode.INVALID_ARGUMENT),
        "bias": (Call("bad", (1,), (), SamplingParams(logit_bias={99: 1.0})), ErrorCode.INVALID_ARGUMENT),
        "length": (Call("bad", (1,) * 256, (), SamplingParams()), ErrorCode.CONTEXT_LENGTH_EXCEEDED),
    }

    async def scenario() -> None:
        async with serve(small, drafter(), max_num_seqs=2) as pair:
            listening = asyncio.create_task(listen(pair.drafts, call(neighbour)))
            await asyncio.sleep(0)
            for name, (refused, code) in bad.items():
                with pytest.raises(WealdError) as told:
                    await listen(pair.drafts, replace(refused, session=name))
                assert told.value.code is code, name
            other = asyncio.create_task(listen(pair.drafts, call(session("other", max_tokens=100))))
            await asyncio.sleep(0)
            with pytest.raises(WealdError, match="2 sessions are drafted here already; retry") as told:
                await listen(pair.drafts, call(session("third")))
            assert told.value.code is ErrorCode.RESOURCE_EXHAUSTED
            assert told.value.retry_after_s == 1.0
            assert said(await listening) == text(neighbour)
            await other

    asyncio.run(scenario())


def is_whole(heard: Sequence[Event], s: Session, text: Sequence[int]) -> bool:
    """Whether the events tell a text once, token behind token, from its first event to its last."""
    at = len(s.prompt) + len(s.output)
    for round in rounds(heard):
        assert round.position == at
        at += len(round.tokens)
    assert isinstance(heard[0], Started)
    assert isinstance(heard[-1], Finished)
    assert heard[-1].output_tokens == len(text)
    return s.output + said(heard) == tuple(text)


def moves(heard: Sequence[Event]) -> list[Moved]:
    return [event for event in heard if isinstance(event, Moved)]


def test_sessions_of_a_replica_that_is_gone_go_on_at_another_one(
    small: Make, drafter: Make, text: Make
) -> None:
    sessions = [session(str(i), max_tokens=80, temperature=i % 2) for i in range(8)]

    async def scenario() -> None:
        async with serve(small, drafter(), verifiers=2) as pair:
            listening = [
                asyncio.create_task(listen(pair.drafts, call(s, speculative=s.id != "3"))) for s in sessions
            ]
            await asyncio.sleep(0.05)
            pair.wires[0].cut()
            heard = await asyncio.gather(*listening)
            assert all(is_whole(one, s, text(s)) for one, s in zip(heard, sessions, strict=True))
            moved = [move for one in heard for move in moves(one)]
            assert 0 < len(moved) < 8
            assert set(moved) == {Moved(ReplicaKind.VERIFY, "verify:1", lost=True)}
            assert pair.drafts.counters()["recovered_sessions"] == len(moved)
            pair.wires[1].cut()
            with pytest.raises(WealdError, match="no verify replica"):
                await listen(pair.drafts, call(session("late")))

    asyncio.run(scenario())


@pytest.mark.parametrize("seed", range(4))
def test_replicas_that_come_and_go_at_any_moment_change_no_text(
    small: Make, drafter: Make, text: Make, seed: int
) -> None:
    rng = random.Random(seed)
    sessions = [session(f"{seed} {i}", max_tokens=150, temperature=i % 2) for i in range(5)]

    async def disturb(pair: Pair) -> None:
        while True:
            wire = rng.choice(pair.wires)
            wire.cut()
            await asyncio.sleep(rng.choice([0, 0.001, 0.03]))
            wire.mend()
            await asyncio.sleep(rng.choice([0.01, 0.1, 0.2]))

    async def scenario() -> int:
        async with serve(small, drafter(), verifiers=2) as pair:
            disturbing = asyncio.create_task(disturb(pair))
            heard = await asyncio.gather(*(listen(pair.drafts, call(s)) for s in sessions))
            disturbing.cancel()
            await asyncio.gather(disturbing, return_exceptions=True)
            assert all(is_whole(one, s, text(s)) for one, s in zip(heard, sessions, strict=True))
            return sum(len(moves(one)) for one in heard)

    assert asyncio.run(scenario()) > 0


def test_a_session_without_any_replica_waits_for_one_but_not_for_ever(
    small: Make, drafter: Make, text: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    s = session("a", max_tokens=100)

    async def scenario() -> None:
        async with serve(small, drafter()) as pair:
            listening = asyncio.create_task(listen(pair.drafts, call(s)))
            await asyncio.sleep(0.05)
            pair.wires[0].cut()
            await asyncio.sleep(0.2)
            assert not listening.done()
            pair.wires[0].mend()
            assert is_whole(await listening, s, text(s))
            monkeypatch.setattr("services.draft.service.RECOVER_S", 0.3)
            listening = asyncio.create_task(listen(pair.drafts, call(replace(s, id="b"))))
            await asyncio.sleep(0.05)
            pair.wires[0].cut()
            with pytest.raises(WealdError, match="gone; no other verify replica could serve") as told:
                await listening
            assert told.value.code is ErrorCode.UNAVAILABLE

    asyncio.run(scenario())


def test_a_session_stays_where_its_opening_arrives_after_all(small: Make, drafter: Make, text: Make) -> None:
    s = session("a", max_tokens=20)

    async def scenario() -> None:
        async with serve(small, drafter()) as pair:
            (wire,) = pair.wires
            wire.late = []
            listening = asyncio.create_task(listen(pair.drafts, call(s)))
            await asyncio.sleep(0.05)
            wire.cut()
            await asyncio.sleep(0.05)
            # The stream is back, but too soon for the session to choose it anew.
            wire.connected = wire.draining = True
            wire.release()
            heard = await listening
            assert is_whole(heard, s, text(s))
            assert moves(heard) == []

    asyncio.run(scenario())


def test_a_replica_that_drains_hands_its_sessions_over_once_there_is_another(
    small: Make, drafter: Make, text: Make
) -> None:
    sessions = [session(str(i), max_tokens=120) for i in range(3)]

    async def scenario() -> None:
        async with serve(small, drafter(), verifiers=2) as pair:
            pair.wires[1].cut()
            listening = [asyncio.create_task(listen(pair.drafts, call(s))) for s in sessions]
            await asyncio.sleep(0.05)
            pair.wires[0].drain()
            await asyncio.sleep(0.05)
            assert pair.verifies[0].load().running == 3
            pair.wires[1].mend()
            heard = await asyncio.gather(*listening)
            assert all(is_whole(one, s, text(s)) for one, s in zip(heard, sessions, strict=True))
            assert [moves(one) for one in heard] == [[Moved(ReplicaKind.VERIFY, "verify:1", lost=False)]] * 3
            assert pair.drafts.counters()["handed_over_sessions"] == 3

    asyncio.run(scenario())


def test_a_full_replica_sends_new_sessions_on_and_running_ones_wait_for_it(
    small: Make, drafter: Make, text: Make
) -> None:
    sessions = [session(str(i), max_tokens=60) for i in range(2)]
    limits = VerifyLimits(max_num_seqs=1, max_waiting=0, expiry_s=0.1)

    async def scenario() -> None:
        async with serve(small, drafter(), verifiers=2, limits=limits) as pair:
            listening = [asyncio.create_task(listen(pair.drafts, call(s))) for s in sessions]
            await asyncio.sleep(0.05)
            assert [service.load().running for service in pair.verifies] == [1, 1]
            with pytest.raises(WealdError, match="retry in a second") as told:
                await listen(pair.drafts, call(session("third")))
            assert told.value.code is ErrorCode.RESOURCE_EXHAUSTED
            pair.wires[0].cut()
            heard = await asyncio.gather(*listening)
            assert all(is_whole(one, s, text(s)) for one, s in zip(heard, sessions, strict=True))
            assert sum(len(moves(one)) for one in heard) >= 1

    asyncio.run(scenario())


def test_a_later_call_takes_a_session_over_from_an_earlier_one(
    small: Make, drafter: Make, text: Make
) -> None:
    s = session("a", max_tokens=100)

    async def scenario() -> None:
        async with serve(small, drafter()) as pair:
            earlier = asyncio.create_task(listen(pair.drafts, call(s)))
            await asyncio.sleep(0.05)
            assert is_whole(await listen(pair.drafts, call(s)), s, text(s))
            with pytest.raises(WealdError, match="a later call has taken") as told:
                await earlier
            assert told.value.code is ErrorCode.STALE_EPOCH

    asyncio.run(scenario())


def test_a_session_that_another_replica_leased_ends_here(small: Make, drafter: Make, text: Make) -> None:
    s, store = session("a", max_tokens=200), MemoryStore()

    async def scenario() -> None:
        async with serve(small, drafter(), store=store) as pair:
            listening = asyncio.create_task(listen(pair.drafts, call(s)))
            await asyncio.sleep(0.1)
            record = await store.lease(s.id)
            with pytest.raises(WealdError) as told:
                await listening
            assert told.value.code is ErrorCode.STALE_EPOCH
            output = (await store.load(s.id)).session.output
            assert output == record.session.output == text(s)[: len(output)]

    asyncio.run(scenario())


@pytest.mark.parametrize("kept", [0, 7, None])
def test_the_journal_gives_the_rest_of_a_session_to_whoever_knows_its_id(
    small: Make, drafter: Make, text: Make, kept: int | None
) -> None:
    s, store = session("a", max_tokens=40, temperature=1.0), MemoryStore()
    by_id = Call(s.id, (), (), SamplingParams())

    async def scenario() -> None:
        async with serve(small, drafter(), store=store) as pair:
            await listen(pair.drafts, call(s), leave_after=4)
        if kept is None:
            async with serve(small, drafter(), store=store) as pair:
                assert is_whole(await listen(pair.drafts, by_id), s, text(s))
        else:
            record = await store.load(s.id)
            tokens = Append(s.id, record.epoch + MOVES, 0, text(s)[:kept])
            await store.append([tokens])
        async with serve(small, drafter(), store=store) as pair:
            heard = await listen(pair.drafts, by_id)
            assert is_whole(heard, s, text(s))
            assert len(rounds(heard)) == 1 or kept is not None
            # A caller who has a part gets the rest, whichever of the two is ahead.
            delivered = replace(s, output=text(s)[:9])
            assert is_whole(await listen(pair.drafts, call(delivered)), delivered, text(s))

    asyncio.run(scenario())


def test_callers_hear_logprobs_but_not_of_tokens_that_the_journal_had(
    small: Make, drafter: Make, plain: Make
) -> None:
    s, store = session("a", logprobs=2), MemoryStore()
    text = plain("llama", **SMALL).text(s)
    log_probs = plain("llama", **SMALL).run((*s.prompt, *text))[1][len(s.prompt) - 1 :].log_softmax(-1)

    async def scenario() -> None:
        async with serve(small, drafter(), store=store) as pair:
            heard = await listen(pair.drafts, call(s), leave_after=4)
            assert all(len(round.logprobs) == len(round.tokens) for round in rounds(heard))
        async with serve(small, drafter(), store=store) as pair:
            replay, *rest = rounds(await listen(pair.drafts, call(s)))
            assert replay.verified == 0
            assert replay.logprobs == ()
            told = [one for round in rest for one in round.logprobs]
            known = len(replay.tokens)
            for row, token, one in zip(log_probs[known:-1], text[known:], told, strict=True):
                assert one.logprob == pytest.approx(float(row[token]), abs=1e-5)
                assert [token for token, _ in one.top] == row.topk(2).indices.tolist()

    asyncio.run(scenario())


def test_documents_of_a_schema_are_drafted_and_move_between_verify_replicas(
    writer: Any, model: Make, head: Make, run: Make
) -> None:
    params = SamplingParams(max_tokens=40, json_schema='{"type": "array", "items": {"type": "integer"}}')
    sessions = [Session(str(i), (9, 5 + i), params, i) for i in range(6)]
    texts = run(writer.target, sessions, grammars=writer.grammars)
    sizes = {"vocab_size": writer.target.vocab_size}

    def own_target() -> Target:
        return Target(model("llama", **sizes, eos_token_id=[0, 1], max_position_embeddings=512))

    drafter = Drafter(head(writer.target, **sizes), TREES, num_pages=800, page_size=4)

    async def scenario() -> None:
        async with serve(own_target, drafter, verifiers=2, grammars=writer.grammars) as pair:
            listening = [asyncio.create_task(listen(pair.drafts, call(s))) for s in sessions]
            await asyncio.sleep(0.3)
            pair.wires[0].cut()
            for s, heard in zip(sessions, await asyncio.gather(*listening), strict=True):
                assert said(heard) == texts[s.id]
            bad = replace(sessions[0], id="bad", params=replace(params, json_schema="[]"))
            with pytest.raises(
                WealdError, match="json_schema does not compile: it is no JSON object"
            ) as told:
                await listen(pair.drafts, call(bad))
            assert told.value.code is ErrorCode.INVALID_ARGUMENT

    asyncio.run(scenario())


def test_a_replica_of_another_target_gets_no_sessions(small: Make, drafter: Make) -> None:
    async def scenario() -> None:
        async with serve(small, drafter()) as pair:
            pair.wires[0].fingerprint = b"another one's"
            with pytest.raises(WealdError, match="serves another target than this head") as told:
                await listen(pair.drafts, call(session("a")))
            assert told.value.code is ErrorCode.INCOMPATIBLE_CHECKPOINT

    asyncio.run(scenario())


def test_draining_lets_sessions_finish_and_refuses_new_ones(small: Make, drafter: Make, text: Make) -> None:
    s = session("a", max_tokens=100)

    async def scenario() -> None:
        async with serve(small, drafter()) as pair:
            listening = asyncio.create_task(listen(pair.drafts, call(s)))
            await asyncio.sleep(0)
            assert await pair.drafts.drain(0.0) is False
            with pytest.raises(WealdError, match="shutting down; ask another one") as told:
                await listen(pair.drafts, call(session("late")))
            assert told.value.code is ErrorCode.UNAVAILABLE
            assert await pair.drafts.drain(60.0) is True
            assert said(await listening) == text(s)

    asyncio.run(scenario())


class Failing(Drafter):
    """A drafter that fails when it is told to."""

    fails = False

    def propose(self, ids: Sequence[str], terms: Any = None) -> list[DraftTree]:
        if self.fails:
            raise MemoryError("out of memory")
        return super().propose(ids)


def test_a_drafter_that_fails_ends_sessions_with_an_error_and_serves_the_next(
    small: Make, drafter: Make, text: Make
) -> None:
    failing, s = drafter(kind=Failing), session("a")

    async def scenario() -> None:
        async with serve(small, failing) as pair:
            failing.fails = True
            plain = asyncio.create_task(listen(pair.drafts, call(session("plain"), speculative=False)))
            with pytest.raises(WealdError, match="drafting failed; the log") as told:
                await listen(pair.drafts, call(s))
            assert told.value.code is ErrorCode.INTERNAL
            failing.fails = False
            assert said(await listen(pair.drafts, call(s))) == text(s)
            assert said(await plain) == text(session("plain"))

    asyncio.run(scenario())


def test_the_parts_of_every_round_with_a_tree_are_told(small: Make, drafter: Make) -> None:
    seen: list[RoundTimes] = []

    async def scenario() -> list[Event]:
        async with serve(small, drafter(), observe=seen.append) as pair:
            return await listen(pair.drafts, call(session("a")))

    heard = asyncio.run(scenario())
    assert len(seen) == sum(round.verified > 1 for round in rounds(heard))
    for times in seen:
        step = times.step.forward + times.step.accept + times.step.commit
        assert 0 < step <= times.turnaround <= times.flight < times.flight + times.draft <= times.wall
