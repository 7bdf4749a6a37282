"""The API as people's clients use it, with gateway, draft and verify replica as processes.

What a text must be, the decoder in this process says: with every parameter, with draft trees and without.
"""

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
import torch
from langchain_openai import ChatOpenAI
from prometheus_client.parser import text_string_to_metric_families
from transformers import AutoModelForCausalLM

from services.bench.replicas import Forked, Replica, replica
from services.gateway.requests import choice_seed
from services.types.sampling import SamplingParams
from services.types.session import FinishReason, Session
from services.wire.channel import connect
from services.wire.clients import DraftClient

pytestmark = pytest.mark.slow

Make = Callable[..., Any]

PATIENCE_S = 60.0
PROMPT = "abcd"
QUESTION = [{"role": "user", "content": PROMPT}]
LONG = {"ignore_eos": True, "max_tokens": 150}


@pytest.fixture(scope="module")
def client(served: Any) -> Iterator[openai.OpenAI]:
    """The openai package's client."""
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0, timeout=PATIENCE_S) as one:
        yield one


@pytest.fixture(scope="module")
def post(served: Any) -> Iterator[Make]:
    """`post(path, **body)` is the JSON of the answer."""
    with httpx.Client(base_url=served.url, timeout=PATIENCE_S) as http:

        def send(path: str, status: int = 200, **body: Any) -> Any:
            response = http.post(path, json={"model": "tiny"} | body)
            assert response.status_code == status, response.text
            return response.json()

        yield send


def about(value: Any) -> Any:
    """Equal to it but for the last bits of numbers."""
    match value:
        case dict():
            return {key: about(one) for key, one in value.items()}
        case list():
            return [about(one) for one in value]
        case float():
            return pytest.approx(value, abs=1e-9)
    return value


@pytest.fixture(scope="module")
def complete(post: Make) -> Make:
    """`complete(**body)` is the first choice of a completion, the same with draft trees and without."""

    def ask(**body: Any) -> dict[str, Any]:
        asked = {"prompt": PROMPT, "max_tokens": 40, "seed": 1, "weald": True} | body
        drafted, plain = (post("/v1/completions", speculative=on, **asked) for on in (True, False))
        first, second = (answer["choices"][0] for answer in (drafted, plain))
        assert second.pop("weald")["draft_tokens"] == 0
        told = first.pop("weald")
        logprobs = second.pop("logprobs")
        assert first.pop("logprobs") == about(logprobs)
        assert first == second
        assert drafted["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"]
        return first | {"logprobs": logprobs, "weald": told, "usage": drafted["usage"]}

    return ask


@pytest.fixture(scope="module")
def said(tiny: Any) -> Make:
    """`said(prompt ids, seed, **params)` is the text that this process makes of it, and why it ends."""

    def decode(prompt: Sequence[int], seed: int, **params: Any) -> tuple[str, str]:
        session = Session("here", tuple(prompt), SamplingParams(**params), seed)
        tokens, finish = tiny.text(session), tiny.finish(session)
        ends = finish is FinishReason.STOP
        return tiny.models.tokenizer.decode(tokens[:-1] if ends else tokens), finish.value

    return decode


@pytest.fixture(scope="module")
def ids(tiny: Any) -> Make:
    """`ids(text)` are its token ids."""
    encode: Make = tiny.models.tokenizer.encode
    return encode


