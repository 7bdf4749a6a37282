"""The paths of the API, in front of a draft replica that is played over real gRPC."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI

import weald
from services.gateway import calls
from services.gateway.app import Gateway, Settings, create_app
from services.gateway.limits import Limits
from services.types.errors import ErrorCode, WealdError
from services.types.messages import Call, DraftStatus, Event, Finished, Round, Started
from services.types.session import FinishReason
from services.wire import convert
from services.wire.errors import answering
from services.wire.server import serve
from weald.v1 import draft_pb2, draft_pb2_grpc

PATIENCE_S = 30.0
"""For what comes within milliseconds unless something is broken."""
TEXT = "abcdefgh"
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "abc"}], "seed": 5}
PROMPT: dict[str, Any] = {"model": "tiny", "prompt": "abc", "max_tokens": 8, "seed": 5}
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

Item = Event | WealdError | None
"""An event, an error, or nothing any more."""


class Play(draft_pb2_grpc.DraftServiceServicer):
    """A draft replica that says the same text to all, three tokens a round."""

    def __init__(self, encode: Callable[[str], list[int]]) -> None:
        self.encode = encode
        self.text = TEXT
        self.then: list[Item] = []
        """What comes in place of the rest of the text, if anything."""
        self.calls: list[Call] = []
        self.left = 0
        """Calls that have ended."""
        self.linked = True

    def events(self, call: Call) -> list[Item]:
        tokens, at = self.encode(self.text), len(call.prompt)
        rounds = [Round(at + i, tuple(tokens[i : i + 3]), 4, 4, 1, 1) for i in range(0, len(tokens), 3)]
        begun: list[Item] = [Started(call.session, call.params.seed or 0, 2, "verifier:1")]
        if self.then:
            return [*begun, *rounds[:2], *self.then]
        end = FinishReason.LENGTH
        return [*begun, *rounds, Finished(end, at, len(tokens), 2)]

    async def Generate(self, request: draft_pb2.GenerateRequest, context: Any) -> AsyncIterator[Any]:
        call = convert.call_from_proto(request)
        self.calls.append(call)
        try:
            async with answering(context):
                for item in self.events(call):
                    if isinstance(item, WealdError):
                        raise item
                    if item is None:
                        await asyncio.Event().wait()
                    else:
                        yield convert.event_to_proto(item)
        finally:
            self.left += 1

    async def Status(self, request: draft_pb2.DraftServiceStatusRequest, context: Any) -> Any:
        linked = {"verifier:1": self.linked}
        return convert.draft_status_to_proto(DraftStatus("head", b"f", "float32", "cpu", 0, 1, 1, linked, {}))


class Stage:
    """A gateway in front of a played replica, and a client of it."""

    def __init__(self, play: Play, gateway: Gateway, app: FastAPI, client: httpx.AsyncClient) -> None:
        self.play = play
        self.gateway = gateway
        self.app = app
        self.client = client

    async def post(self, path: str, body: dict[str, Any], status: int = 200, **headers: str) -> Any:
        """The JSON of an answer with this status; of one that is streamed, its lines."""
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        response = await self.client.post(path, json=body, headers=names)
        assert response.status_code == status, response.text
        return response.text.splitlines() if body.get("stream") and status == 200 else response.json()

    async def chat(self, status: int = 200, last_event_id: str | None = None, **body: Any) -> Any:
        """An answer to `CHAT` with these changes."""
        headers = {} if last_event_id is None else {"last_event_id": last_event_id}
        return await self.post("/v1/chat/completions", CHAT | body, status, **headers)

    async def error(self, status: int, **options: Any) -> dict[str, Any]:
        """The error object of such an answer."""
        error: dict[str, Any] = (await self.chat(status, **options))["error"]
        return error


@pytest.fixture
def stage(checkpoints: Any) -> Callable[..., Any]:
    """`async with stage(**settings) as at`; without a replica for `replica=False`."""

    @asynccontextmanager
    async def build(replica: bool = True, **options: Any) -> AsyncIterator[Stage]:
        play = Play(checkpoints.tokenizer.encode)
        async with AsyncExitStack() as stack:
            server = await serve(play, "127.0.0.1:0")
            stack.push_async_callback(server.stop, 0)
            endpoints = (f"127.0.0.1:{server.port}",) if replica else ()
            settings = Settings("tiny", "tiny", checkpoints.target, endpoints=endpoints, **options)
            gateway = await stack.enter_async_context(Gateway.opened(settings))
            app = create_app(gateway)
            transport = httpx.ASGITransport(app)
            client = httpx.AsyncClient(transport=transport, base_url="http://gateway")
            yield Stage(play, gateway, app, await stack.enter_async_context(client))

    return build


@pytest.fixture(autouse=True)
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses between calls are short."""
    monkeypatch.setattr(calls, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(calls, "LAST_PAUSE_S", 0.001)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.005)


