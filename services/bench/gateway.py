"""`weald bench gateway`: what HTTP in front of a draft service costs, against calling it over gRPC."""

import asyncio
import json
import statistics
import time
from collections.abc import AsyncGenerator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import httpx
from rich.console import Console
from tqdm import tqdm

from services.bench.questions import PROMPTS
from services.bench.replicas import replica
from services.bench.report import figures_table, write_json
from services.draft.servicer import DraftServicer
from services.engine.names import find_text
from services.gateway.tokenizer import Tokenizer
from services.types.messages import Call, DraftStatus, Event, Finished, Round, Started
from services.types.sampling import SamplingParams
from services.types.session import FinishReason
from services.wire.channel import connect
from services.wire.clients import DraftClient
from services.wire.server import serve

PARALLEL = (1, 16)
"""Requests at once."""
TOKENS = 4
"""Of a round."""
SHORT = 4
"""Rounds of an answer whose requests are counted."""
EVERY_MS = 20
"""Between two rounds of a stream."""
WARM_UP = 30
WITHIN_S = 60.0
MESSAGES = [{"role": "user", "content": PROMPTS[0]}]
TEXT = "A big hidden face faded behind a hedge, and a caged beige cat hid behind it."
"""Played again and again; ASCII, so that every round has text."""
KEY = "bench"
"""Given to the gateway, so that a key in its environment does not shut the benchmark out."""
PLAYED = "import asyncio, sys; from services.bench.gateway import play; asyncio.run(play(sys.argv[1]))"


def bench_gateway(model: str, requests: int, rounds: int, repeats: int, json_file: Path | None) -> None:
    """Answer the same requests over HTTP and over gRPC, from a draft service that takes no time.

    Args:
        model: whose tokenizer and chat template the gateway has.
        requests: short answers of each repetition.
        rounds: of each stream.
        repeats: interleaved repetitions.
        json_file: where the figures go.
    """
    prompt = tuple(Tokenizer.load(find_text(model)).chat(MESSAGES))
    with replica(model, program=PLAYED) as played:
        options = ("--model", model, "--served-model-name", "played", "--port", 0, "--api-key", KEY)
        with replica("gateway", *options, "--endpoint", played.address) as gateway:
            rows = asyncio.run(_measure(played.address, gateway.address, prompt, requests, rounds, repeats))
    if json_file:
        settings = {"model": model, "requests": requests, "rounds": rounds, "repeats": repeats}
        write_json(json_file, "gateway", settings | {"every_ms": EVERY_MS}, rows)
    console = Console()
    console.print(figures_table(f"answers of {SHORT * TOKENS} tokens, not streamed, ms", rows["answers"]))
    console.print(figures_table(f"rounds of a stream, one every {EVERY_MS} ms, ms", rows["rounds"]))


class _Way(Protocol):
    """How the service is called."""

    async def answer(self) -> None:
        """Get a short answer."""

    async def stream(self, rounds: int) -> tuple[int, list[int]]:
        """Get so many rounds: when the service began to play, and when each had come, by the clock, ns."""


class _Direct:
    """Over gRPC."""

    def __init__(self, client: DraftClient, prompt: tuple[int, ...]) -> None:
        self._client = client
        self._prompt = prompt
        self._calls = 0

    async def answer(self) -> None:
        async for _ in self._client.generate(self._call(SHORT, 0), WITHIN_S):
            pass

    async def stream(self, rounds: int) -> tuple[int, list[int]]:
        began, arrived = 0, []
        async for event in self._client.generate(self._call(rounds, EVERY_MS), WITHIN_S):
            if isinstance(event, Started):
                began = event.seed
            elif isinstance(event, Round):
                arrived.append(time.perf_counter_ns())
        return began, arrived

    def _call(self, rounds: int, every_ms: int) -> Call:
        self._calls += 1
        params = SamplingParams(max_tokens=rounds * TOKENS, seed=every_ms)
        return Call(f"direct-{self._calls}", self._prompt, (), params)


