"""All choices of a request run at once over played draft replicas, and none is left running.

The replicas are played over real gRPC: each session has a script of its own, by its index.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any, TypeVar

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models

from services.gateway.answers import answer
from services.gateway.choices import Piece
from services.gateway.drafters import Drafters
from services.gateway.requests import Job, job_of
from services.gateway.schemas import CompletionRequest
from services.gateway.tokenizer import BYTES, Tokenizer
from services.types.errors import ErrorCode, WealdError
from services.types.messages import Call, Event, Finished, Round, Started
from services.types.session import FinishReason
from services.wire import convert
from services.wire.errors import answering
from services.wire.server import serve
from weald.v1 import draft_pb2, draft_pb2_grpc

PATIENCE_S = 60.0
"""For what comes within milliseconds unless something is broken."""
END = 256
T = TypeVar("T", bound=Tokenizer)
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH

Script = Callable[[Call], AsyncIterator[Event]]


def bytewise(kind: type[T]) -> T:
    """One token for each byte, by its value; then the end token."""
    core = tokenizers.Tokenizer(models.BPE(BYTES, []))
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken("<|end|>", special=True)])
    return kind(core, frozenset({END}), {}, None)


TOKENIZER = bytewise(Tokenizer)


def job(n: int = 1, **fields: Any) -> Job:
    """A completion of token ids, as a client asks for it."""
    request = {"model": "m", "prompt": [1, 2, 3], "n": n, "seed": 7, "max_tokens": 10_000} | fields
    return job_of(CompletionRequest.model_validate(request), TOKENIZER, "cmpl-1")


async def speak(
    call: Call, groups: Sequence[Sequence[int]], finish: FinishReason | None = LENGTH
) -> AsyncIterator[Event]:
    """Say these groups of tokens, each in a round, then end; or wait, where there is no finish."""
    yield Started(call.session, call.params.seed or 0, 0, "verifier:1")
    at = len(call.output)
    for index, group in enumerate(groups):
        ended = finish if index == len(groups) - 1 else None
        yield Round(len(call.prompt) + at, tuple(group), 0, 1, 0, 0, finish=ended)
        at += len(group)
    if finish is None:
        await asyncio.Event().wait()
    yield Finished(finish or LENGTH, len(call.prompt), at, 0)


def says(*groups: Sequence[int], finish: FinishReason | None = LENGTH) -> Script:
    return lambda call: speak(call, groups, finish)


class Play(draft_pb2_grpc.DraftServiceServicer):
    """A replica that plays the script of each session's index, of the last one where there are fewer."""

    def __init__(self, scripts: Sequence[Script]) -> None:
        self.scripts = scripts
        self.calls: dict[int, Call] = {}
        self.running: set[int] = set()
        self.changed = asyncio.Condition()

    async def Generate(self, request: draft_pb2.GenerateRequest, context: Any) -> AsyncIterator[Any]:
        call = convert.call_from_proto(request)
        index = int(call.session.rpartition("-")[2])
        self.calls[index] = call
        self.running.add(index)
        await self.tell()
        try:
            async with answering(context):
                async for event in self.scripts[min(index, len(self.scripts) - 1)](call):
                    yield convert.event_to_proto(event)
        finally:
            self.running.remove(index)
            await self.tell()

    async def tell(self) -> None:
        """What is running has changed."""
        async with self.changed:
            self.changed.notify_all()

    async def alone(self, *indices: int) -> None:
        """Wait until these sessions alone are running."""
        async with asyncio.timeout(PATIENCE_S), self.changed:
            await self.changed.wait_for(lambda: self.running == set(indices))


@asynccontextmanager
async def playing(*scripts: Script) -> AsyncIterator[tuple[Play, Drafters]]:
    play = Play(scripts)
    server = await serve(play, "127.0.0.1:0")
    async with Drafters([f"127.0.0.1:{server.port}"]) as drafters:
        yield play, drafters
    await server.stop(0)


async def all_of(job: Job, drafters: Drafters, within_s: float = PATIENCE_S) -> dict[int, list[Piece]]:
    """The pieces of each choice."""
    pieces: dict[int, list[Piece]] = {index: [] for index in range(len(job.calls))}
    async with aclosing(answer(job, drafters, within_s)) as stream:
        async for index, piece in stream:
            pieces[index].append(piece)
    return pieces


