"""A caller gets each token once, whatever happens to the draft replicas that serve its session.

The replicas are played, over real gRPC: only so do they die at a chosen moment. The one who is called plays
the next script, since which one that is follows from a hash of its port.
"""

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from itertools import groupby
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from services.gateway import calls
from services.gateway.calls import ATTEMPTS, generate
from services.gateway.drafters import Drafters
from services.types.errors import ErrorCode, WealdError
from services.types.messages import Call, DraftStatus, Draining, Event, Finished, Moved, Round, Started
from services.types.replica import ReplicaKind
from services.types.sampling import SamplingParams
from services.types.session import Cursor, FinishReason, running_hash
from services.types.tree import DraftTree
from services.wire import convert
from services.wire.errors import answering
from services.wire.server import serve
from weald.v1 import draft_pb2, draft_pb2_grpc

PROMPT = (1, 2, 3)
TEXT = tuple(range(100, 123))
CALL = Call("s", PROMPT, (), SamplingParams(seed=5))
BY_ID = Call("s", (), (), SamplingParams())
PATIENCE_S = 60.0
"""For what comes within milliseconds unless something is broken."""

Item = Event | WealdError | None
"""An event, an error, or nothing any more, without an end."""
Script = Callable[[Call], Iterator[Item]]


def lost(code: ErrorCode = ErrorCode.UNAVAILABLE, retry_after_s: float | None = None) -> WealdError:
    return WealdError(code, "played", retry_after_s=retry_after_s)


def started(call: Call) -> Started:
    return Started(call.session, call.params.seed or 0, 0, "verifier:1")


def rounds(at: int, end: int, text: Sequence[int] = TEXT, each: int = 3) -> Iterator[Round]:
    """The text from token `at` to token `end`, in rounds."""
    while at < end:
        tokens = tuple(text[at : min(at + each, end)])
        finish = FinishReason.LENGTH if at + len(tokens) == len(text) else None
        yield Round(len(PROMPT) + at, tokens, 4, 4, 1, 1, None, (), finish)
        at += len(tokens)


def finished(text: Sequence[int] = TEXT) -> Finished:
    return Finished(FinishReason.LENGTH, len(PROMPT), len(text), 0)


def whole(call: Call) -> Iterator[Item]:
    """A replica to which nothing happens."""
    yield started(call)
    yield from rounds(len(call.output), len(TEXT))
    yield finished()


def until(end: int, *then: Item, back: int = 0) -> Script:
    """Go on from `back` tokens before what was delivered to token `end` of the text, then do that."""

    def script(call: Call) -> Iterator[Item]:
        yield started(call)
        yield from rounds(max(0, len(call.output) - back), end)
        yield from then

    return script


def refusal(code: ErrorCode, retry_after_s: float | None = None) -> Script:
    """Raise at once."""
    return lambda call: iter([lost(code, retry_after_s)])


class Play(draft_pb2_grpc.DraftServiceServicer):
    """A replica that plays the next script of its stage for each call."""

    def __init__(self, stage: "Stage", name: int) -> None:
        self.stage = stage
        self.name = name

    async def Generate(self, request: draft_pb2.GenerateRequest, context: Any) -> AsyncIterator[Any]:
        stage, call = self.stage, convert.call_from_proto(request)
        script = stage.scripts[min(len(stage.calls), len(stage.scripts) - 1)]
        stage.calls.append(call)
        stage.called.append(stage.addresses[self.name])
        try:
            async with answering(context):
                for item in script(call):
                    if isinstance(item, WealdError):
                        raise item
                    if item is None:
                        await asyncio.Event().wait()
                    else:
                        yield convert.event_to_proto(item)
        finally:
            stage.left.set()

    async def Status(self, request: draft_pb2.DraftServiceStatusRequest, context: Any) -> Any:
        return convert.draft_status_to_proto(DraftStatus("head", b"f", "float32", "cpu", 0, 1, 1, {}, {}))