def ids(lines: Sequence[str]) -> list[str]:
    """Of the events in the lines of a stream."""
    return [line.removeprefix("id: ") for line in lines if line.startswith("id: ")]


def content(lines: Sequence[str]) -> str:
    """The text in the lines of a chat's stream."""
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    return "".join(delta.get("content", "") for delta in deltas)


def test_a_chat_is_answered_as_a_whole(stage: Any) -> None:
    async def scenario() -> None:
        async with stage() as at:
            answer = await at.chat(n=2, weald=True)
            assert answer.keys() == {"id", "object", "created", "model", "choices", "usage"}
            assert answer["object"] == "chat.completion"
            assert answer["model"] == "tiny"
            for index, choice in enumerate(answer["choices"]):
                assert choice["index"] == index
                assert choice["message"] == {"role": "assistant", "content": TEXT, "refusal": None}
                assert (choice["finish_reason"], choice["logprobs"]) == ("length", None)
                assert choice["weald"]["verifier"] == "verifier:1"
            assert {call.session for call in at.play.calls} == {f"{answer['id']}-{i}" for i in range(2)}
            assert len({call.params.seed for call in at.play.calls}) == 2
            assert answer["usage"]["completion_tokens"] == 16
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 2

    asyncio.run(scenario())


def test_a_completion_of_several_prompts_is_answered_in_their_order(stage: Any) -> None:
    async def scenario() -> None:
        async with stage() as at:
            answer = await at.post("/v1/completions", PROMPT | {"prompt": ["ab", "abcd"], "n": 2})
            assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
            assert {choice["text"] for choice in answer["choices"]} == {TEXT}
            by_session = {call.session: len(call.prompt) for call in at.play.calls}
            assert by_session == {f"{answer['id']}-{i}": n for i, n in enumerate((2, 2, 4, 4))}
            assert answer["usage"]["prompt_tokens"] == 6

    asyncio.run(scenario())


def test_another_model_is_not_found_on_any_path(stage: Any) -> None:
    async def scenario() -> None:
        async with stage() as at:
            for path, body in (
                ("/v1/chat/completions", CHAT),
                ("/v1/completions", PROMPT),
                ("/tokenize", {"prompt": "abc"}),
                ("/detokenize", {"tokens": [3]}),
            ):
                error = (await at.post(path, body | {"model": "other/model"}, 404))["error"]
                assert (error["param"], error["code"]) == ("model", "model_not_found")
            assert (await at.client.get("/v1/models/other/model")).status_code == 404
            assert not at.play.calls

    asyncio.run(scenario())


def test_the_model_is_listed_under_the_name_that_it_is_served_by(stage: Any) -> None:
    async def scenario() -> None:
        async with stage() as at:
            listed = (await at.client.get("/v1/models")).json()
            assert (listed["object"], [model["id"] for model in listed["data"]]) == ("list", ["tiny"])
            assert (await at.client.get("/v1/models/tiny")).json() == listed["data"][0]

    asyncio.run(scenario())


def test_texts_and_chats_become_tokens_and_tokens_become_text(stage: Any, checkpoints: Any) -> None:
    encode = checkpoints.tokenizer.encode

    async def scenario() -> None:
        async with stage() as at:
            plain = await at.post("/tokenize", {"model": "tiny", "prompt": "abc"})
            assert plain == {"count": 3, "tokens": encode("abc")}
            shown = await at.post("/tokenize", {"prompt": "a.", "return_token_strs": True})
            assert shown["token_strs"] == ["a", "."]
            chat = await at.post("/tokenize", {"messages": CHAT["messages"]})
            assert chat["tokens"] == encode("<|user|>abc<|answer|>")
            assert await at.post("/detokenize", chat | {"count": 1}, 400)
            text = await at.post("/detokenize", {"tokens": chat["tokens"]})
            assert text == {"prompt": "<|user|>abc<|answer|>"}
            assert (await at.post("/tokenize", {"prompt": ""}))["tokens"] == []

    asyncio.run(scenario())


