"""`weald bench journal`: the processor time that keeping sessions in Redis costs, over all processes."""

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from services.bench.paired import cost, pairs
from services.bench.replicas import WHOLE_TREES, replica
from services.bench.report import write_json
from services.engine.checkpoints import resolve
from services.gateway.tokenizer import Tokenizer
from services.sessions.embedded import embedded

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
        answers = asyncio.run(pairs(addresses, pids, calls, max_tokens, "bench journal"))
    rows = [_row(store, [pair[store] for pair in answers]) for store in STORES]
    # The verify process knows nothing of the store: without it, its noise is left out.
    costs = {
        name: cost(answers, *STORES, names, ("verify", "draft"))
        for name, names in (("all", ("verify", "draft", "redis")), ("draft and redis", ("draft", "redis")))
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
    for name, more in costs.items():
        console.print(
            f"redis against memory, {name}: {more['mean']:+.2%} of all processor time, "
            f"95 % confidence {more['low']:+.2%} to {more['high']:+.2%}"
        )


def _row(store: str, answers: Sequence[dict[str, float]]) -> dict[str, Any]:
    tokens = sum(answer["tokens"] for answer in answers)
    parts = {
        name: 1e3 * sum(answer.get(name, 0.0) for answer in answers) / tokens
        for name in ("verify", "draft", "redis")
    }
    return {"store": store} | parts | {"all": sum(parts.values())}