class _Http:
    """Through the gateway."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def answer(self) -> None:
        response = await self._client.post("/v1/chat/completions", json=self._body(SHORT, 0))
        response.raise_for_status().json()

    async def stream(self, rounds: int) -> tuple[int, list[int]]:
        # Through a bare socket: what a client's library takes for an event is no cost of the gateway.
        body = json.dumps(self._body(rounds, EVERY_MS) | {"stream": True, "weald": True})
        url = self._client.base_url
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {url.host}\r\nAuthorization: Bearer {KEY}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        reader, writer = await asyncio.open_connection(url.host, url.port)
        try:
            writer.write(f"{head}{body}".encode())
            return await _events(reader)
        finally:
            writer.close()
            await writer.wait_closed()

    def _body(self, rounds: int, every_ms: int) -> dict[str, Any]:
        return {
            "model": "played",
            "messages": MESSAGES,
            "max_tokens": rounds * TOKENS,
            "seed": every_ms,
        }


async def _events(reader: asyncio.StreamReader) -> tuple[int, list[int]]:
    """When the service began to play, and when each of its rounds had come."""
    began, arrived = 0, []
    async for line in reader:
        if line.startswith(b"data: {"):
            at = time.perf_counter_ns()
            choice = json.loads(line.removeprefix(b"data: "))["choices"][0]
            if choice["delta"]["content"]:
                arrived.append(at)
            if "weald" in choice:
                began = choice["weald"]["seed"]
    return began, arrived


async def _measure(
    drafter: str, gateway: str, prompt: tuple[int, ...], requests: int, rounds: int, repeats: int
) -> dict[str, list[dict[str, Any]]]:
    answers: dict[tuple[int, str], list[tuple[float, list[int]]]] = {}
    streams: dict[tuple[int, str], list[tuple[list[int], list[int]]]] = {}
    headers = {"Authorization": f"Bearer {KEY}"}
    # A proxy of the environment is for what lies outside.
    http = httpx.AsyncClient(base_url=f"http://{gateway}", headers=headers, timeout=WITHIN_S, trust_env=False)
    async with connect(drafter) as channel, http:
        ways: dict[str, _Way] = {"gRPC": _Direct(DraftClient(channel), prompt), "HTTP": _Http(http)}
        for way in ways.values():
            await _answers(way, max(PARALLEL), WARM_UP)
        with tqdm(total=repeats * len(PARALLEL) * len(ways), desc="bench gateway", unit="run") as bar:
            for repeat in range(repeats):
                for parallel in PARALLEL:
                    for name in ways if repeat % 2 else reversed(ways):
                        key = parallel, name
                        answers.setdefault(key, []).append(await _answers(ways[name], parallel, requests))
                        streams.setdefault(key, []).extend(await _streams(ways[name], parallel, rounds))
                        bar.update()
    keys = [(parallel, name) for parallel in PARALLEL for name in ways]
    return {
        "answers": [_answer_row(*key, answers[key]) for key in keys],
        "rounds": [_round_row(*key, streams[key], streams[key[0], "gRPC"]) for key in keys],
    }


async def _answers(way: _Way, parallel: int, requests: int) -> tuple[float, list[int]]:
    """Requests per second, and the nanoseconds that each took, when so many run at once."""
    took: list[int] = []
    left = iter(range(requests))

    async def ask() -> None:
        for _ in left:
            began = time.perf_counter_ns()
            await way.answer()
            took.append(time.perf_counter_ns() - began)

    began = time.perf_counter()
    await asyncio.gather(*(ask() for _ in range(parallel)))
    return requests / (time.perf_counter() - began), took


async def _streams(way: _Way, parallel: int, rounds: int) -> list[tuple[list[int], list[int]]]:
    """Of so many streams at once: by how many ns each round came after it was due, and from one to the next.

    They begin one after the other, so that their rounds are not due all at the same time.
    """

    async def one(index: int) -> tuple[list[int], list[int]]:
        await asyncio.sleep(index * EVERY_MS / 1e3 / parallel)
        began, arrived = await way.stream(rounds)
        dues = (began + (i + 1) * EVERY_MS * 1_000_000 for i in range(rounds))
        late = [at - due for at, due in zip(arrived, dues, strict=True)]
        return late, [b - a for a, b in pairwise(arrived)]

    return await asyncio.gather(*(one(index) for index in range(parallel)))


def _answer_row(parallel: int, name: str, runs: Sequence[tuple[float, list[int]]]) -> dict[str, Any]:
    took = [one for _, ns in runs for one in ns]
    rate = statistics.median(rate for rate, _ in runs)
    return {"at_once": parallel, "over": name, "count": len(took), "requests_per_s": rate} | _percentiles(
        "took", took
    )


def _round_row(
    parallel: int,
    name: str,
    streams: Sequence[tuple[list[int], list[int]]],
    direct: Sequence[tuple[list[int], list[int]]],
) -> dict[str, Any]:
    """Figures of the rounds: gaps between them, how late they come, how much later than those of gRPC."""
    late = [one for stream, _ in streams for one in stream]
    ours = _percentiles("late", late)
    base = _percentiles("late", [one for stream, _ in direct for one in stream])
    return (
        {"at_once": parallel, "over": name, "count": len(late)}
        | _percentiles("gap", [one for _, stream in streams for one in stream])
        | ours
        | {"added_p50": ours["late_p50"] - base["late_p50"]}
    )


def _percentiles(name: str, nanoseconds: Sequence[int]) -> dict[str, float]:
    """p50 and p99 in milliseconds."""
    cuts = statistics.quantiles(nanoseconds, n=100, method="inclusive")
    return {f"{name}_p50": cuts[49] / 1e6, f"{name}_p99": cuts[98] / 1e6}


class _Played:
    """In the place of a draft service: rounds that cost nothing, of a text of its own.

    The call's seed is read as the milliseconds from round to round; 0: all come at once. The seed told is the
    clock when it began, which is that of all processes of the machine: so callers know when a round was due.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens

    async def generate(self, call: Call) -> AsyncGenerator[Event]:
        began, every_ns = time.perf_counter_ns(), 1_000_000 * (call.params.seed or 0)
        yield Started(call.session, began, 0, "played")
        position, rounds = len(call.prompt), call.params.max_tokens // TOKENS
        for i in range(rounds):
            if every_ns:
                due = began + (i + 1) * every_ns
                await asyncio.sleep(max(0, due - time.perf_counter_ns()) / 1e9)
            at = i * TOKENS
            tokens = tuple(self._tokens[(at + j) % len(self._tokens)] for j in range(TOKENS))
            finish = FinishReason.LENGTH if i + 1 == rounds else None
            yield Round(position + at, tokens, 60, 60, 0, 0, accepted=(1, 2, 3), finish=finish)
        yield Finished(FinishReason.LENGTH, position, rounds * TOKENS, 0)


async def play(model: str) -> None:
    """A draft replica that plays, with the tokens of a model; its line is its address."""
    played: Any = _Played(Tokenizer.load(find_text(model)).encode(TEXT, special=False))
    server = await serve(
        DraftServicer(played, DraftStatus("played", b"", "", "", 0, 0, 0, {}, {})), "127.0.0.1:0"
    )
    print(f"127.0.0.1:{server.port}", flush=True)
    await server.wait()