def texts(pieces: dict[int, list[Piece]]) -> dict[int, str]:
    return {index: "".join(piece.text for piece in of) for index, of in pieces.items()}


def test_the_pieces_of_a_choice_come_in_order_and_its_last_one_has_the_finish() -> None:
    async def scenario() -> None:
        async with playing(says(b"ab", b"c", b"def")) as (play, drafters):
            asked = job()
            pieces = await all_of(asked, drafters)
            assert [piece.text for piece in pieces[0]] == ["ab", "c", "def"]
            assert [piece.finish for piece in pieces[0]] == [None, None, LENGTH]
            assert play.calls == {0: asked.calls[0]}

    asyncio.run(scenario())


@settings(max_examples=15, deadline=None)
@given(
    written=st.lists(st.lists(st.text("ab木🌲", min_size=1, max_size=4), min_size=1, max_size=5), max_size=4)
)
def test_every_choice_gets_its_own_text(written: list[list[str]]) -> None:
    async def scenario() -> None:
        scripts = [says(*(part.encode() for part in parts)) for parts in written] or [says(b"a")]
        async with playing(*scripts) as (_, drafters):
            pieces = await all_of(job(len(scripts)), drafters)
        assert texts(pieces) == {i: "".join(parts) for i, parts in enumerate(written or [["a"]])}
        assert all(
            piece.finish is (LENGTH if piece is of[-1] else None) for of in pieces.values() for piece in of
        )

    asyncio.run(scenario())


def test_choices_run_at_once() -> None:
    async def scenario() -> None:
        turns = [asyncio.Event() for _ in range(4)]

        def waiting(first: int, second: int) -> Script:
            """Go on in turns with the other choice, which is only possible while both are running."""

            async def script(call: Call) -> AsyncIterator[Event]:
                yield Started(call.session, 0, 0, "verifier:1")
                for at, turn in enumerate((first, second)):
                    await asyncio.wait_for(turns[turn].wait(), PATIENCE_S)
                    yield Round(3 + at, (97 + turn,), 0, 1, 0, 0, finish=LENGTH if at else None)
                yield Finished(LENGTH, 3, 2, 0)

            return script

        turns[0].set()
        order = []
        async with (
            playing(waiting(0, 2), waiting(1, 3)) as (_, drafters),
            aclosing(answer(job(2), drafters, PATIENCE_S)) as stream,
        ):
            async for index, piece in stream:
                order.append((index, piece.text))
                if len(order) < len(turns):
                    turns[len(order)].set()
        assert order == [(0, "a"), (1, "b"), (0, "c"), (1, "d")]

    asyncio.run(scenario())


def test_a_session_whose_text_a_stop_string_ends_is_called_off_at_once() -> None:
    async def scenario() -> None:
        endless = says(b"ab", b"cd", finish=None)
        async with (
            playing(endless, says(b"xyz", finish=None)) as (play, drafters),
            aclosing(answer(job(2, stop="c"), drafters, PATIENCE_S)) as stream,
        ):
            pieces: dict[int, list[Piece]] = {0: [], 1: []}
            async for index, piece in stream:
                pieces[index].append(piece)
                if piece.finish:
                    assert index == 0
                    await play.alone(1)
                if pieces[0] and pieces[0][-1].finish and pieces[1]:
                    break
        assert texts(pieces) == {0: "ab", 1: "xyz"}
        assert pieces[0][-1].finish is STOP
        assert pieces[0][-1].figures.completion_tokens == 3

    asyncio.run(scenario())


def test_an_answer_whose_choices_all_found_their_stop_string_is_over() -> None:
    async def scenario() -> None:
        async with playing(says(b"ab", b"cd", finish=None)) as (play, drafters):
            assert texts(await all_of(job(3, stop=["c"]), drafters)) == {0: "ab", 1: "ab", 2: "ab"}
            await play.alone()

    asyncio.run(scenario())


def test_an_answer_that_is_left_calls_all_sessions_off() -> None:
    async def scenario() -> None:
        async with playing(says(b"ab", finish=None)) as (play, drafters):
            async with aclosing(answer(job(3), drafters, PATIENCE_S)) as stream:
                seen = {(await anext(stream))[0] for _ in range(3)}
                assert seen == {0, 1, 2}
                await play.alone(0, 1, 2)
            await play.alone()
            unread = answer(job(3), drafters, PATIENCE_S)
            await anext(unread)
            await unread.aclose()
            await play.alone()

    asyncio.run(scenario())


