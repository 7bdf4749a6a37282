"""Events are sent one by one as they come, in OpenAI's shape, each with an id to go on from."""

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import pytest

from services.gateway import streaming
from services.gateway.choices import Figures, Piece, Token
from services.gateway.errors import HttpError
from services.gateway.requests import job_of, new_id
from services.gateway.resumption import EventId, Point
from services.gateway.schemas import ChatRequest, CompletionRequest, StreamOptions
from services.gateway.shapes import shape_of
from services.gateway.streaming import EventStream, Stream, kept_alive
from services.types.errors import ErrorCode, WealdError
from services.types.session import FinishReason

PATIENCE_S = 30.0
"""For what comes within milliseconds unless something is broken."""

Item = tuple[int, Piece] | None
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "abc"}]}
TEXT = {"model": "tiny", "prompt": "abc"}


def piece(text: str, tokens: int = 0, finish: FinishReason | None = None, **figures: Any) -> Piece:
    told = tuple(Token(3, letter, letter.encode(), -0.5, (), 0) for letter in text)
    return Piece(text, told, finish, Figures(5, seed=7, completion_tokens=tokens, **figures))


ONE: list[Item] = [
    (0, piece("ab", 2)),
    (0, piece("c", 3)),
    (0, piece("d", 5, FinishReason.STOP, rounds=2, tree_rounds=1, tree_tokens=4, verified=9)),
]
TWO: list[Item] = [
    (0, piece("ab", 2)),
    (1, piece("x", 1)),
    (1, piece("yz", 4, FinishReason.LENGTH)),
    (0, piece("c", 3, FinishReason.STOP)),
]


async def played(items: Sequence[Item | Exception]) -> AsyncGenerator[Any]:
    for item in items:
        if isinstance(item, Exception):
            raise item
        yield item


class Heard:
    """The events of one stream, read as a client reads them."""

    def __init__(self, events: list[bytes]) -> None:
        self.raw = b"".join(events).decode()
        self.fields = [dict(line.split(": ", 1) for line in block.split("\n")) for block in self._blocks()]
        self.ids = [fields["id"] for fields in self.fields if "id" in fields]
        self.chunks = [json.loads(fields["data"]) for fields in self.fields if "id" in fields]

    def _blocks(self) -> list[str]:
        assert self.raw.endswith("\n\n")
        return self.raw.removesuffix("\n\n").split("\n\n")

    @property
    def done(self) -> bool:
        return self.fields[-1] == {"data": "[DONE]"}

    def text(self, index: int) -> str:
        choices = [choice for chunk in self.chunks for choice in chunk.get("choices", ())]
        mine = [choice for choice in choices if choice["index"] == index]
        return "".join(choice.get("text") or choice.get("delta", {}).get("content", "") for choice in mine)


@pytest.fixture
def tokenizer(checkpoints: Any) -> Any:
    """The tiny model's."""
    return checkpoints.tokenizer


async def stream(
    tokenizer: Any,
    items: Sequence[Item | Exception],
    *,
    body: dict[str, Any] = CHAT,
    lost: str | None = None,
    **options: Any,
) -> Heard:
    """What a client hears."""
    request = (ChatRequest if "messages" in body else CompletionRequest).model_validate(body)
    at = EventId.parse(lost) if lost else None
    job = job_of(request, tokenizer, at.request if at else new_id(request))
    begin = Stream(
        job,
        shape_of(request, job.id, 1234),
        at or EventId(job.id, (Point(),) * len(job.calls)),
        StreamOptions(**options),
    )
    return Heard([event async for event in begin.events(played(items))])