def test_the_openai_client_gets_answers_as_a_whole_and_in_pieces(
    client: openai.OpenAI, said: Make, tiny: Any
) -> None:
    chat = tiny.models.tokenizer.chat(QUESTION)
    text, finish = said(chat, 3, max_tokens=30)
    answer = client.chat.completions.create(model="tiny", messages=QUESTION, max_tokens=30, seed=3)
    assert answer.choices[0].message.content == text
    assert answer.choices[0].finish_reason == finish
    chunks = list(
        client.chat.completions.create(
            model="tiny",
            messages=QUESTION,
            max_completion_tokens=30,
            seed=3,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == finish
    assert not chunks[-1].choices
    for counted in (answer.usage, chunks[-1].usage):
        prompt, completion = counted.prompt_tokens, counted.completion_tokens
        assert (prompt, prompt + completion) == (len(chat), counted.total_tokens)
    assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").object == "model"


def test_the_async_openai_client_gets_many_answers_at_once(served: Any, said: Make, ids: Make) -> None:
    async def scenario() -> list[Any]:
        async with openai.AsyncOpenAI(
            base_url=f"{served.url}/v1", api_key="any", timeout=PATIENCE_S
        ) as client:

            async def one(seed: int) -> str:
                pieces = await client.completions.create(
                    model="tiny", prompt=PROMPT, max_tokens=20, seed=seed, stream=True
                )
                return "".join([piece.choices[0].text async for piece in pieces])

            return await asyncio.gather(*map(one, range(12)))

    texts = asyncio.run(scenario())
    assert texts == [said(ids(PROMPT), seed, max_tokens=20)[0] for seed in range(12)]


def test_langchain_invokes_streams_and_batches(served: Any, said: Make, tiny: Any) -> None:
    chat = tiny.models.tokenizer.chat(QUESTION)
    text, finish = said(chat, 4, max_tokens=25)

    async def scenario(model: ChatOpenAI) -> tuple[Any, list[Any]]:
        answer = await model.ainvoke(PROMPT)
        return answer, [piece async for piece in model.astream(PROMPT)]

    with httpx.Client(timeout=PATIENCE_S) as http:
        asynchronous = httpx.AsyncClient(timeout=PATIENCE_S)
        model = ChatOpenAI(
            model="tiny",
            base_url=f"{served.url}/v1",
            api_key="any",
            max_tokens=25,
            seed=4,
            temperature=1.0,
            http_client=http,
            http_async_client=asynchronous,
        )
        answer = model.invoke(PROMPT)
        assert (answer.content, answer.response_metadata["finish_reason"]) == (text, finish)
        assert answer.usage_metadata["input_tokens"] == len(chat)
        assert "".join(str(piece.content) for piece in model.stream(PROMPT)) == text
        assert [one.content for one in model.batch([PROMPT] * 3)] == [text] * 3

        async def both() -> None:
            async with asynchronous:
                whole, pieces = await scenario(model)
                assert whole.content == "".join(str(piece.content) for piece in pieces) == text

        asyncio.run(both())


def test_curl_gets_an_answer_and_a_stream(served: Any, said: Make, ids: Make) -> None:
    text, _ = said(ids(PROMPT), 5, max_tokens=20)

    def curl(**body: Any) -> str:
        sent = json.dumps({"model": "tiny", "prompt": PROMPT, "max_tokens": 20, "seed": 5} | body)
        command = ["curl", "-sSN", f"{served.url}/v1/completions", "-H", "Content-Type: application/json"]
        return subprocess.run([*command, "-d", sent], capture_output=True, text=True, check=True).stdout

    assert json.loads(curl())["choices"][0]["text"] == text
    lines = [line.removeprefix("data: ") for line in curl(stream=True).splitlines() if "data: " in line]
    assert lines.pop() == "[DONE]"
    assert "".join(json.loads(line)["choices"][0]["text"] for line in lines) == text


PROCESSORS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.3},
    "greedy": {"temperature": 0.0},
    "top_p": {"top_p": 0.4},
    "top_k": {"top_k": 2},
    "min_p": {"min_p": 0.5},
    "frequency_penalty": {"frequency_penalty": 2.0},
    "presence_penalty": {"presence_penalty": 2.0},
    "repetition_penalty": {"repetition_penalty": 3.0},
    "logit_bias": {"logit_bias": {"3": -100, "4": 1.5}},
    "seed": {"seed": 2},
    "max_tokens": {"max_tokens": 9},
    "min_tokens": {"min_tokens": 39, "logit_bias": {"0": 8}},
    "stop_token_ids": {"stop_token_ids": [4, 6]},
    "ignore_eos": {"ignore_eos": True, "logit_bias": {"0": 3}},
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_every_sampling_parameter_makes_the_text_that_it_makes_in_this_process(
    name: str, complete: Make, said: Make, ids: Make
) -> None:
    asked = PROCESSORS[name]
    params = {"max_tokens": 40} | asked
    seed = params.pop("seed", 1)
    if "logit_bias" in params:
        params["logit_bias"] = {int(token): bias for token, bias in params["logit_bias"].items()}
    if "stop_token_ids" in params:
        params["stop_token_ids"] = tuple(params["stop_token_ids"])
    choice = complete(**asked)
    text, finish = said(ids(PROMPT), seed, **params)
    assert (choice["text"], choice["finish_reason"]) == (text, finish)
    neutral = {key: value for key, value in asked.items() if key != name}
    neutral.pop("temperature", None)
    assert complete(**neutral)["text"] != text, "the parameter changes the text"


def test_narrow_distributions_are_the_most_likely_token(complete: Make) -> None:
    greedy = complete(temperature=0)["text"]
    assert complete(temperature=0, seed=2)["text"] == greedy
    for narrow in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1}):
        assert complete(**narrow)["text"] == greedy
    assert complete()["text"] != greedy


