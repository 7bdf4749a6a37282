"""What people send by mistake or in bad faith: each gets its answer, others theirs, and nothing is held."""

import asyncio
import json
import random
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from services.bench.replicas import replica
from services.gateway.requests import choice_seed
from services.types.sampling import SamplingParams
from services.types.session import Session

pytestmark = pytest.mark.slow

Make = Callable[..., Any]

PATIENCE_S = 120.0
PROMPT = "abcd"
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
JSON = {"content-type": "application/json"}
LARGE = 10 * 2**20


@pytest.fixture
def text(tiny: Any) -> Make:
    """`text(seed, n tokens)` is what the model says behind `PROMPT`."""
    tokenizer = tiny.models.tokenizer

    def say(seed: int, tokens: int) -> str:
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        return str(tokenizer.decode(tiny.text(Session("a", tuple(tokenizer.encode(PROMPT)), params, seed))))

    return say


@pytest.fixture
def whole(served: Any, reach: Make, text: Make) -> Make:
    """`await whole(gateway)`: afterwards nothing is held, and the answer is right as ever."""

    async def check(client: httpx.AsyncClient) -> None:
        async with reach(served.verifier.address, served.drafter.address) as services:
            await services.idle()
        asked = {"model": "tiny", "prompt": PROMPT, "max_tokens": 20, "seed": 1, "ignore_eos": True}
        answer = await client.post(TEXT, json=asked)
        assert answer.json()["choices"][0]["text"] == text(1, 20)
        async with asyncio.timeout(PATIENCE_S):
            while any([await gauge(client, f"weald_num_requests_{what}") for what in ("running", "waiting")]):
                await asyncio.sleep(0.05)

    return check


async def gauge(client: httpx.AsyncClient, name: str) -> float:
    families = text_string_to_metric_families((await client.get("/metrics")).text)
    [value] = [sample.value for family in families for sample in family.samples if sample.name == name]
    return float(value)