def test_a_chat_is_streamed_in_chunks_from_its_role_to_its_finish(tokenizer: Any) -> None:
    heard = asyncio.run(stream(tokenizer, ONE))
    first, *middle = heard.chunks
    assert first["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]
    assert [chunk["choices"][0]["delta"] for chunk in middle] == [{"content": t} for t in ("ab", "c", "d")]
    assert [chunk["choices"][0]["finish_reason"] for chunk in middle] == [None, None, "stop"]
    assert {chunk["id"] for chunk in heard.chunks} == {heard.ids[0].partition("/")[0]}
    for chunk in heard.chunks:
        assert (chunk["object"], chunk["created"], chunk["model"]) == ("chat.completion.chunk", 1234, "tiny")
        assert chunk.keys() == {"id", "object", "created", "model", "choices"}
    assert heard.done


def test_a_completion_is_streamed_as_text(tokenizer: Any) -> None:
    heard = asyncio.run(stream(tokenizer, ONE, body=TEXT | {"logprobs": 0}))
    assert [chunk["choices"][0]["text"] for chunk in heard.chunks] == ["ab", "c", "d"]
    assert [chunk["choices"][0]["logprobs"]["tokens"] for chunk in heard.chunks] == [["a", "b"], ["c"], ["d"]]
    assert {chunk["object"] for chunk in heard.chunks} == {"text_completion"}
    assert heard.done


def test_the_last_chunk_of_a_choice_tells_of_its_rounds_if_that_is_asked_for(tokenizer: Any) -> None:
    heard = asyncio.run(stream(tokenizer, ONE, body=CHAT | {"weald": True}))
    *others, last = [chunk["choices"][0] for chunk in heard.chunks]
    assert last["weald"]["seed"] == 7
    assert (last["weald"]["rounds"], last["weald"]["tau"]) == (2, 4.0)
    assert not any("weald" in choice for choice in others)


def test_usage_comes_last_or_with_every_chunk_or_not_at_all(tokenizer: Any) -> None:
    async def usages(**options: Any) -> list[Any]:
        heard = await stream(tokenizer, TWO, body=CHAT | {"n": 2}, **options)
        assert heard.done
        return [chunk.get("usage", "absent") for chunk in heard.chunks]

    async def scenario() -> None:
        assert await usages() == await usages(include_usage=False) == ["absent"] * 6
        assert await usages(continuous_usage_stats=True) == ["absent"] * 6
        *before, last = await usages(include_usage=True)
        assert before == [None] * 6
        assert (last["prompt_tokens"], last["completion_tokens"], last["total_tokens"]) == (5, 7, 12)
        *before, last = await usages(include_usage=True, continuous_usage_stats=True)
        assert [usage["completion_tokens"] for usage in before] == [2, 2, 3, 3, 6, 7]
        assert last["completion_tokens"] == 7

    asyncio.run(scenario())


@pytest.mark.parametrize("body", [CHAT | {"n": 2}, TEXT | {"n": 2}, TEXT | {"prompt": ["a", "b"]}])
def test_behind_each_event_the_rest_comes_and_no_more(body: dict[str, Any], tokenizer: Any) -> None:
    def ends(heard: Heard) -> int:
        return sum(bool(choice["finish_reason"]) for chunk in heard.chunks for choice in chunk["choices"])

    async def scenario() -> None:
        whole = await stream(tokenizer, TWO, body=body)
        again: list[Item] = [
            (1, piece("xy", 2)),
            (0, piece("a", 1)),
            (0, piece("bc", 3, FinishReason.STOP)),
            (1, piece("z", 4, FinishReason.LENGTH)),
        ]
        for at, id in enumerate(whole.ids, 1):
            rest = await stream(tokenizer, again, body=body, lost=id)
            before = Heard([f"id: {id}\ndata: {json.dumps(c)}\n\n".encode() for c in whole.chunks[:at]])
            for index, text in enumerate(("abc", "xyz")):
                assert before.text(index) + rest.text(index) == text
            assert ends(before) + ends(rest) == 2
            assert rest.done
        assert rest.fields == [{"data": "[DONE]"}]

    asyncio.run(scenario())


def test_an_error_before_the_first_event_is_raised_and_later_it_is_the_last_event(tokenizer: Any) -> None:
    lost = WealdError(ErrorCode.UNAVAILABLE, "the replica is lost")

    async def scenario() -> None:
        with pytest.raises(WealdError, match="lost"):
            await stream(tokenizer, [lost])
        heard = await stream(tokenizer, [*ONE[:2], lost])
        assert not heard.done
        assert heard.text(0) == "abc"
        error = heard.chunks[-1]["error"]
        assert (error["type"], error["code"]) == ("server_error", "unavailable")
        assert "the replica is lost" in error["message"]
        assert "`Last-Event-ID`" in error["message"]
        rest = await stream(tokenizer, ONE, lost=heard.ids[-1])
        assert (rest.text(0), rest.done) == ("d", True)

    asyncio.run(scenario())


def test_another_text_than_the_one_delivered_is_an_error_that_advises_no_resumption(tokenizer: Any) -> None:
    async def scenario() -> None:
        heard = await stream(tokenizer, ONE)
        with pytest.raises(HttpError, match="is not the one that was delivered"):
            await stream(tokenizer, [(0, piece("aXcd", 4, FinishReason.STOP))], lost=heard.ids[2])
        heard = await stream(tokenizer, [None, (0, piece("aXcd", 4, FinishReason.STOP))], lost=heard.ids[2])
        error = Heard([heard.raw.removeprefix(": waiting\n\n").encode()]).chunks[-1]["error"]
        assert error["code"] == "diverged"
        assert "without `Last-Event-ID`" in error["message"]
        assert "to get the rest" not in error["message"]

    asyncio.run(scenario())


async def slow(began: asyncio.Event, closed: list[bool], hold: asyncio.Event) -> AsyncGenerator[Any]:
    """One piece, and another one when it may come."""
    try:
        yield ONE[0]
        began.set()
        await hold.wait()
        yield ONE[2]
    finally:
        closed.append(True)


def test_a_stream_where_nothing_comes_shows_that_it_lives(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "PING_S", 0.01)

    async def scenario() -> None:
        closed: list[bool] = []
        hold, ending = asyncio.Event(), asyncio.get_running_loop().create_future()
        heard: list[Any] = []
        async with asyncio.timeout(PATIENCE_S):
            async for item in kept_alive(slow(asyncio.Event(), closed, hold), ending):
                heard.append(item)
                if heard.count(None) == 3:
                    hold.set()
        assert [item for item in heard if item] == [ONE[0], ONE[2]]
        assert heard.count(None) >= 3
        assert closed

    asyncio.run(scenario())
    assert ": waiting\n\n" in asyncio.run(stream(tokenizer, [None, *ONE])).raw


def test_answers_end_when_the_gateway_does() -> None:
    async def scenario() -> None:
        closed: list[bool] = []
        began, ending = asyncio.Event(), asyncio.get_running_loop().create_future()

        async def listen() -> list[Any]:
            return [item async for item in kept_alive(slow(began, closed, asyncio.Event()), ending)]

        listening = asyncio.create_task(listen())
        await began.wait()
        ending.set_result(None)
        with pytest.raises(WealdError) as ended:
            await listening
        assert ended.value.code is ErrorCode.UNAVAILABLE
        assert closed
        with pytest.raises(WealdError):
            await listen()

    asyncio.run(scenario())


def test_leaving_or_cancelling_closes_the_pieces_wherever_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "PING_S", 0.01)

    async def scenario() -> None:
        closed: list[bool] = []
        ending = asyncio.get_running_loop().create_future()
        for leave_at in range(1, 4):
            pieces = kept_alive(slow(asyncio.Event(), closed, asyncio.Event()), ending)
            async with aclosing(pieces):
                for _ in range(leave_at):
                    await anext(pieces)
            assert len(closed) == leave_at
        pieces = kept_alive(slow(asyncio.Event(), closed, asyncio.Event()), ending)
        await anext(pieces)
        waiting = asyncio.ensure_future(anext(pieces))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert len(closed) == 4

    asyncio.run(scenario())