def test_probes_tell_whether_it_lives_what_it_is_and_whether_it_can_serve(stage: Any) -> None:
    async def scenario() -> None:
        async with stage() as at:
            assert (await at.client.get("/health")).status_code == 200
            assert (await at.client.get("/version")).json() == {"version": weald.__version__}
            assert (await at.client.get("/ready")).status_code == 200
            metrics = await at.client.get("/metrics")
            assert metrics.headers["content-type"].startswith("text/plain")
            assert "weald_num_requests_running 0.0" in metrics.text
        async with stage(replica=False) as at:
            assert (await at.client.get("/health")).status_code == 200
            response = await at.client.get("/ready")
            assert response.status_code == 503
            assert response.json()["error"]["code"] == "unavailable"
        async with stage() as at:
            at.play.linked = False
            assert (await at.client.get("/ready")).status_code == 503
            at.play.linked = True
            async with asyncio.timeout(PATIENCE_S):
                while (await at.client.get("/ready")).status_code != 200:
                    await asyncio.sleep(0.1)

    asyncio.run(scenario())


def test_a_stream_goes_on_behind_the_event_that_came_last(stage: Any) -> None:
    async def scenario() -> None:
        async with stage() as at:
            whole = await at.chat(stream=True)
            assert content(whole) == TEXT
            for count, id in enumerate(ids(whole), 1):
                got = [line for line in whole if line.startswith("data: {")][:count]
                rest = await at.chat(stream=True, last_event_id=id)
                assert content(got) + content(rest) == TEXT
                assert rest[-2] == "data: [DONE]"
            assert len({call.session for call in at.play.calls}) == 1
            assert len({call.params.seed for call in at.play.calls}) == 1

    asyncio.run(scenario())


def test_a_request_without_a_seed_draws_the_same_when_its_stream_goes_on(stage: Any) -> None:
    async def scenario() -> None:
        async with stage() as at:
            lines = await at.chat(stream=True, seed=None, n=2)
            await at.chat(stream=True, seed=None, n=2, last_event_id=ids(lines)[1])
            seeds = {call.session: call.params.seed for call in at.play.calls}
            assert len(seeds) == len(set(seeds.values())) == 2
            assert [seeds[call.session] for call in at.play.calls] == [c.params.seed for c in at.play.calls]
            await at.chat(seed=None)
            assert at.play.calls[-1].params.seed not in seeds.values()

    asyncio.run(scenario())


def test_a_lost_stream_comes_as_a_whole_if_no_stream_is_asked_for(stage: Any) -> None:
    async def scenario() -> None:
        async with stage() as at:
            id = ids(await at.chat(stream=True))[2]
            answer = await at.chat(last_event_id=id)
            assert answer["choices"][0]["message"]["content"] == TEXT
            assert answer["id"] == id.partition("/")[0]
            at.play.text = "hgfedcba"
            error = await at.error(409, last_event_id=id)
            assert error["code"] == "diverged"
            error = await at.error(409, last_event_id=id, stream=True)
            assert error["code"] == "diverged"

    asyncio.run(scenario())


def test_an_id_that_is_none_or_is_of_another_request_is_refused(stage: Any) -> None:
    async def scenario() -> None:
        async with stage() as at:
            id = ids(await at.chat(stream=True))[2]
            calls = len(at.play.calls)
            for wrong in ("7", id + "x", id.replace("/", "")):
                assert "Last-Event-ID" in (await at.error(400, last_event_id=wrong))["message"]
            assert "another request" in (await at.error(400, last_event_id=id, n=2))["message"]
            other = await at.post("/v1/completions", PROMPT, 400, last_event_id=id)
            assert "another request" in other["error"]["message"]
            assert len(at.play.calls) == calls

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("code", "status", "wait_s", "attempts"),
    [
        (ErrorCode.INVALID_ARGUMENT, 400, None, 1),
        (ErrorCode.CONTEXT_LENGTH_EXCEEDED, 400, None, 1),
        (ErrorCode.RESOURCE_EXHAUSTED, 429, 3.0, 1),
        (ErrorCode.UNAVAILABLE, 503, None, calls.ATTEMPTS),
    ],
)
def test_an_error_of_the_services_is_an_answer_with_its_status_streamed_or_not(
    code: ErrorCode, status: int, wait_s: float | None, attempts: int, stage: Any
) -> None:
    async def scenario() -> None:
        async with stage() as at:
            at.play.text, at.play.then = "", [WealdError(code, "do otherwise", retry_after_s=wait_s)]
            for stream in (False, True):
                response = await at.client.post("/v1/chat/completions", json=CHAT | {"stream": stream})
                assert response.status_code == status
                assert response.json()["error"]["message"] == "do otherwise"
                assert response.json()["error"]["code"] == code.value
                assert response.headers.get("retry-after") == (f"{wait_s:g}" if wait_s else None)
            assert len(at.play.calls) == 2 * attempts

    asyncio.run(scenario())