def refused(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error object of an answer that has this status."""
    assert response.status_code == status, response.text[:500]
    assert response.headers["content-type"] == "application/json"
    error: dict[str, Any] = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    assert len(error["message"]) <= 1000
    return error


def test_prompts_of_ten_megabytes_are_refused_and_hold_nobody_up(served: Any, whole: Make) -> None:
    large = "abcdefgh. " * (LARGE // 10)
    bodies = [
        (TEXT, {"prompt": large}),
        (TEXT, {"prompt": [large]}),
        (TEXT, {"prompt": [3] * (LARGE // 2)}),
        (CHAT, {"messages": [{"role": "user", "content": large}]}),
        (CHAT, {"messages": [{"role": "user", "content": "a"}] * (LARGE // 33)}),
        (TEXT, {"prompt": PROMPT, large: 1}),
        (TEXT, {"prompt": PROMPT, "stop": [large]}),
        (TEXT, {"prompt": PROMPT, "user": large}),
        ("/tokenize", {"prompt": large}),
        ("/detokenize", {"tokens": [3] * (LARGE // 2)}),
    ]

    async def scenario() -> None:
        async with httpx.AsyncClient(base_url=served.url, timeout=PATIENCE_S) as client:
            sending = [
                asyncio.create_task(client.post(path, json={"model": "tiny"} | body)) for path, body in bodies
            ]
            for response in await asyncio.gather(*sending):
                assert refused(response, 413)["code"] == "request_too_large"
            await whole(client)

    asyncio.run(scenario())


def test_a_gateway_that_takes_such_prompts_refuses_them_for_their_length_alone(
    served: Any, tiny: Any, whole: Make
) -> None:
    large = "abcdefgh. " * (LARGE // 10)
    bodies = [
        (TEXT, {"prompt": large}),
        (TEXT, {"prompt": [3] * (LARGE // 2)}),
        (CHAT, {"messages": [{"role": "user", "content": large}]}),
        (CHAT, {"messages": [{"role": "user", "content": "abcd"}] * 9000}),
        ("/tokenize", {"prompt": large}),
    ]

    async def scenario(url: str) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
            for path, body in bodies:
                response = await client.post(path, json={"model": "tiny"} | body)
                assert refused(response)["code"] == "context_length_exceeded"
            await whole(client)

    with replica(*tiny.gateway(served.drafter.address), "--max-request-size", "64MiB") as gateway:
        asyncio.run(scenario(f"http://{gateway.address}"))


BROKEN: dict[str, bytes] = {
    "no start byte": b'{"model": "tiny", "prompt": "\xff"}',
    "half a character": b'{"model": "tiny", "prompt": "\xe6\x97"}',
    "ends within a character": b'{"model": "tiny", "prompt": "\xf0\x9f',
    "overlong": b'{"model": "tiny", "prompt": "\xc0\xaf"}',
    "surrogate in UTF-8": b'{"model": "tiny", "prompt": "\xed\xa0\x80"}',
    "escaped half of a pair": rb'{"model": "tiny", "prompt": "\ud83c"}',
    "escaped pair in the wrong order": rb'{"model": "tiny", "prompt": "\udf32\ud83c"}',
    "half of a pair as a field": rb'{"model": "tiny", "prompt": "a", "\ud83c": 1}',
    "half of a pair as a model": rb'{"model": "\ud83c", "prompt": "a"}',
    "half of a pair to stop at": rb'{"model": "tiny", "prompt": "a", "stop": ["\udc00"]}',
    "latin-1": '{"model": "tiny", "prompt": "é"}'.encode("latin-1"),
    "UTF-16 of half a character": b'\xff\xfe{\x00"\x00',
    "zero bytes": b"\x00" * 1000,
    "random": random.Random(0).randbytes(10_000),
    "two objects": b'{"model": "tiny"}{"prompt": "a"}',
    "not a number": b'{"model": "tiny", "prompt": "a", "temperature": NaN}',
    "infinity": b'{"model": "tiny", "prompt": "a", "temperature": 1e999}',
    "a number of a megabyte": b'{"model": "tiny", "prompt": "a", "seed": ' + b"9" * 2**20 + b"}",
}
DEEP: dict[str, bytes] = {
    "arrays": b"[" * 200_000,
    "arrays that close": b"[" * 200_000 + b"]" * 200_000,
    "objects": b'{"model":' * 200_000,
    "within a field": b'{"model":"tiny","prompt":' + b"[" * 900 + b"]" * 900 + b"}",
    "within a message": b'{"model":"tiny","prompt":[{"a":' + b"[" * 5000 + b"]" * 5000 + b"}]}",
    "within a schema": b'{"model":"tiny","prompt":"a","response_format":{"type":"json_schema","json_schema":'
    b'{"name":"a","schema":' + b'{"not":' * 800 + b"{}" + b"}" * 800 + b"}}}",
}


@pytest.mark.parametrize("body", [*BROKEN.values(), *DEEP.values()], ids=[*BROKEN, *DEEP])
def test_broken_text_and_deep_json_are_refused(body: bytes, served: Any) -> None:
    for path in (TEXT, CHAT, "/tokenize", "/detokenize"):
        response = httpx.post(f"{served.url}{path}", content=body, headers=JSON, timeout=PATIENCE_S)
        assert 400 <= response.status_code < 500
        refused(response, response.status_code)


def test_deep_json_in_a_field_that_changes_nothing_is_accepted_or_refused(served: Any, text: Make) -> None:
    for depth in (10, 100, 500, 900, 990, 1000, 5000):
        asked = b'{"model":"tiny","prompt":"abcd","seed":1,"max_tokens":9,"ignore_eos":true,"metadata":'
        body = asked + b'{"a":' * depth + b"1" + b"}" * depth + b"}"
        response = httpx.post(f"{served.url}{TEXT}", content=body, headers=JSON, timeout=PATIENCE_S)
        if response.status_code == 200:
            assert response.json()["choices"][0]["text"] == text(1, 9)
        else:
            assert "nested too deeply" in refused(response)["message"]
            assert depth > 500


class Line:
    """A connection without a client library."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def to(cls, address: str, limit: int = 2**16) -> "Line":
        """Connect; `limit` is what the reader holds, and the kernel for it."""
        host, _, port = address.rpartition(":")
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**12)
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, (host, int(port)))
        return cls(*await asyncio.open_connection(sock=connection, limit=limit))

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def hang_up(self, abruptly: bool) -> None:
        if abruptly:
            self.writer.transport.abort()
        else:
            self.writer.close()
        with suppress(ConnectionError):
            await self.writer.wait_closed()


