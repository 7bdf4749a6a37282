"""The two services as processes that talk over gRPC: the text is that of the decoder in this process.

Four replicas serve most tests: a verifier with room, one that is short of pages, tokens and patience, a
drafter for the first, and one for both.
"""

import asyncio
import random
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from services.bench.replicas import Replica, replica
from services.types.configuration import DraftConfig
from services.types.errors import ErrorCode, WealdError
from services.types.messages import Call, Close, Finished, Open, Proposal, Proposals, Round
from services.types.sampling import SamplingParams
from services.types.session import Session
from services.types.tree import DraftTree

pytestmark = pytest.mark.slow

Make = Callable[..., Any]

PATIENCE_S = 60.0
SHORT = {
    "kv-cache-memory": "144KiB",  # 12 pages of 16 tokens
    "max-model-len": 96,
    "max-num-seqs": 8,
    "max-num-batched-tokens": 64,
    "max-waiting": 40,
    "expiry": 2,
}


@pytest.fixture(scope="module")
def verifier(tiny: Any) -> Iterator[Replica]:
    with replica(*tiny.verify, "--kv-cache-memory", "16MiB", threads=1) as started:
        yield started


@pytest.fixture(scope="module")
def short(tiny: Any) -> Iterator[Replica]:
    limits = (word for name, limit in SHORT.items() for word in (f"--{name}", limit))
    with replica(*tiny.verify, *limits, threads=1) as started:
        yield started


@pytest.fixture(scope="module")
def drafter(tiny: Any, verifier: Replica) -> Iterator[Replica]:
    with replica(*tiny.draft(verifier.address), "--kv-cache-memory", "8MiB", threads=1) as started:
        yield started


@pytest.fixture(scope="module")
def second(tiny: Any, verifier: Replica, short: Replica) -> Iterator[Replica]:
    addresses = verifier.address, short.address
    with replica(*tiny.draft(*addresses), "--kv-cache-memory", "8MiB", threads=1) as started:
        yield started


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_generation_says_over_the_wire_what_it_says_in_this_process(
    temperature: float, tiny: Any, verifier: Replica, drafter: Replica, reach: Make, hear: Make, call: Make
) -> None:
    params = SamplingParams(max_tokens=80, temperature=temperature, ignore_eos=True)
    session = Session(f"one at {temperature}", (1, 5, 3, 8), params, 11)
    again = replace(session, id=f"plain at {temperature}")

    async def scenario() -> tuple[Any, Any]:
        async with reach(verifier.address, drafter.address) as services:
            drafted = await hear(services.drafter, call(session))
            plain = await hear(services.drafter, call(again, speculative=False))
            await services.idle()
            return drafted, plain

    drafted, plain = asyncio.run(scenario())
    here = tuple(t for step in tiny.models.decode(session, DraftConfig()) for t in step.outcome.tokens)
    assert here == tiny.text(session)
    assert drafted.is_whole(session, tiny)
    assert plain.is_whole(again, tiny)
    assert len(drafted.rounds) < 60
    assert max(round.verified for round in drafted.rounds) == 60
    assert {(round.drafted, round.verified) for round in plain.rounds} == {(0, 1)}
    assert len(plain.rounds) == 80


async def crowd(
    drafter: Any, sessions: Sequence[Session], hear: Make, call: Make, tiny: Any, leaving: float = 0.0
) -> int:
    """All sessions at once, coming and, some of them, leaving at random times; how many left."""
    rng = random.Random(sessions[0].id)

    async def one(session: Session, wait_s: float, leave_after: int | None, speculative: bool) -> None:
        await asyncio.sleep(wait_s)
        answer = await hear(drafter, call(session, speculative=speculative), leave_after)
        if answer.finished:
            assert answer.is_whole(session, tiny), session.id
        else:
            assert leave_after
            assert answer.tokens == tiny.text(session)[: len(answer.tokens)]

    left = 0
    async with asyncio.TaskGroup() as tasks:
        for session in sessions:
            leave_after = rng.randint(1, 6) if rng.random() < leaving else None
            left += leave_after is not None
            tasks.create_task(one(session, rng.random() * 0.4, leave_after, rng.random() < 0.75))
    return left