def test_prompts_are_texts_or_tokens_one_or_several(post: Make, complete: Make, ids: Make, tiny: Any) -> None:
    alone = [complete(prompt=prompt)["text"] for prompt in ("abcd", "ef")]
    assert complete(prompt=ids("abcd"))["text"] == alone[0]
    for several in (["abcd", "ef"], [ids("abcd"), ids("ef")]):
        answer = post("/v1/completions", prompt=several, max_tokens=40, seed=1)
        assert [choice["text"] for choice in answer["choices"]] == alone
        assert answer["usage"]["prompt_tokens"] == 6
    chat = post("/v1/chat/completions", messages=QUESTION, max_tokens=40, seed=1)
    text = complete(prompt=tiny.models.tokenizer.chat(QUESTION))["text"]
    assert chat["choices"][0]["message"]["content"] == text
    parts = [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}]
    assert post("/v1/chat/completions", messages=parts, max_tokens=40, seed=1)["choices"] == chat["choices"]


def test_four_choices_are_reproducible_and_all_different(post: Make, said: Make, ids: Make) -> None:
    asked = {"prompt": PROMPT, "n": 4, "seed": 9, "max_tokens": 40}
    first, second = (post("/v1/completions", **asked) for _ in range(2))
    texts = [choice["text"] for choice in first["choices"]]
    assert texts == [choice["text"] for choice in second["choices"]]
    assert len(set(texts)) == 4
    assert texts == [said(ids(PROMPT), choice_seed(9, index), max_tokens=40)[0] for index in range(4)]
    plain = post("/v1/completions", **asked, speculative=False)
    assert texts == [choice["text"] for choice in plain["choices"]]
    greedy = post("/v1/completions", **asked | {"temperature": 0})
    assert len({choice["text"] for choice in greedy["choices"]}) == 1


def test_a_request_without_a_seed_tells_the_one_it_got(post: Make) -> None:
    asked = {"prompt": PROMPT, "max_tokens": 40, "ignore_eos": True, "weald": True}
    texts = {}
    for _ in range(3):
        choice = post("/v1/completions", **asked)["choices"][0]
        texts[choice["weald"]["seed"]] = choice["text"]
        again = post("/v1/completions", **asked, seed=choice["weald"]["seed"])["choices"][0]
        assert again["text"] == choice["text"]
    assert len(texts) == len(set(texts.values())) == 3


def test_a_stop_string_ends_the_text_exactly_there_wherever_it_stands_in_a_round(
    complete: Make, post: Make
) -> None:
    whole = complete(ignore_eos=True, max_tokens=60)["text"]
    for start in range(4, 30, 3):
        stop = whole[start : start + 3]
        at = whole.index(stop)
        asked = {"ignore_eos": True, "max_tokens": 60, "stop": stop}
        cut = complete(**asked)
        assert (cut["text"], cut["finish_reason"]) == (whole[:at], "stop")
        assert complete(**asked, include_stop_str_in_output=True)["text"] == whole[: at + 3]
        streamed = post("/v1/completions", prompt=PROMPT, seed=1, **asked | {"stop": ["zzz", stop, "q" * 99]})
        assert streamed["choices"][0]["text"] == whole[:at]
    never = complete(ignore_eos=True, max_tokens=60, stop=[f"{i}" for i in range(16)])
    assert (never["text"], never["finish_reason"]) == (whole, "length")