def request(*, headers: Sequence[bytes] = (b"content-type: application/json",), **body: Any) -> bytes:
    """A whole request as it goes over the line."""
    content = json.dumps({"model": "tiny", "prompt": PROMPT, "ignore_eos": True} | body).encode()
    if not any(header.startswith(b"content-length") for header in headers):
        headers = (*headers, b"content-length: %d" % len(content))
    return b"\r\n".join([f"POST {TEXT} HTTP/1.1".encode(), b"host: a", *headers, b"", content])


RESUMED = b"last-event-id: cmpl-" + b"0" * 32
HEADERS: list[tuple[bytes, set[int]]] = [
    (b"last-event-id: " + b"\xff" * 100, {400}),
    (RESUMED + b"/0.0." + b"0" * 16, {200}),
    (RESUMED + b"/9.9." + b"0" * 16, {409}),
    (b"traceparent: \xfe\xff", {200}),
    (b"x-request-id: a\xc3\xa9", {200}),
    (b"authorization: " + b"\xff" * 1000, {200}),
    (b"content-length: 99999999999999999999999", {400, 413}),
    (b"content-length: 99999999999", {413}),
    (b"content-length: -1", {400}),
    (b"content-length: 5", {400}),
    (b"transfer-encoding: nonsense", {400, 501}),
    (b"content-type: application/json; charset=klingon", {200}),
    (b"x-long: " + b"a" * 200_000, {400, 431}),
    (b"no header", {400}),
    (b"nul: \x00", {400}),
]


@pytest.mark.parametrize(("header", "statuses"), HEADERS, ids=[str(i) for i in range(len(HEADERS))])
def test_headers_that_nobody_should_send_are_refused_or_ignored(
    header: bytes, statuses: set[int], served: Any
) -> None:
    async def scenario() -> int:
        line = await Line.to(served.gateway.address)
        await line.send(request(headers=[b"content-type: application/json", header], max_tokens=1))
        async with asyncio.timeout(PATIENCE_S):
            status = int((await line.reader.readuntil(b"\r\n")).split()[1])
        await line.hang_up(abruptly=True)
        return status

    assert asyncio.run(scenario()) in statuses


def test_readers_that_do_not_read_hold_up_nobody_else(
    served: Any, text: Make, whole: Make, vacant: Make
) -> None:
    voluminous = {"stream": True, "n": 4, "max_tokens": 250, "logprobs": 15}

    async def scenario() -> None:
        async with httpx.AsyncClient(base_url=served.url, timeout=PATIENCE_S) as client:
            lines = [await Line.to(served.gateway.address) for _ in range(2)]
            for line in lines:
                line.writer.transport.pause_reading()
                await line.send(request(**voluminous))
            async with asyncio.timeout(PATIENCE_S):
                while await gauge(client, "weald_num_requests_running") < 2:
                    await asyncio.sleep(0.02)
            asked = {"model": "tiny", "prompt": PROMPT, "ignore_eos": True, "max_tokens": 60}
            answers = await asyncio.gather(*(client.post(TEXT, json=asked | {"seed": i}) for i in range(8)))
            for seed, answer in enumerate(answers):
                assert answer.json()["choices"][0]["text"] == text(seed, 60)
            await vacant(served.verifier.address)
            assert await gauge(client, "weald_num_requests_running") == 2, "they have not got all yet"
            for line in lines:
                await line.hang_up(abruptly=True)
            await whole(client)

    asyncio.run(scenario())


def test_a_reader_that_reads_late_gets_all_of_it(served: Any, text: Make, whole: Make) -> None:
    async def scenario() -> None:
        line = await Line.to(served.gateway.address, limit=2**26)
        line.writer.transport.pause_reading()
        await line.send(request(stream=True, n=4, max_tokens=250, logprobs=15, seed=2))
        await asyncio.sleep(1.0)
        line.writer.transport.resume_reading()
        async with asyncio.timeout(PATIENCE_S):
            said = await line.reader.readuntil(b"data: [DONE]\n\n")
        await line.hang_up(abruptly=False)
        chunks = [json.loads(row[6:]) for row in said.decode().splitlines() if row.startswith("data: {")]
        for index in range(4):
            choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
            assert "".join(choice["text"] for choice in choices) == text(choice_seed(2, index), 250)
        async with httpx.AsyncClient(base_url=served.url, timeout=PATIENCE_S) as client:
            await whole(client)

    asyncio.run(scenario())