class Reader:
    """A client's end of a response, which reads one event when it is told to."""

    def __init__(self) -> None:
        self.got: list[dict[str, Any]] = []
        self.reads = asyncio.Semaphore(0)

    async def send(self, message: Any) -> None:
        await self.reads.acquire()
        self.got.append(message)


async def numbers(made: list[int], closed: list[bool]) -> AsyncGenerator[bytes]:
    try:
        for number in range(100):
            made.append(number)
            yield f"data: {number}\n\n".encode()
    finally:
        closed.append(True)


async def unheard() -> Any:
    raise AssertionError("a stream listens to nobody")


def test_a_reader_that_is_slow_gets_one_event_at_a_time_and_no_other_is_made() -> None:
    async def scenario() -> None:
        made: list[int] = []
        closed: list[bool] = []
        reader = Reader()
        response = await EventStream.begin(numbers(made, closed))
        sending = asyncio.create_task(response({"type": "http"}, unheard, reader.send))
        for count in range(1, 5):
            reader.reads.release()
            await asyncio.sleep(0.001)
            assert len(reader.got) == count
            assert len(made) == max(1, count - 1) + (count > 1)
        start, first, *_ = reader.got
        headers = dict(start["headers"])
        assert headers[b"content-type"] == b"text/event-stream; charset=utf-8"
        assert headers[b"cache-control"] == b"no-cache"
        assert b"content-length" not in headers
        assert first == {"type": "http.response.body", "body": b"data: 0\n\n", "more_body": True}
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        assert closed

    asyncio.run(scenario())


def test_a_response_ends_with_its_events() -> None:
    async def scenario() -> None:
        reader = Reader()
        closed: list[bool] = []
        for _ in range(200):
            reader.reads.release()
        response = await EventStream.begin(numbers([], closed))
        await response({"type": "http"}, unheard, reader.send)
        assert [message["type"] for message in reader.got] == ["http.response.start"] + [
            "http.response.body"
        ] * 101
        assert not reader.got[-1].get("more_body")
        assert closed

    asyncio.run(scenario())