def test_usage_counts_every_token_and_every_draft_token(complete: Make, ids: Make) -> None:
    choice = complete(ignore_eos=True, temperature=0)
    usage, weald = choice["usage"], choice["weald"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (4, 40, 44)
    details = usage["completion_tokens_details"]
    accepted = details["accepted_prediction_tokens"]
    assert accepted == sum(weald["accepted_per_position"]) > 0
    assert accepted + details["rejected_prediction_tokens"] == weald["draft_tokens"]
    assert weald["accepted_per_position"] == sorted(weald["accepted_per_position"], reverse=True)
    # The prefill brings one token, every round another one besides what it accepts.
    assert 0 <= 1 + weald["rounds"] + accepted - 40 <= 1
    assert weald["tau"] == pytest.approx(1 + accepted / weald["draft_rounds"], rel=0.1)


def test_logprobs_are_those_of_the_targets_raw_logits_token_by_token(
    post: Make, complete: Make, tiny: Any, ids: Make
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny.target, dtype=torch.float64)
    tokenizer = tiny.models.tokenizer
    choice = complete(logprobs=3, temperature=0.8, ignore_eos=True, top_k=5)
    told = choice["logprobs"]
    tokens = [ids(text)[0] for text in told["tokens"]]
    assert len(tokens) == 40
    visible = "".join(tokenizer.decode([token]) for token in tokens)
    assert visible == choice["text"]
    assert told["text_offset"] == [len(tokenizer.decode(tokens[:i])) for i in range(40)]
    with torch.inference_mode():
        logits = model(torch.tensor([[*ids(PROMPT), *tokens]])).logits[0]
    for i, (token, row) in enumerate(zip(tokens, logits[3:-1].log_softmax(-1).tolist(), strict=True)):
        assert told["token_logprobs"][i] == pytest.approx(row[token], abs=1e-5)
        likely = {*sorted(range(15), key=row.__getitem__)[-3:], token}
        assert told["top_logprobs"][i] == pytest.approx(
            {tokenizer.text_of(t): row[t] for t in likely}, abs=1e-5
        )
    asked = {"max_tokens": 20, "seed": 1, "logprobs": True, "top_logprobs": 2}
    chat = post("/v1/chat/completions", messages=QUESTION, **asked)["choices"][0]
    entries = chat["logprobs"]["content"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
    text = bytes(byte for entry in entries for byte in entry["bytes"] or ())
    assert text.decode() == chat["message"]["content"]


def test_fields_that_change_nothing_are_accepted_and_those_that_cannot_be_honoured_are_named(
    client: openai.OpenAI,
) -> None:
    def ask(**body: Any) -> Any:
        return client.chat.completions.create(
            model="tiny", messages=QUESTION, max_tokens=20, seed=1, extra_body=body
        )

    plain = ask().choices[0].message.content
    harmless = {"user": "me", "store": True, "metadata": {"a": "b"}, "service_tier": "auto"}
    assert ask(**harmless).choices[0].message.content == plain
    for name in ("tools", "echo", "prompt_logprobs", "best_of", "invented"):
        with pytest.raises(openai.BadRequestError) as refused:
            ask(**{name: [{}] if name == "tools" else 5})
        assert refused.value.param == name
        assert f"`{name}`" in refused.value.message
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="another", prompt="a")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="tiny", prompt="a" * 300)
    assert long.value.code == "context_length_exceeded"


def test_a_text_goes_on_to_the_end_of_the_context_if_nothing_else_ends_it(post: Make) -> None:
    chat = post("/v1/chat/completions", messages=QUESTION, seed=1, ignore_eos=True)
    assert chat["usage"]["total_tokens"] in (255, 256)
    assert chat["choices"][0]["finish_reason"] == "length"
    assert post("/v1/completions", prompt=PROMPT, seed=1, ignore_eos=True)["usage"]["completion_tokens"] == 16


SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["oak", "ash"]}, "leaves": {"type": "array", "items": {"type": "null"}}},
    "required": ["name", "leaves"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def scribe(writer: Any, head: Make, tiny: Any) -> Iterator[str]:
    """Where a model completes prompts that can write any text."""
    writer.plain.model.save_pretrained(writer.directory)
    head(writer.target, vocab_size=writer.target.vocab_size).save(writer.directory / "head", torch.float64)
    model = replace(tiny, target=writer.directory, head=writer.directory / "head")
    with (
        replica(*model.verify, threads=1) as verifier,
        replica(*model.draft(verifier.address), threads=1) as drafter,
        replica(*model.gateway(drafter.address)) as gateway,
    ):
        yield f"http://{gateway.address}/v1/completions"


def test_a_response_format_is_kept_with_draft_trees_and_without(scribe: str) -> None:
    asked = {"model": "tiny", "prompt": "A tree:", "max_tokens": 200}
    schema = {"type": "json_schema", "json_schema": {"name": "tree", "schema": SCHEMA, "strict": True}}

    def ask(**body: Any) -> dict[str, Any]:
        answers = [
            httpx.post(scribe, json=asked | body | {"speculative": on}, timeout=PATIENCE_S)
            for on in (True, False)
        ]
        for answer in answers:
            assert answer.status_code == 200, answer.text
        first, second = (answer.json()["choices"][0] for answer in answers)
        assert first == second
        return dict(first)

    texts = []
    for seed in range(4):
        choice = ask(seed=seed, response_format=schema)
        assert choice["finish_reason"] == "stop"
        tree = json.loads(choice["text"])
        assert tree.keys() == {"name", "leaves"}
        assert tree["name"] in ("oak", "ash")
        assert set(tree["leaves"]) <= {None}
        texts.append(choice["text"])
    assert len(set(texts)) > 1
    some = ask(seed=1, response_format={"type": "json_object"})
    assert some["text"].lstrip().startswith("{")
    if some["finish_reason"] == "stop":
        assert isinstance(json.loads(some["text"]), dict)
    assert not ask(seed=1)["text"].startswith("{")
    assert ask(seed=1, response_format={"type": "text"}) == ask(seed=1)
    wrong = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "nonsense"}}}
    refused = httpx.post(scribe, json=asked | {"response_format": wrong})
    assert refused.status_code == 400
    assert refused.json()["error"]["type"] == "invalid_request_error"


# Streams that are lost.


class Heard:
    """The events of a stream."""

    def __init__(self) -> None:
        self.last = ""
        """The id of the last event."""
        self.chunks: list[dict[str, Any]] = []
        self.done = False

    def take(self, line: str) -> None:
        """The next line."""
        name, _, value = line.partition(": ")
        if name == "id":
            self.last = value
        elif line == "data: [DONE]":
            self.done = True
        elif name == "data":
            self.chunks.append(json.loads(value))

    def text(self, index: int = 0) -> str:
        """Of one choice."""
        choices = [choice for chunk in self.chunks for choice in chunk.get("choices", ())]
        return "".join(choice["text"] for choice in choices if choice["index"] == index)


async def hear(
    url: str,
    *,
    last: str | None = None,
    leave_after: int = 0,
    once_begun: Callable[[], Awaitable[object]] | None = None,
    **body: Any,
) -> Heard:
    """A stream whose client leaves after so many chunks, or stays to the end; it does something meanwhile."""
    heard, headers = Heard(), {} if last is None else {"Last-Event-ID": last}
    asked = {"model": "tiny", "prompt": PROMPT, "seed": 6, "stream": True} | LONG | body
    async with (
        httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client,
        client.stream("POST", "/v1/completions", json=asked, headers=headers) as response,
    ):
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            heard.take(line)
            if once_begun and len(heard.chunks) == 3:
                once_begun = await once_begun() and None
            if leave_after and len(heard.chunks) >= leave_after:
                break
    return heard