def since(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    """What was counted in between."""
    return {name: count - before.get(name, 0) for name, count in after.items()}


def test_sessions_that_come_and_go_are_each_as_if_they_were_alone(
    tiny: Any, verifier: Replica, drafter: Replica, reach: Make, hear: Make, call: Make, mixed: Make
) -> None:
    sessions = mixed("crowd", 32, prompts=(1, 2, 15, 16, 17, 33, 90), tokens=(10, 60))
    again = [replace(session, id=f"{session.id} again") for session in sessions[::4]]

    async def scenario() -> tuple[int, dict[str, int]]:
        async with reach(verifier.address, drafter.address) as services:
            before = await services.counters()
            left = await crowd(services.drafter, sessions, hear, call, tiny, leaving=0.25)
            left += await crowd(services.drafter, again, hear, call, tiny)
            await services.idle()
            return left, since(before, await services.counters())

    left, counted = asyncio.run(scenario())
    assert left > 3
    for event in ("trees_verified", "plain_steps", "prefix_hit_tokens"):
        assert counted[event] > 0, event


def test_want_of_pages_and_tokens_changes_no_text(
    tiny: Any, short: Replica, drafting: Make, reach: Make, hear: Make, call: Make, mixed: Make
) -> None:
    events = (
        *("trees_verified", "plain_steps", "shrunk_trees", "preemptions"),
        *("prefix_hit_tokens", "chunked_prefills"),
    )

    async def scenario() -> tuple[dict[str, int], int]:
        tasks = asyncio.all_tasks()
        async with drafting(short.address) as drafter, reach(short.address, drafter) as services:
            before, counted, left = await services.counters(), dict[str, int](), 0
            # Which want comes when depends on how fast this machine is just now.
            for attempt in range(5):
                sessions = mixed(f"growing {attempt}", 14, prompts=(3, 9, 16), tokens=(50, 70))
                sessions += mixed(f"long {attempt}", 10, prompts=(33, 48, 60), tokens=(20, 36))
                left += await crowd(services.drafter, sessions, hear, call, tiny, leaving=0.2)
                await services.idle()
                counted = since(before, await services.counters())
                if all(counted.get(event) for event in events):
                    break
        async with asyncio.timeout(PATIENCE_S):
            while asyncio.all_tasks() != tasks:
                await asyncio.sleep(0.01)
        return counted, left

    counted, left = asyncio.run(scenario())
    assert left > 1
    for event in events:
        assert counted[event] > 0, event


def test_a_drafter_that_stands_still_holds_nobody_up_and_its_late_trees_hurt_nobody(
    tiny: Any, verifier: Replica, drafter: Replica, reach: Make, hear: Make, call: Make, mixed: Make
) -> None:
    async def scenario() -> dict[str, int]:
        async with reach(verifier.address, drafter.address) as services:
            before = await services.counters()
            counted: dict[str, int] = {}
            # Whether a tree is on its way when the drafter is stopped is up to chance.
            for attempt in range(20):
                sessions = mixed(f"frozen {attempt}", 8, prompts=(2, 9, 17), tokens=(210, 230))
                running = asyncio.create_task(crowd(services.drafter, sessions, hear, call, tiny))
                start = await services.counters()
                while since(start, await services.counters()).get("trees_verified", 0) < 30:
                    await asyncio.sleep(0.01)
                drafter.process.send_signal(signal.SIGSTOP)
                try:
                    frozen = await services.counters()
                    async with asyncio.timeout(PATIENCE_S):
                        while since(frozen, await services.counters()).get("plain_steps", 0) < 3:
                            await asyncio.sleep(0.01)
                finally:
                    drafter.process.send_signal(signal.SIGCONT)
                await running
                await services.idle()
                counted = since(before, await services.counters())
                if counted.get("stale_trees", 0) and counted.get("missed_trees", 0):
                    break
            return counted

    counted = asyncio.run(scenario())
    for event in ("missed_trees", "stale_trees", "trees_verified", "plain_steps"):
        assert counted[event] > 0, event


def test_drafters_share_a_verifier_and_a_drafter_spreads_over_two(
    tiny: Any,
    verifier: Replica,
    short: Replica,
    drafter: Replica,
    second: Replica,
    reach: Make,
    hear: Make,
    call: Make,
    mixed: Make,
) -> None:
    sessions = mixed("spread", 32, prompts=(5, 20, 40), tokens=(10, 40))

    async def scenario() -> list[Any]:
        async with (
            reach(verifier.address, drafter.address) as one,
            reach(short.address, second.address) as other,
        ):
            calls = [(one if i % 2 else other, call(session)) for i, session in enumerate(sessions)]
            answers = await asyncio.gather(*(hear(services.drafter, c) for services, c in calls))
            await asyncio.gather(one.idle(), other.idle())
            return list(answers)

    answers = asyncio.run(scenario())
    assert all(answer.is_whole(session, tiny) for session, answer in zip(sessions, answers, strict=True))
    assert {answer.started.verifier for answer in answers[1::2]} == {verifier.address}
    assert {answer.started.verifier for answer in answers[::2]} == {verifier.address, short.address}
    assert any(round.verified > 1 for answer in answers[::2] for round in answer.rounds)


@pytest.mark.parametrize("prompt", [15, 16, 17, 32])
def test_a_prompt_that_ends_where_a_page_ends_is_like_any_other(
    prompt: int,
    tiny: Any,
    verifier: Replica,
    drafter: Replica,
    reach: Make,
    hear: Make,
    call: Make,
    mixed: Make,
) -> None:
    (session,) = mixed(f"edge {prompt}", 1, prompts=(prompt,), tokens=(40, 40))
    again = [replace(session, id=f"{session.id} again"), replace(session, id=f"{session.id} plain", seed=5)]

    async def scenario() -> list[Any]:
        async with reach(verifier.address, drafter.address) as services:
            first = await hear(services.drafter, call(session))
            await services.idle()
            rest = [await hear(services.drafter, call(s, speculative=i == 0)) for i, s in enumerate(again)]
            return [first, *rest]

    answers = asyncio.run(scenario())
    for s, answer in zip([session, *again], answers, strict=True):
        assert answer.is_whole(s, tiny)
    # The entry that pairs the prompt's last token is made anew; the others are found in full pages.
    assert [answer.finished.cached_tokens for answer in answers] == [0, max(0, prompt - 2) // 16 * 16, 0]


def test_the_second_turn_of_a_long_chat_computes_only_what_is_new(
    tiny: Any, verifier: Replica, drafter: Replica, reach: Make, hear: Make, call: Make, mixed: Make
) -> None:
    (first,) = mixed("first turn", 1, prompts=(90,), tokens=(60, 60))
    told = (*first.prompt, *tiny.text(first), *range(1, 15), *range(1, 7))
    second = replace(first, id="second turn", prompt=told, params=replace(first.params, max_tokens=30))
    assert len(told) == 170

    async def scenario() -> tuple[Any, dict[str, int], dict[str, int]]:
        async with reach(verifier.address, drafter.address) as services:
            await hear(services.drafter, call(first))
            verifies, drafts = await services.idle()
            answer = await hear(services.drafter, call(second))
            verified, drafted = await services.idle()
            return (
                answer,
                since(dict(verifies.counters), dict(verified.counters)),
                since(dict(drafts.counters), dict(drafted.counters)),
            )

    answer, verified, drafted = asyncio.run(scenario())
    assert answer.is_whole(second, tiny)
    # Of the first turn's 150 tokens all but the last were computed: 9 full pages on the verifier's side.
    assert verified["prefix_hit_tokens"] == 144
    assert verified["tokens_prefilled"] == 170 - 144
    assert verified["tokens_forwarded"] == 170 - 144 + sum(round.verified for round in answer.rounds[1:])
    assert answer.started.cached_tokens >= 128
    assert 0 < drafted["tokens_forwarded"] < 170 + 30 - answer.started.cached_tokens


def test_a_thousand_sessions_leave_nothing_behind(
    tiny: Any, verifier: Replica, drafter: Replica, reach: Make, hear: Make, call: Make, mixed: Make
) -> None:
    rng = random.Random(7)
    kinds = mixed("kind", 24, prompts=(1, 3, 12, 16, 20), tokens=(1, 8))
    for kind in kinds:
        tiny.text(kind)

    async def scenario() -> int:
        places, gone = asyncio.Semaphore(48), 0

        async def one(drafter: Any, session: Session) -> None:
            nonlocal gone
            async with places:
                how = rng.random()
                hearing = asyncio.create_task(
                    hear(
                        drafter,
                        call(session, speculative=rng.random() < 0.7),
                        rng.randint(1, 3) if how < 0.15 else None,
                    )
                )
                if how > 0.85:
                    await asyncio.sleep(rng.random() * 0.05)
                    hearing.cancel()
                try:
                    answer = await hearing
                except asyncio.CancelledError:
                    gone += 1
                    return
                gone += answer.finished is None
                assert answer.tokens == tiny.text(session)[: len(answer.tokens)]
                assert answer.finished is None or answer.is_whole(session, tiny)

        async with reach(verifier.address, drafter.address) as services:
            async with asyncio.TaskGroup() as tasks:
                for i in range(1000):
                    session = replace(rng.choice(kinds), id=f"thousand {i}")
                    tasks.create_task(one(services.drafter, session))
            verifies, drafts = await services.idle()
            assert (verifies.load.running, verifies.load.waiting, drafts.running) == (0, 0, 0)
            assert verifies.load.free_pages == verifies.num_pages
            assert drafts.free_pages == drafts.num_pages
        return gone

    assert asyncio.run(scenario()) > 100


NEIGHBOUR = Session(
    "neighbour", (4, 1, 7, 2, 2, 9), SamplingParams(max_tokens=120, temperature=0.8, ignore_eos=True), 21
)


def test_bad_requests_each_get_their_own_failure_and_hurt_nobody_on_their_stream(
    tiny: Any, verifier: Replica, by_hand: Make, reach: Make, drafter: Replica, hidden: Make
) -> None:
    rng = random.Random(3)
    params = SamplingParams(max_tokens=100, ignore_eos=True)

    async def scenario() -> tuple[dict[str, ErrorCode], tuple[int, ...], Any]:
        async with (
            reach(verifier.address, drafter.address) as services,
            by_hand(verifier.address) as hand,
        ):
            mark = (await services.verifier.status(PATIENCE_S)).fingerprint
            failed: dict[str, ErrorCode] = {}

            async def fails(name: str, session: str) -> None:
                while name not in failed:
                    try:
                        await hand.hear(session)
                    except WealdError as error:
                        failed[name] = error.code

            def opening(id: str, prompt: tuple[int, ...], epoch: int = 1, fingerprint: bytes = mark) -> Open:
                return Open(Session(id, prompt, params, 1), epoch, fingerprint, True, 0)

            async def trouble() -> None:
                tree = DraftTree.root(1)
                hand.say(Proposals((Proposal("stranger", 1, 0, 5, tree),)))
                await fails("a tree of an unknown session", "stranger")
                hand.say(opening("wrong mark", (1,), fingerprint=b"0123456789abcdef"))
                await fails("a wrong fingerprint", "wrong mark")
                hand.say(opening("token", (1, 15)))
                await fails("a token outside the vocabulary", "token")
                hand.say(opening("long", (1,) * 256))
                await fails("a prompt that is too long", "long")
                for epoch, name in ((3, "a duplicate"), (2, "an older epoch")):
                    hand.say(opening("twice", (1, 2), epoch=3))
                    await hand.hear("twice")
                    hand.say(opening("twice", (1, 2), epoch=epoch))
                    await fails(name, "twice")
                    hand.say(Close("twice", 3))
                hand.say(opening("old tree", (1, 2), epoch=3))
                await hand.hear("old tree")
                hand.say(Proposals((Proposal("old tree", 2, 0, 2, tree),)))
                await fails("a tree of an older epoch", "old tree")
                hand.say(Close("old tree", 3))
                hand.say(opening("tree", (1, 2)))
                first = await hand.hear("tree")
                outside = DraftTree((first.outcome.tokens[0], 3, 15), (-1, 0, 0), (1.0, 0.5, 0.5))
                hand.say(Proposals((Proposal("tree", 1, 0, 2, outside),)))
                await fails("a tree with a token outside the vocabulary", "tree")
                hand.say(Proposals((Proposal("tree", 1, 0, 2, tree),)))
                await fails("a tree of a session that has failed", "tree")

            playing = hand.play(
                Open(NEIGHBOUR, 1, mark, True, 0),
                tiny.text(NEIGHBOUR),
                lambda root, text: hidden(root, text, 15, 40, rng)[0],
            )
            text, _ = await asyncio.gather(playing, trouble())
            await services.idle()
            return failed, text, hand

    failed, text, hand = asyncio.run(scenario())
    assert text == tiny.text(NEIGHBOUR)
    assert len(hand.replies["neighbour"]) < 110
    assert failed == {
        "a tree of an unknown session": ErrorCode.UNKNOWN_SESSION,
        "a wrong fingerprint": ErrorCode.INCOMPATIBLE_CHECKPOINT,
        "a token outside the vocabulary": ErrorCode.INVALID_ARGUMENT,
        "a prompt that is too long": ErrorCode.CONTEXT_LENGTH_EXCEEDED,
        "a duplicate": ErrorCode.STALE_EPOCH,
        "an older epoch": ErrorCode.STALE_EPOCH,
        "a tree of an older epoch": ErrorCode.STALE_EPOCH,
        "a tree with a token outside the vocabulary": ErrorCode.INVALID_ARGUMENT,
        "a tree of a session that has failed": ErrorCode.UNKNOWN_SESSION,
    }


def test_a_full_queue_refuses_whoever_comes_next_and_a_session_on_the_same_stream_goes_on(
    tiny: Any, short: Replica, by_hand: Make, status: Make, vacant: Make, hidden: Make
) -> None:
    rng = random.Random(5)
    neighbour = replace(NEIGHBOUR, params=replace(NEIGHBOUR.params, max_tokens=60))

    async def scenario() -> tuple[list[WealdError], tuple[int, ...]]:
        async with by_hand(short.address) as hand:
            mark = (await status(short.address)).fingerprint
            playing = asyncio.create_task(
                hand.play(
                    Open(neighbour, 1, mark, True, 0),
                    tiny.text(neighbour),
                    lambda root, text: hidden(root, text, 15, 40, rng)[0],
                )
            )
            await asyncio.sleep(0)  # It has its place before the others come.
            others = [f"other {i}" for i in range(60)]
            params = SamplingParams(max_tokens=90, ignore_eos=True)
            hand.say(*(Open(Session(id, (1, 2), params, i), 1, mark, True, 0) for i, id in enumerate(others)))
            refused = []
            for id in others[47:]:
                with pytest.raises(WealdError) as raised:
                    await hand.hear(id)
                refused.append(raised.value)
            text = await playing
            hand.say(*(Close(id, 1) for id in others))
            await vacant(short.address)
            return refused, text

    refused, text = asyncio.run(scenario())
    assert {error.code for error in refused} == {ErrorCode.RESOURCE_EXHAUSTED}
    assert all(error.retry_after_s for error in refused)
    assert text == tiny.text(neighbour)


def test_features_reach_whoever_speculates_whole_and_in_order_and_nobody_else(
    tiny: Any, short: Replica, by_hand: Make, status: Make, vacant: Make, hidden: Make
) -> None:
    rng = random.Random(8)
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    long = Session("long", tuple(rng.randrange(15) for _ in range(60)), params, 4)
    silent = replace(long, id="silent")

    async def scenario() -> tuple[Any, list[tuple[int, ...]]]:
        async with by_hand(short.address) as hand:
            mark = (await status(short.address)).fingerprint
            texts = await asyncio.gather(
                hand.play(
                    Open(long, 1, mark, True, 7),
                    tiny.text(long),
                    lambda root, text: hidden(root, text, 15, 40, rng)[0],
                ),
                hand.play(Open(silent, 1, mark, False, 60), ()),
            )
            await vacant(short.address)
            return hand, texts

    hand, texts = asyncio.run(scenario())
    assert texts == [tiny.text(long)] * 2
    assert "silent" not in hand.blocks
    assert not any(reply.wanted for reply in hand.replies["silent"])
    blocks = hand.blocks["long"]
    assert len(blocks) > 2
    at = 7
    for block in blocks:
        assert (block.start, block.width, block.dtype) == (at, 32, "float64")
        at += block.rows
    last = [reply for reply in hand.replies["long"] if reply.wanted][-1]
    assert at == last.position + len(last.outcome.tokens) - 1


def test_a_session_outlives_its_stream_for_another_to_take_over_and_expires_without_one(
    tiny: Any, short: Replica, by_hand: Make, status: Make, vacant: Make, hidden: Make
) -> None:
    rng = random.Random(9)
    params = SamplingParams(max_tokens=70, ignore_eos=True)
    sessions = [Session(f"parked {i}", (1 + i, 2, 3), params, i) for i in range(3)]
    taken = sessions[0]

    async def scenario() -> tuple[tuple[int, ...], dict[str, int]]:
        mark = (await status(short.address)).fingerprint
        before = dict((await status(short.address)).counters)
        async with by_hand(short.address) as hand:
            hand.say(*(Open(session, 1, mark, True, 0) for session in sessions))
            first = [await hand.hear(session.id) for session in sessions]
            assert all(reply.wanted for reply in first)
            delivered = first[0].outcome.tokens
        async with by_hand(short.address) as hand:
            assert (await status(short.address)).load.running == 3
            hand.say(Open(taken, 1, mark, True, 0))
            with pytest.raises(WealdError) as raised:
                await hand.hear(taken.id)
            assert raised.value.code is ErrorCode.STALE_EPOCH
            text = await hand.play(
                Open(replace(taken, output=delivered), 2, mark, True, 0),
                tiny.text(taken),
                lambda root, text: hidden(root, text, 15, 40, rng)[0],
            )
            return text, since(before, dict((await vacant(short.address)).counters))

    text, counted = asyncio.run(scenario())
    assert text == tiny.text(taken)
    assert counted["expired_sessions"] == 2


def test_replicas_that_are_told_to_end_finish_their_sessions_and_take_no_new_ones(
    tiny: Any, reach: Make, by_hand: Make, status: Make, call: Make, mixed: Make
) -> None:
    sessions = mixed("drained", 6, prompts=(4, 20), tokens=(200, 220))

    async def hear_on(drafter: Any, session: Session, begun: asyncio.Event) -> tuple[int, ...]:
        tokens: list[int] = []
        finished = False
        async with aclosing(drafter.generate(call(session))) as events:
            async for event in events:
                if isinstance(event, Finished):
                    finished = True
                elif isinstance(event, Round):
                    tokens += event.tokens
                    begun.set()
        assert finished
        return tuple(tokens)

    async def until_refused(attempt: Callable[[int], Any]) -> WealdError:
        """The signal takes a moment to arrive; what is still taken on is served."""
        async with asyncio.timeout(PATIENCE_S):
            for i in range(10_000):
                try:
                    await attempt(i)
                except WealdError as error:
                    return error
        raise AssertionError

    with (
        replica(*tiny.verify, "--kv-cache-memory", "8MiB", threads=1) as verifier,
        replica(*tiny.draft(verifier.address), "--kv-cache-memory", "8MiB", threads=1) as drafter,
    ):

        async def scenario() -> list[tuple[int, ...]]:
            async with (
                reach(verifier.address, drafter.address) as services,
                by_hand(verifier.address) as hand,
            ):
                mark = (await status(verifier.address)).fingerprint
                begun = [asyncio.Event() for _ in sessions]
                hearing = [
                    asyncio.create_task(hear_on(services.drafter, session, event))
                    for session, event in zip(sessions, begun, strict=True)
                ]
                await asyncio.gather(*(event.wait() for event in begun))
                for process in (verifier, drafter):
                    process.process.send_signal(signal.SIGTERM)
                tiny_params = SamplingParams(max_tokens=1)

                async def generate(i: int) -> None:
                    late = Call(f"late {i}", (1,), (), tiny_params)
                    async with aclosing(services.drafter.generate(late)) as events:
                        async for _ in events:
                            pass

                async def open_by_hand(i: int) -> None:
                    session = Session(f"late by hand {i}", (1,), tiny_params, 0)
                    await hand.play(Open(session, 1, mark, False, 1), ())

                refusals = [await until_refused(open_by_hand), await until_refused(generate)]
                assert {error.code for error in refusals} == {ErrorCode.UNAVAILABLE}
                assert all("shutting down" in error.message for error in refusals)
                assert not any(one.done() for one in hearing)
                return list(await asyncio.gather(*hearing))

        texts = asyncio.run(scenario())
        assert [ended.process.wait(PATIENCE_S) for ended in (verifier, drafter)] == [0, 0]
        for ended in (verifier, drafter):
            ended.process.communicate()
    assert texts == [tiny.text(session) for session in sessions]