class Stage:
    """Played replicas, and a caller that knows them."""

    def __init__(self, scripts: Sequence[Script]) -> None:
        self.scripts = scripts
        self.addresses: list[str] = []
        self.calls: list[Call] = []
        self.called: list[str] = []
        """The address of the replica that got each call."""
        self.heard: list[Event] = []
        """What the latest session has been given so far."""
        self.left = asyncio.Event()
        """Set once a call has ended at its replica."""
        self.drafters: Drafters

    async def hear(self, call: Call = CALL, within_s: float = PATIENCE_S, **options: Any) -> list[Event]:
        """The events of a session, to its end."""
        self.heard = []
        async for event in generate(self.drafters, call, within_s, **options):
            self.heard.append(event)
        return self.heard

    async def error(self, call: Call = CALL, within_s: float = PATIENCE_S, **options: Any) -> WealdError:
        """The error that a session ends with."""
        with pytest.raises(WealdError) as raised:
            await self.hear(call, within_s, **options)
        return raised.value


@asynccontextmanager
async def stage(*scripts: Script, replicas: int = 2) -> AsyncIterator[Stage]:
    """So many replicas, and the scripts for the calls in their order; the last one plays from then on."""
    async with AsyncExitStack() as stack:
        built = Stage(scripts)
        for name in range(replicas):
            server = await serve(Play(built, name), "127.0.0.1:0")
            stack.push_async_callback(server.stop, 0)
            built.addresses.append(f"127.0.0.1:{server.port}")
        built.drafters = await stack.enter_async_context(Drafters(built.addresses))
        yield built


