"""`weald bench journal`: the processor time that keeping sessions in Redis costs, over all processes."""

import asyncio
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from services.bench.replicas import WHOLE_TREES, replica, until_linked
from services.bench.report import resampled, write_json
from services.engine.checkpoints import resolve
from services.gateway.tokenizer import Tokenizer
from services.sessions.embedded import embedded
from services.types.messages import Call, Round
from services.types.sampling import SamplingParams
from services.wire.channel import connect
from services.wire.clients import DraftClient

SETTLE_S = 0.3
"""After an answer, for what the journal still writes of it."""
STORES = ("memory", "redis")


def bench_journal(
    model: str,
    head: str | None,
    dtype: str,
    prompts: Sequence[str],
    max_tokens: int,
    json_file: Path | None,
) -> None:
    """Answer every prompt with the journal in memory and in Redis, in turn; compare processor time."""
    named = ("--model", model, "--dtype", dtype, "--port", 0)
    heads = ("--speculative-model", head) if head else ()
    tokenizer = Tokenizer.load(resolve(model))
    calls = [tuple(tokenizer.chat([{"role": "user", "content": prompt}])) for prompt in prompts]
    with (
        tempfile.TemporaryDirectory() as directory,
        embedded(Path(directory)) as redis,
        replica("verify", *named, threads=1) as verifier,
        replica("draft", *named, *heads, *WHOLE_TREES, "--verify", verifier.address, threads=1) as plain,
        replica(
            *("draft", *named, *heads, *WHOLE_TREES),
            *("--verify", verifier.address, "--store", redis.file.as_uri()),
            threads=1,
        ) as kept,
    ):
        pids = {
            "memory": {"verify": verifier.process.pid, "draft": plain.process.pid},
            "redis": {
                "verify": verifier.process.pid,
                "draft": kept.process.pid,
                "redis": redis.process.pid,
            },
        }
        addresses = {"memory": plain.address, "redis": kept.address}
        answers = asyncio.run(_measure(addresses, pids, calls, max_tokens))
    rows = [_row(store, [pair[store] for pair in answers]) for store in STORES]
    costs = {
        "all": _cost(answers, ("verify", "draft", "redis")),
        "draft and redis": _cost(answers, ("draft", "redis")),
    }
    if json_file:
        settings = {"model": model, "dtype": dtype, "answers": len(calls), "max_tokens": max_tokens}
        write_json(json_file, "journal", settings, {"rows": rows, "costs": costs, "answers": answers})
    table = Table(title="CPU milliseconds per token", title_justify="left")
    for name in rows[1]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*(value if isinstance(value, str) else f"{value:.3f}" for value in row.values()))
    console = Console()
    console.print(table)
    for name, cost in costs.items():
        console.print(
            f"redis against memory, {name}: {cost['mean']:+.2%} of all processor time, "
            f"95 % confidence {cost['low']:+.2%} to {cost['high']:+.2%}"
        )


async def _measure(
    addresses: dict[str, str],
    pids: dict[str, dict[str, int]],
    calls: Sequence[tuple[int, ...]],
    max_tokens: int,
) -> list[dict[str, dict[str, float]]]:
    """For every prompt and store the tokens, and the seconds of every process; the first pair warms up."""
    answers = []
    async with connect(addresses["memory"]) as one, connect(addresses["redis"]) as other:
        clients = {"memory": DraftClient(one), "redis": DraftClient(other)}
        for client in clients.values():
            await until_linked(client)
        for i, prompt in enumerate(tqdm([calls[0], *calls], desc="bench journal", unit="pair")):
            pair = {}
            for store in STORES if i % 2 else reversed(STORES):
                before = _seconds(pids[store])
                tokens = await _answer(clients[store], f"{store}-{i}", prompt, max_tokens)
                await asyncio.sleep(SETTLE_S)
                after = _seconds(pids[store])
                pair[store] = {name: after[name] - before[name] for name in after} | {"tokens": tokens}
            if i:
                answers.append(pair)
    return answers


async def _answer(client: DraftClient, id: str, prompt: tuple[int, ...], max_tokens: int) -> int:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    tokens = 0
    async for event in client.generate(Call(id, prompt, (), params)):
        if isinstance(event, Round):
            tokens += len(event.tokens)
    return tokens


def _seconds(pids: dict[str, int]) -> dict[str, float]:
    """Processor seconds of processes so far, to the nanosecond."""
    # Linux makes the clock of a process from its id: see clock_getcpuclockid(3).
    return {name: time.clock_gettime((~pid << 3) | 2) for name, pid in pids.items()}


def _row(store: str, answers: Sequence[dict[str, float]]) -> dict[str, Any]:
    tokens = sum(answer["tokens"] for answer in answers)
    parts = {
        name: 1e3 * sum(answer.get(name, 0.0) for answer in answers) / tokens
        for name in ("verify", "draft", "redis")
    }
    return {"store": store} | parts | {"all": sum(parts.values())}


def _cost(answers: Sequence[dict[str, dict[str, float]]], names: Sequence[str]) -> dict[str, float]:
    """How much more time these processes take with Redis, as a share of what all take without.

    The verify process knows nothing of the store: without it, its noise is left out. Mean over the pairs,
    and the interval of resampled means.
    """
    shares = [
        (_seconds_of(pair["redis"], names) - _seconds_of(pair["memory"], names))
        / _seconds_of(pair["memory"], ("verify", "draft"))
        for pair in answers
    ]
    return resampled(shares)


def _seconds_of(answer: dict[str, float], names: Sequence[str]) -> float:
    """Processor seconds of these processes; both stores gave the same tokens."""
    return sum(answer.get(name, 0.0) for name in names)