def test_a_reader_that_is_cancelled_calls_all_sessions_off() -> None:
    async def scenario() -> None:
        async with playing(says(b"ab", finish=None)) as (play, drafters):
            reading = asyncio.create_task(all_of(job(2), drafters))
            await play.alone(0, 1)
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
            await play.alone()

    asyncio.run(scenario())


def test_the_error_of_one_choice_ends_the_answer() -> None:
    async def scenario() -> None:
        async def fails(call: Call) -> AsyncIterator[Event]:
            yield Started(call.session, 0, 0, "verifier:1")
            yield Round(3, (97,), 0, 1, 0, 0)
            raise WealdError(ErrorCode.CONTEXT_LENGTH_EXCEEDED, "played")

        async with playing(says(b"xy", finish=None), fails) as (play, drafters):
            with pytest.raises(WealdError, match="played") as raised:
                await all_of(job(2), drafters)
            assert raised.value.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED
            await play.alone()

    asyncio.run(scenario())


class CountingTokenizer(Tokenizer):
    """Counts the tokens that are read."""

    read = 0

    def has_text(self, token_id: int) -> bool:
        """As the tokenizer does."""
        self.read += 1
        return super().has_text(token_id)


def test_for_a_reader_that_rests_two_pieces_are_read_ahead() -> None:
    async def scenario() -> None:
        counting = bytewise(CountingTokenizer)
        asked = replace(job(), tokenizer=counting, continues=False)
        async with (
            playing(says(*[b"a"] * 100)) as (play, drafters),
            aclosing(answer(asked, drafters, PATIENCE_S)) as stream,
        ):
            await anext(stream)
            await play.alone()
            await asyncio.sleep(0.1)
            assert counting.read <= 3
            assert len([piece async for piece in stream]) == 99
            assert counting.read == 100

    asyncio.run(scenario())


def test_a_stop_string_is_found_across_rounds_and_the_tokens_behind_it_are_dropped() -> None:
    async def scenario() -> None:
        text = "ab木🌲cd".encode()
        async with playing(*(says(text[:cut], text[cut:], finish=None) for cut in range(1, len(text)))) as (
            _,
            drafters,
        ):
            pieces = await all_of(job(len(text) - 1, stop=["🌲c", "zz"]), drafters)
        assert set(texts(pieces).values()) == {"ab木"}
        assert {of[-1].figures.completion_tokens for of in pieces.values()} == {len("ab木🌲c".encode())}

    asyncio.run(scenario())


def test_the_choices_of_a_seed_are_drawn_again_alike_and_the_first_as_if_alone() -> None:
    async def drawn(call: Call) -> AsyncIterator[Event]:
        """What a target would say is a function of the seed, among others."""
        assert call.params.seed is not None
        text = f"{call.params.seed:x}".encode()
        async for event in speak(call, [text]):
            yield event

    async def scenario() -> None:
        async with playing(drawn) as (_, drafters):
            four = texts(await all_of(job(4), drafters))
            assert len(set(four.values())) == 4
            assert texts(await all_of(job(4), drafters)) == four
            assert texts(await all_of(job(1), drafters)) == {0: four[0]}
            assert texts(await all_of(job(4, seed=8), drafters)) != four
            two = texts(await all_of(job(2, prompt=[[1], [2]]), drafters))
            assert two == {0: four[0], 1: four[1], 2: four[0], 3: four[1]}

    asyncio.run(scenario())


def test_a_session_that_was_allowed_no_token_is_an_empty_text() -> None:
    async def scenario() -> None:
        async with playing(says()) as (_, drafters):
            pieces = await all_of(job(max_tokens=0), drafters)
            assert [(piece.text, piece.finish) for piece in pieces[0]] == [("", LENGTH)]

    asyncio.run(scenario())


def test_a_deadline_holds_for_every_choice() -> None:
    async def scenario() -> None:
        async with playing(says(b"ab", finish=None)) as (play, drafters):
            with pytest.raises(WealdError) as raised:
                await all_of(job(2), drafters, 0.5)
            assert raised.value.code is ErrorCode.DEADLINE_EXCEEDED
            await play.alone()

    asyncio.run(scenario())