@pytest.fixture(autouse=True)
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses are short where a test does not measure them."""
    monkeypatch.setattr(calls, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(calls, "LAST_PAUSE_S", 0.001)


def text_of(events: Sequence[Event]) -> tuple[int, ...]:
    """The tokens, each at its position; from one `Started` to one `Finished`, no `Draining` between."""
    assert isinstance(events[0], Started)
    assert isinstance(events[-1], Finished)
    assert all(isinstance(event, Round | Moved) for event in events[1:-1])
    output: list[int] = []
    for event in events:
        if isinstance(event, Round):
            assert event.position == len(PROMPT) + len(output)
            output += event.tokens
    assert events[-1].output_tokens == len(output)
    return tuple(output)


def moves(events: Sequence[Event]) -> list[Moved]:
    return [event for event in events if isinstance(event, Moved)]


def test_an_undisturbed_session_is_one_call() -> None:
    async def scenario() -> None:
        async with stage(whole) as at:
            events = await at.hear()
            assert text_of(events) == TEXT
            assert at.calls == [CALL]
            assert not moves(events)

    asyncio.run(scenario())


@pytest.mark.parametrize("code", [ErrorCode.UNAVAILABLE, ErrorCode.CANCELLED])
@pytest.mark.parametrize("end", [0, 1, 7])
def test_a_session_whose_replica_is_lost_goes_on_at_another_one_behind_what_was_delivered(
    code: ErrorCode, end: int
) -> None:
    async def scenario() -> None:
        async with stage(until(end, lost(code)), whole) as at:
            events = await at.hear()
            assert text_of(events) == TEXT
            assert [call.output for call in at.calls] == [(), TEXT[:end]]
            assert len(set(at.called)) == 2
            assert moves(events) == [Moved(ReplicaKind.DRAFT, at.called[1], lost=True)]

    asyncio.run(scenario())


def test_a_replica_that_is_lost_before_it_began_was_not_moved_from() -> None:
    async def scenario() -> None:
        async with stage(refusal(ErrorCode.UNAVAILABLE), whole) as at:
            events = await at.hear()
            assert text_of(events) == TEXT
            assert not moves(events)
            assert len(set(at.called)) == 2

    asyncio.run(scenario())


def test_a_single_replica_is_called_again_when_it_is_back() -> None:
    async def scenario() -> None:
        async with stage(until(6, lost()), refusal(ErrorCode.UNAVAILABLE), whole, replicas=1) as at:
            events = await at.hear()
            assert text_of(events) == TEXT
            assert moves(events) == [Moved(ReplicaKind.DRAFT, at.addresses[0], lost=True)]

    asyncio.run(scenario())


def test_of_three_replicas_the_two_that_failed_are_avoided_until_there_is_progress() -> None:
    async def scenario() -> None:
        fails = refusal(ErrorCode.UNAVAILABLE)
        async with stage(fails, fails, until(5, lost()), whole, replicas=3) as at:
            assert text_of(await at.hear()) == TEXT
            assert len(set(at.called[:3])) == 3
        async with stage(until(3, lost()), until(6, lost()), whole, replicas=3) as at:
            assert text_of(await at.hear()) == TEXT
            assert at.called[2] == at.called[0], "its prefix lies there"

    asyncio.run(scenario())


def test_sessions_that_only_the_journal_knows_spread() -> None:
    async def scenario() -> None:
        async with stage(whole, replicas=3) as at:
            for i in range(30):
                await at.hear(Call(f"s{i}", (), (), SamplingParams()))
            assert set(at.called) == set(at.addresses)

    asyncio.run(scenario())


def test_when_all_have_failed_they_are_all_tried_again() -> None:
    async def scenario() -> None:
        async with stage(*[refusal(ErrorCode.UNAVAILABLE)] * 6, whole) as at:
            assert text_of(await at.hear()) == TEXT
            assert [set(at.called[i : i + 2]) for i in (0, 2, 4)] == [set(at.addresses)] * 3

    asyncio.run(scenario())


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lives=st.lists(
        st.tuples(
            st.integers(0, 6), st.integers(0, 8), st.sampled_from(["unavailable", "cancelled", "draining"])
        ),
        max_size=12,
    ),
    by_id=st.booleans(),
    replicas=st.integers(1, 3),
)
def test_each_token_comes_once_however_often_replicas_are_lost_and_however_much_is_told_again(
    lives: list[tuple[int, int, str]], by_id: bool, replicas: int
) -> None:
    """A life: tokens that are new, tokens before them that are told again, and how it ends."""

    def life(fresh: int, back: int, end: str, journal: list[int]) -> Script:
        def script(call: Call) -> Iterator[Item]:
            at = max(0, len(call.output) - back) if call.prompt else 0
            journal[0] = min(max(journal[0], len(call.output)) + fresh, len(TEXT))
            yield started(call)
            yield from rounds(at, journal[0])
            if journal[0] == len(TEXT):
                yield finished()
            elif end != "draining":
                yield lost(ErrorCode(end))
            else:
                yield Draining()
                yield lost()

        return script

    def rest(call: Call) -> Iterator[Item]:
        yield started(call)
        yield from rounds(len(call.output), len(TEXT))
        yield finished()

    async def scenario() -> None:
        journal = [0]
        scripts = [life(*one, journal) for one in lives]
        async with stage(*scripts, rest, replicas=replicas) as at:
            text = text_of(await at.hear(BY_ID if by_id else CALL))
            assert text == TEXT

    idle = [len(list(run)) for dry, run in groupby(fresh == 0 for fresh, _, _ in lives) if dry]
    assume(max(idle, default=0) < ATTEMPTS - 1)
    asyncio.run(scenario())


def test_a_round_that_was_delivered_in_part_is_cut_and_loses_its_tree() -> None:
    tree = DraftTree.chain([TEXT[2], TEXT[3], TEXT[4]])
    again = Round(len(PROMPT) + 3, TEXT[3:6], 3, 3, 1, 1, tree, (1, 2))

    def second(call: Call) -> Iterator[Item]:
        yield started(call)
        yield again
        yield from rounds(6, len(TEXT))
        yield finished()

    async def scenario() -> None:
        async with stage(until(5, lost()), second) as at:
            events = await at.hear()
            assert text_of(events) == TEXT
            cut = next(event for event in events if isinstance(event, Round) and event.position == 8)
            assert (cut.tokens, cut.tree, cut.accepted) == (TEXT[5:6], None, ())
        async with stage(until(3, lost()), second) as at:
            assert again in await at.hear(), "a round that is all new stays as it is"

    asyncio.run(scenario())


def test_what_comes_again_with_another_token_is_an_error_and_not_passed_on() -> None:
    other = (*TEXT[:4], 7, *TEXT[5:])

    def second(call: Call) -> Iterator[Item]:
        yield started(call)
        yield from rounds(2, len(other), other)
        yield finished()

    async def scenario() -> None:
        async with stage(until(6, lost()), second) as at:
            error = await at.error()
            assert error.code is ErrorCode.DIVERGED
            assert error.message.endswith(
                "; 6 tokens were delivered, what the journal has comes with --resume s"
            )
            assert sum(len(event.tokens) for event in at.heard if isinstance(event, Round)) == 6
            assert len(at.calls) == 2

    asyncio.run(scenario())


def test_tokens_that_are_missing_are_an_error_and_so_is_an_end_that_counts_others() -> None:
    def gap(call: Call) -> Iterator[Item]:
        yield started(call)
        yield from rounds(0, 4)
        yield from rounds(5, len(TEXT))

    def short(call: Call) -> Iterator[Item]:
        yield started(call)
        yield from rounds(0, 4)
        yield finished()

    def silent(call: Call) -> Iterator[Item]:
        yield started(call)
        yield from rounds(0, 4)

    async def scenario() -> None:
        for script, what in (
            (gap, "begins at token 5"),
            (short, "has 23 output tokens"),
            (silent, "its end"),
        ):
            async with stage(script) as at:
                error = await at.error()
                assert error.code is ErrorCode.INTERNAL
                assert what in error.message
                assert f"go on with --resume s:4:{running_hash(TEXT[:4])}" in error.message
                assert len(at.calls) == 1

    asyncio.run(scenario())


@pytest.mark.parametrize("code", [ErrorCode.UNAVAILABLE, ErrorCode.INTERNAL])
def test_a_replica_lost_after_the_last_token_is_not_missed(code: ErrorCode) -> None:
    async def scenario() -> None:
        async with stage(until(len(TEXT), lost(code))) as at:
            events = await at.hear()
            assert text_of(events) == TEXT
            assert events[-1] == finished()
            assert len(at.calls) == 1

    asyncio.run(scenario())


def test_a_draining_replica_is_left_for_another_one_at_once() -> None:
    async def scenario() -> None:
        async with stage(until(7, Draining(), None), whole) as at:
            events = await at.hear()
            assert text_of(events) == TEXT
            assert len(set(at.called)) == 2
            assert moves(events) == [Moved(ReplicaKind.DRAFT, at.called[1], lost=False)]
            await asyncio.wait_for(at.left.wait(), PATIENCE_S)

    asyncio.run(scenario())


def test_a_draining_replica_without_another_one_serves_to_the_end() -> None:
    def draining(call: Call) -> Iterator[Item]:
        yield started(call)
        yield from rounds(0, 7)
        yield Draining()
        yield from rounds(7, len(TEXT))
        yield finished()

    async def scenario() -> None:
        async with stage(draining, replicas=1) as at:
            assert text_of(await at.hear()) == TEXT
            assert len(at.calls) == 1
        async with stage(draining, replicas=1) as at:
            async with Drafters([*at.addresses, "127.0.0.1:9"]) as drafters:
                events = [event async for event in generate(drafters, CALL, PATIENCE_S)]
            assert text_of(events) == TEXT
            assert len(at.calls) == 1, "the other one does not answer"

    asyncio.run(scenario())


def test_moves_of_the_verify_side_are_passed_on() -> None:
    moved = Moved(ReplicaKind.VERIFY, "verifier:2", lost=True)

    def script(call: Call) -> Iterator[Item]:
        yield started(call)
        yield from rounds(0, 4)
        yield moved
        yield from rounds(4, len(TEXT))
        yield finished()

    async def scenario() -> None:
        async with stage(script) as at:
            assert moves(await at.hear()) == [moved]

    asyncio.run(scenario())


def test_attempts_without_progress_are_bounded_and_the_error_says_how_to_go_on() -> None:
    async def scenario() -> None:
        async with stage(until(7, lost()), refusal(ErrorCode.UNAVAILABLE)) as at:
            error = await at.error()
            assert error.code is ErrorCode.UNAVAILABLE
            assert (
                error.message
                == f"played; 7 tokens were delivered, go on with --resume s:7:{running_hash(TEXT[:7])}"
            )
            # The call that delivered something is the first that failed since.
            assert len(at.calls) == ATTEMPTS
        async with stage(refusal(ErrorCode.UNAVAILABLE)) as at:
            error = await at.error()
            assert error.message == "played", "nothing was delivered, so there is nothing to go on with"

    asyncio.run(scenario())


def test_a_session_that_progresses_may_be_lost_any_number_of_times() -> None:
    async def scenario() -> None:
        lives = [until(end, lost()) for end in range(1, len(TEXT))]
        assert len(lives) > ATTEMPTS
        async with stage(*lives, whole) as at:
            assert text_of(await at.hear()) == TEXT

    asyncio.run(scenario())


def test_the_time_a_session_may_take_holds_for_all_its_calls_together() -> None:
    async def scenario() -> None:
        async with stage(until(3, lost()), until(6, None)) as at:
            error = await at.error(within_s=1.5)
            assert error.code is ErrorCode.DEADLINE_EXCEEDED
            assert error.message.endswith(
                f"6 tokens were delivered, go on with --resume s:6:{running_hash(TEXT[:6])}"
            )
            assert len(at.calls) == 2
        async with stage(until(3, lost(retry_after_s=100.0)), replicas=1) as at:
            error = await at.error(within_s=30.0)
            assert error.code is ErrorCode.DEADLINE_EXCEEDED
            assert "within 30 s; the last attempt: played; 3 tokens" in error.message

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "code",
    [
        code
        for code in ErrorCode
        if code not in calls.RETRYABLE and code is not ErrorCode.INCOMPATIBLE_CHECKPOINT
    ],
)
def test_what_another_call_cannot_cure_ends_the_session_at_once(code: ErrorCode) -> None:
    async def scenario() -> None:
        async with stage(refusal(code)) as at:
            error = await at.error()
            assert (error.code, error.message) == (code, "played")
            assert len(at.calls) == 1

    asyncio.run(scenario())


def test_full_replicas_are_each_asked_once_and_the_caller_of_a_new_session_is_told() -> None:
    async def scenario() -> None:
        async with stage(refusal(ErrorCode.RESOURCE_EXHAUSTED, 3.0), replicas=3) as at:
            error = await at.error()
            assert (error.code, error.retry_after_s) == (ErrorCode.RESOURCE_EXHAUSTED, 3.0)
            assert sorted(at.called) == sorted(at.addresses)
        full, gone = refusal(ErrorCode.RESOURCE_EXHAUSTED), refusal(ErrorCode.UNAVAILABLE)
        async with stage(full, gone) as at:
            assert (await at.error()).code is ErrorCode.RESOURCE_EXHAUSTED
            assert len(at.calls) == 2
        async with stage(full, whole) as at:
            assert text_of(await at.hear()) == TEXT

    asyncio.run(scenario())


def test_a_session_under_way_waits_for_full_replicas_as_long_as_they_say() -> None:
    full = refusal(ErrorCode.RESOURCE_EXHAUSTED, 0.2)

    async def scenario() -> None:
        async with stage(until(4, lost()), full, full, whole) as at:
            began = asyncio.get_running_loop().time()
            assert text_of(await at.hear()) == TEXT
            assert asyncio.get_running_loop().time() - began >= 0.2
            assert len(at.calls) == 4

    asyncio.run(scenario())


def test_a_replica_of_another_target_is_passed_over() -> None:
    async def scenario() -> None:
        wrong = refusal(ErrorCode.INCOMPATIBLE_CHECKPOINT)
        async with stage(until(4, lost()), wrong, whole, replicas=3) as at:
            assert text_of(await at.hear()) == TEXT
            assert len(set(at.called)) == 3
        async with stage(wrong) as at:
            assert (await at.error()).code is ErrorCode.INCOMPATIBLE_CHECKPOINT
            assert len(at.calls) == 2

    asyncio.run(scenario())


def test_the_seed_is_drawn_once_unless_only_the_journal_knows_it() -> None:
    async def scenario() -> None:
        drawn = set()
        for _ in range(2):
            async with stage(until(4, lost()), whole) as at:
                await at.hear(Call("s", PROMPT, (), SamplingParams()))
                first, second = (call.params.seed for call in at.calls)
                assert first is not None
                assert first == second
                drawn.add(first)
        assert len(drawn) == 2
        async with stage(whole) as at:
            await at.hear(BY_ID)
            assert at.calls == [BY_ID]

    asyncio.run(scenario())


def test_a_session_that_only_the_journal_knows_is_told_from_its_beginning_at_every_call() -> None:
    def told(end: int, *then: Item) -> Script:
        def script(call: Call) -> Iterator[Item]:
            yield started(call)
            yield Round(len(PROMPT), TEXT[:end], 0, 0, 0, 0)
            yield from then

        return script

    def last(call: Call) -> Iterator[Item]:
        # The journal may lack what was delivered: it is written behind.
        yield started(call)
        yield Round(len(PROMPT), TEXT[:6], 0, 0, 0, 0)
        yield from rounds(6, len(TEXT))
        yield finished()

    async def scenario() -> None:
        async with stage(refusal(ErrorCode.UNAVAILABLE), told(5, lost()), told(9, lost()), last) as at:
            events = await at.hear(BY_ID)
            assert text_of(events) == TEXT
            assert at.calls == [BY_ID] * 4

    asyncio.run(scenario())


def test_output_that_the_caller_has_is_not_told_again() -> None:
    async def scenario() -> None:
        async with stage(until(9, lost()), whole) as at:
            call = Call("s", PROMPT, TEXT[:4], SamplingParams(seed=5))
            events = await at.hear(call)
            tokens = [token for event in events if isinstance(event, Round) for token in event.tokens]
            assert tuple(tokens) == TEXT[4:]
            assert [len(call.output) for call in at.calls] == [4, 9]

    asyncio.run(scenario())


@pytest.mark.parametrize("count", [0, 1, 7, len(TEXT)])
def test_a_cursor_of_the_same_text_changes_nothing(count: int) -> None:
    async def scenario() -> None:
        async with stage(whole) as at:
            assert text_of(await at.hear(BY_ID, cursor=Cursor.behind("s", TEXT[:count]))) == TEXT

    asyncio.run(scenario())


def test_a_cursor_of_another_text_or_a_longer_one_is_an_error() -> None:
    async def scenario() -> None:
        for wrong in ((*TEXT[:6], 7), (*TEXT, 7)):
            async with stage(whole) as at:
                error = await at.error(BY_ID, cursor=Cursor.behind("s", wrong))
                assert error.code is ErrorCode.DIVERGED
                assert f"{len(wrong)} tokens were delivered" in error.message
                heard = sum(len(event.tokens) for event in at.heard if isinstance(event, Round))
                assert heard < len(wrong), "no token behind the cursor is passed on"

    asyncio.run(scenario())


def test_an_error_names_the_cursor_again_until_more_was_delivered_or_the_session_is_forgotten() -> None:
    async def scenario() -> None:
        cursor = Cursor.behind("s", TEXT[:7])
        async with stage(until(4, lost()), refusal(ErrorCode.UNAVAILABLE)) as at:
            message = (await at.error(BY_ID, cursor=cursor)).message
            assert message == f"played; 7 tokens were delivered, go on with --resume {cursor}"
        async with stage(until(9, lost()), refusal(ErrorCode.UNAVAILABLE)) as at:
            message = (await at.error(cursor=cursor)).message
            assert message.endswith(f"go on with --resume {Cursor.behind('s', TEXT[:9])}")
        async with stage(refusal(ErrorCode.UNKNOWN_SESSION)) as at:
            assert (await at.error(BY_ID, cursor=cursor)).message == "played"

    asyncio.run(scenario())


def test_leaving_early_ends_the_call_at_its_replica() -> None:
    async def leave(at: Stage) -> None:
        async with aclosing(generate(at.drafters, CALL, PATIENCE_S)) as events:
            async for event in events:
                if isinstance(event, Round):
                    return

    async def cancel(at: Stage) -> None:
        heard = asyncio.Event()

        async def listen() -> None:
            async for _ in generate(at.drafters, CALL, PATIENCE_S):
                heard.set()

        listening = asyncio.create_task(listen())
        await heard.wait()
        listening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await listening

    async def scenario() -> None:
        for going in (leave, cancel):
            async with stage(until(3, None)) as at:
                async with asyncio.timeout(PATIENCE_S):
                    await going(at)
                    await at.left.wait()
                assert len(at.calls) == 1

    asyncio.run(scenario())


PROGRAM = """
import asyncio, signal
from services.types.messages import Round, Started
from services.wire import convert
from services.wire.server import serve
from weald.v1 import draft_pb2_grpc