def test_an_error_in_the_middle_of_a_stream_says_how_http_clients_go_on(stage: Any) -> None:
    async def scenario() -> None:
        async with stage() as at:
            at.play.then = [WealdError(ErrorCode.INTERNAL, "broken")]
            lines = await at.chat(stream=True)
            error = json.loads(lines[-2].removeprefix("data: "))["error"]
            assert error["code"] == "internal"
            assert "Last-Event-ID" in error["message"]
            assert "--resume" not in error["message"]
            at.play.then = []
            assert content(await at.chat(stream=True, last_event_id=ids(lines)[-1])) == TEXT[6:]
            at.play.then = [WealdError(ErrorCode.INTERNAL, "broken")]
            assert (await at.error(500))["message"] == "broken"

    asyncio.run(scenario())


def test_an_answer_that_does_not_come_in_time_is_an_error(stage: Any) -> None:
    async def scenario() -> None:
        async with stage(limits=Limits(within_s=0.2)) as at:
            at.play.then = [None]
            assert (await at.error(504))["code"] == "deadline_exceeded"
            await until(lambda: at.play.left == 1)

    asyncio.run(scenario())


def test_trace_context_is_handed_on_if_it_is_one(stage: Any) -> None:
    async def scenario() -> None:
        async with stage() as at:
            for header in (TRACE, "x", TRACE + "0"):
                await at.post("/v1/completions", PROMPT, traceparent=header)
            await at.post("/v1/completions", PROMPT)
            assert [call.traceparent for call in at.play.calls] == [TRACE, "", "", ""]

    asyncio.run(scenario())


def test_plain_steps_can_be_asked_for(stage: Any) -> None:
    async def scenario() -> None:
        async with stage() as at:
            await at.chat(speculative=False)
            await at.chat()
            assert [call.speculative for call in at.play.calls] == [False, True]

    asyncio.run(scenario())


def test_keys_are_asked_for_and_other_origins_let_in_only_where_that_is_set(stage: Any) -> None:
    preflight = {"origin": "https://page.example", "access-control-request-method": "POST"}

    async def scenario() -> None:
        async with stage(api_keys=("secret",), origins=("https://page.example",)) as at:
            assert (await at.error(401))["code"] == "invalid_api_key"
            await at.post("/v1/completions", PROMPT, authorization="Bearer secret")
            asked = await at.client.options("/v1/completions", headers=preflight)
            assert asked.status_code == 200
            assert asked.headers["access-control-allow-origin"] == "https://page.example"
            refused = await at.client.post("/v1/completions", json=PROMPT, headers=preflight)
            assert refused.status_code == 401
            assert refused.headers["access-control-allow-origin"] == "https://page.example"
        async with stage() as at:
            assert (await at.client.options("/v1/completions", headers=preflight)).status_code == 405
            answer = await at.client.post("/v1/completions", json=PROMPT, headers=preflight)
            assert "access-control-allow-origin" not in answer.headers

    asyncio.run(scenario())


def test_the_document_names_every_path_and_the_shape_of_every_answer(stage: Any) -> None:
    async def scenario() -> None:
        async with stage() as at:
            document = (await at.client.get("/openapi.json")).json()
            assert set(document["paths"]) == {
                "/v1/chat/completions",
                "/v1/completions",
                "/v1/models",
                "/v1/models/{model}",
                "/tokenize",
                "/detokenize",
                "/health",
                "/ready",
                "/version",
                "/metrics",
                "/metrics/targets",
                "/replicas",
                "/ui",
            }
            for path in document["paths"].values():
                for operation in path.values():
                    assert {"200", "4XX", "5XX"} == operation["responses"].keys()
            assert (await at.client.get("/docs")).status_code == 404

    asyncio.run(scenario())


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_ends_its_sessions_at_once(stream: bool, stage: Any) -> None:
    async def scenario() -> None:
        async with stage() as at:
            at.play.then = [None]
            listener = socket.create_server(("127.0.0.1", 0))
            config = uvicorn.Config(at.app, lifespan="off", ws="none", log_config=None)
            server = uvicorn.Server(config)
            serving = asyncio.create_task(server.serve([listener]))
            await until(lambda: server.started)
            _, writer = await asyncio.open_connection(*listener.getsockname())
            body = json.dumps(CHAT | {"n": 3, "stream": stream}).encode()
            head = ("POST /v1/chat/completions HTTP/1.1", "host: a", "content-type: application/json")
            lines = [*head, f"content-length: {len(body)}", "", ""]
            writer.write("\r\n".join(lines).encode() + body)
            await until(lambda: len(at.play.calls) == 3)
            assert at.play.left == 0
            writer.close()
            await writer.wait_closed()
            await until(lambda: at.play.left == 3)
            server.should_exit = True
            await serving

    asyncio.run(scenario())