async def come_and_go(address: str, rng: random.Random) -> str:
    """A connection that hangs up at some point; where that is."""
    body = {
        "stream": rng.random() < 0.7,
        "n": rng.choice([1, 1, 2, 4]),
        "max_tokens": rng.choice([1, 30, 200]),
    }
    whole = request(**body, seed=rng.randrange(100), speculative=rng.random() < 0.8)
    point = rng.choice(["nothing", "head", "body", "request", "answer", "events"])
    line = await Line.to(address)
    match point:
        case "head":
            await line.send(whole[: rng.randrange(1, whole.index(b"\r\n\r\n"))])
        case "body":
            await line.send(whole[: rng.randrange(whole.index(b"\r\n\r\n") + 4, len(whole))])
        case "request" | "answer" | "events":
            await line.send(whole)
    if point == "request":
        await asyncio.sleep(rng.random() * 0.2)
    elif point in ("answer", "events"):
        await line.reader.read(1)
        if point == "events":
            await line.reader.read(rng.randrange(1, 4000))
    await line.hang_up(abruptly=rng.random() < 0.5)
    return point


def test_a_thousand_connections_that_hang_up_leave_nothing_behind(served: Any, whole: Make) -> None:
    rng = random.Random(7)

    async def scenario() -> None:
        process = psutil.Process(served.gateway.process.pid)
        async with httpx.AsyncClient(base_url=served.url, timeout=PATIENCE_S) as client:
            await whole(client)
            before = process.num_fds()
            at_once = asyncio.Semaphore(100)

            async def one() -> str:
                async with at_once:
                    return await come_and_go(served.gateway.address, rng)

            async with asyncio.timeout(PATIENCE_S * 3):
                points = await asyncio.gather(*(one() for _ in range(1000)))
            assert len(set(points)) == 6
            await whole(client)
            async with asyncio.timeout(PATIENCE_S):
                while process.num_fds() > before + 2:
                    await asyncio.sleep(0.1)

    asyncio.run(scenario())


def test_a_thousand_connections_at_once_are_all_taken(served: Any, whole: Make) -> None:
    async def scenario() -> None:
        lines = await asyncio.gather(*(Line.to(served.gateway.address) for _ in range(1000)))

        async def ask(line: Line) -> bytes:
            await line.send(b"GET /version HTTP/1.1\r\nhost: a\r\n\r\n")
            return await line.reader.readuntil(b"\r\n")

        async with asyncio.timeout(PATIENCE_S):
            said = await asyncio.gather(*map(ask, lines))
        assert {row.split()[1] for row in said} == {b"200"}
        await asyncio.gather(*(line.hang_up(abruptly=True) for line in lines))
        async with httpx.AsyncClient(base_url=served.url, timeout=PATIENCE_S) as client:
            await whole(client)

    asyncio.run(scenario())


def statuses(responses: Sequence[httpx.Response]) -> set[int]:
    return {response.status_code for response in responses}


def test_more_requests_than_there_is_room_for_are_told_to_come_again(
    served: Any, tiny: Any, whole: Make, text: Make
) -> None:
    async def scenario(url: str) -> None:
        limits = httpx.Limits(max_connections=40)
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, limits=limits) as client:
            asked = {"model": "tiny", "prompt": PROMPT, "max_tokens": 60, "ignore_eos": True, "seed": 1}
            responses = await asyncio.gather(*(client.post(TEXT, json=asked) for _ in range(40)))
            assert statuses(responses) == {200, 429}
            for response in responses:
                if response.status_code == 429:
                    assert int(response.headers["retry-after"]) >= 1
                    assert response.json()["error"]["type"] == "rate_limit_exceeded"
                else:
                    assert response.json()["choices"][0]["text"] == text(1, 60)
            await whole(client)

    options = "--max-concurrent-requests", 2, "--max-queued-requests", 3
    with replica(*tiny.gateway(served.drafter.address), *options) as gateway:
        asyncio.run(scenario(f"http://{gateway.address}"))