class Counts(draft_pb2_grpc.DraftServiceServicer):
    async def Generate(self, request, context):
        at = len(request.tokens)
        yield convert.event_to_proto(Started(request.session, 0, 0, ""))
        while True:
            yield convert.event_to_proto(Round(at, (at, at + 1), 0, 1, 0, 0))
            at += 2
            await asyncio.sleep(0.001)

async def main():
    server = await serve(Counts(), "127.0.0.1:0")
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    print(server.port, flush=True)
    await stopping.wait()
    await server.stop(0)

asyncio.run(main())
"""


@pytest.fixture
def processes() -> Iterator[dict[str, subprocess.Popen[str]]]:
    """Two of these programs by address."""
    started: dict[str, subprocess.Popen[str]] = {}
    try:
        for _ in range(2):
            process = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True)
            assert process.stdout
            started[f"127.0.0.1:{process.stdout.readline().strip()}"] = process
        yield started
    finally:
        for process in started.values():
            process.kill()
            process.communicate()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP])
def test_the_sessions_of_a_process_that_is_killed_ended_or_frozen_go_on_at_another_one(
    number: signal.Signals, processes: dict[str, subprocess.Popen[str]]
) -> None:
    victim, other = processes
    moved: list[Moved] = []

    async def listen(drafters: Drafters, name: str, positions: dict[str, int]) -> None:
        call = Call(name, PROMPT, (), SamplingParams())
        async for event in generate(drafters, call, PATIENCE_S):
            if isinstance(event, Moved):
                moved.append(event)
            elif isinstance(event, Round):
                at = positions.get(name, len(PROMPT))
                assert (event.position, event.tokens) == (at, (at, at + 1))
                positions[name] = at + 2

    async def scenario() -> None:
        positions: dict[str, int] = {}
        async with Drafters(list(processes)) as drafters, asyncio.timeout(PATIENCE_S):
            listening = [asyncio.create_task(listen(drafters, f"s{i}", positions)) for i in range(20)]
            while len(positions) < 20:
                await asyncio.sleep(0.01)
            lost = drafters.live()[victim]
            assert 0 < lost < 20, "the load spreads sessions of one prompt"
            processes[victim].send_signal(number)
            while len(moved) < lost:
                await asyncio.sleep(0.01)
            before = dict(positions)
            while any(positions[name] == before[name] for name in before):
                await asyncio.sleep(0.01)
            assert moved == [Moved(ReplicaKind.DRAFT, other, lost=True)] * lost
            assert drafters.live() == {victim: 0, other: 20}
            for task in listening:
                task.cancel()
            await asyncio.gather(*listening, return_exceptions=True)

    asyncio.run(scenario())