def test_a_client_that_lost_its_stream_gets_the_rest_from_this_gateway_or_another(
    served: Any, said: Make, ids: Make, tiny: Any
) -> None:
    texts = [said(ids(PROMPT), choice_seed(6, index), **LONG)[0] for index in range(3)]

    async def scenario(other: str) -> None:
        for url in (served.url, other):
            got = await hear(served.url, n=3, leave_after=20)
            assert not got.done
            rest = await hear(url, last=got.last, n=3)
            assert rest.done
            assert rest.chunks[0]["id"] == got.chunks[0]["id"]
            for index, text in enumerate(texts):
                assert got.text(index) + rest.text(index) == text

    with replica(*tiny.gateway(served.drafter.address)) as other:
        asyncio.run(scenario(f"http://{other.address}"))


def test_a_client_that_hangs_up_frees_its_sessions_at_once(served: Any, reach: Make) -> None:
    async def scenario() -> None:
        async with reach(served.verifier.address, served.drafter.address) as services:

            async def steps(leave_after: int) -> int:
                before = await services.counters()
                await hear(served.url, n=16, max_tokens=200, leave_after=leave_after)
                await services.idle()
                after = await services.counters()
                return sum(after[name] - before.get(name, 0) for name in ("trees_verified", "plain_steps"))

            whole = await steps(0)
            assert await steps(20) < whole / 2

    asyncio.run(scenario())


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not await condition():
            await asyncio.sleep(0.05)


async def running(address: str) -> int:
    """Sessions at a draft replica."""
    async with connect(address) as channel:
        return (await DraftClient(channel).status(PATIENCE_S)).running


def test_a_stream_outlives_the_draft_replica_that_serves_it_with_its_client_or_without(
    tiny: Any, said: Make, ids: Make, tmp_path: Path
) -> None:
    text = said(ids(PROMPT), 6, **LONG)[0]

    with ExitStack() as stack:

        def start(*arguments: object) -> Forked:
            started = Forked(*arguments, log=tmp_path / "log")
            stack.callback(started.stop, signal.SIGTERM)
            return started

        store = start("store", "--directory", tmp_path).ready()
        verifier, *forks = [
            start(*arguments, "--store", store)
            for arguments in (tiny.verify, tiny.draft(), tiny.draft(), tiny.draft())
        ]
        verifier.ready()
        drafters = {fork.ready(): fork for fork in forks}
        gateway = stack.enter_context(replica(*tiny.gateway(), "--store", store))
        url = f"http://{gateway.address}"

        async def kill() -> None:
            """The one that serves the stream."""
            [serving] = [address for address in drafters if await running(address)]
            drafters.pop(serving).stop()

        async def ready() -> bool:
            async with httpx.AsyncClient(base_url=url) as client:
                return (await client.get("/ready")).status_code == 200

        async def scenario() -> None:
            await until(ready)
            got = await hear(url, leave_after=4, once_begun=kill)
            rest = await hear(url, last=got.last)
            assert got.text() + rest.text() == text
            whole = await hear(url, once_begun=kill, weald=True)
            assert (whole.text(), whole.done) == (text, True)
            assert whole.chunks[-1]["choices"][0]["weald"]["moves"] == 1

        asyncio.run(scenario())


@pytest.mark.parametrize("workers", [1, 2])
def test_a_gateway_that_is_told_to_end_lets_its_streams_end_and_takes_no_others(
    workers: int, served: Any, tiny: Any, said: Make, ids: Make
) -> None:
    text = said(ids(PROMPT), 6, **LONG)[0]

    async def scenario(gateway: Replica) -> int:
        url = f"http://{gateway.address}"

        async def terminate() -> None:
            gateway.process.send_signal(signal.SIGTERM)

            async def closed() -> bool:
                try:
                    async with httpx.AsyncClient(base_url=url) as client:
                        return (await client.get("/health")).status_code != 200
                except httpx.TransportError:
                    return True

            await until(closed)

        heard = await hear(url, once_begun=terminate)
        assert (heard.text(), heard.done) == (text, True)
        return await asyncio.to_thread(gateway.process.wait, PATIENCE_S)

    with replica(*tiny.gateway(served.drafter.address), "--workers", workers) as gateway:
        children = psutil.Process(gateway.process.pid).children()
        assert len(children) >= (workers if workers > 1 else 0)
        assert asyncio.run(scenario(gateway)) == 0
        assert not psutil.wait_procs(children, PATIENCE_S)[1]


def test_a_stream_that_outlasts_the_time_to_drain_is_told_to_go_on_elsewhere(
    served: Any, tiny: Any, said: Make, ids: Make
) -> None:
    text = said(ids(PROMPT), 6, **LONG)[0]

    async def scenario(gateway: Replica) -> None:
        async def terminate() -> None:
            gateway.process.send_signal(signal.SIGTERM)

        heard = await hear(f"http://{gateway.address}", once_begun=terminate)
        assert not heard.done
        error = heard.chunks[-1]["error"]
        assert error["code"] == "unavailable"
        assert "Last-Event-ID" in error["message"]
        rest = await hear(served.url, last=heard.last)
        assert heard.text() + rest.text() == text
        assert await asyncio.to_thread(gateway.process.wait, PATIENCE_S) == 0

    with replica(*tiny.gateway(served.drafter.address), "--drain", 0) as gateway:
        asyncio.run(scenario(gateway))


# The process.

LISTS_MODULES = """
import sys
from services.cli.app import app

try:
    app()
finally:
    print(*{name.partition(".")[0] for name in sys.modules})
"""


def test_a_gateway_serves_without_torch_and_ray(served: Any, tiny: Any) -> None:
    command = [sys.executable, "-c", LISTS_MODULES, *map(str, tiny.gateway(served.drafter.address))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        url = f"http://{process.stdout.readline().split()[-1]}"
        heard = asyncio.run(hear(url, stream=True, max_tokens=5))
        assert heard.done
        process.terminate()
        loaded = set(process.stdout.read().split())
    assert process.returncode == 0
    assert {"fastapi", "uvicorn", "tokenizers", "grpc"} <= loaded
    assert not loaded & {"torch", "transformers", "ray", "numpy"}


def test_workers_share_a_port_count_together_and_are_replaced_when_they_die(served: Any, tiny: Any) -> None:
    asked = {"model": "tiny", "prompt": PROMPT, "max_tokens": 5}

    def workers(gateway: Replica) -> list[psutil.Process]:
        # Another child keeps track of what they share.
        children = psutil.Process(gateway.process.pid).children()
        alive = [child for child in children if child.status() != psutil.STATUS_ZOMBIE]
        return [child for child in alive if "spawn_main" in " ".join(child.cmdline())]

    def send(url: str, count: int) -> None:
        # Each connection is taken by one of them.
        for _ in range(count):
            httpx.post(f"{url}/v1/completions", json=asked, timeout=PATIENCE_S).raise_for_status()

    def counted(url: str) -> float:
        families = text_string_to_metric_families(httpx.get(f"{url}/metrics").text)
        samples = [sample for family in families for sample in family.samples]
        return sum(sample.value for sample in samples if sample.name == "weald_request_success_total")

    with replica(*tiny.gateway(served.drafter.address), "--workers", 2) as gateway:
        url = f"http://{gateway.address}"
        send(url, 10)
        assert counted(url) == 10
        before = workers(gateway)
        assert len(before) == 2
        before[0].kill()

        async def replaced() -> bool:
            now = workers(gateway)
            return len(now) == 2 and before[0] not in now

        asyncio.run(until(replaced))
        send(url, 10)
        assert counted(url) == 20


def test_keys_come_from_options_a_file_and_the_environment(
    served: Any, tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "keys").write_text("second\nthird\n")
    monkeypatch.setenv("WEALD_API_KEY", "first other")
    with replica(*tiny.gateway(served.drafter.address), "--api-key-file", tmp_path / "keys") as gateway:
        url = f"http://{gateway.address}"
        for key in ("first", "other", "second", "third"):
            with openai.OpenAI(base_url=f"{url}/v1", api_key=key) as client:
                assert [model.id for model in client.models.list()] == ["tiny"]
        with (
            openai.OpenAI(base_url=f"{url}/v1", api_key="fourth") as client,
            pytest.raises(openai.AuthenticationError),
        ):
            client.models.list()
        assert httpx.get(f"{url}/health").status_code == 200
