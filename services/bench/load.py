"""`weald bench load`: tokens per second and time per token of many sessions, through the services."""

import asyncio
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from services.bench.replicas import WITHIN_S, both_services, until_linked
from services.bench.report import write_json
from services.engine.checkpoints import resolve
from services.gateway.tokenizer import Tokenizer
from services.types.messages import Call, Round, VerifyStatus
from services.types.sampling import SamplingParams
from services.wire.channel import connect
from services.wire.clients import DraftClient, VerifyClient

MODES = {"plain": False, "speculative": True}


@dataclass(frozen=True, slots=True)
class Answer:
    """One session, seen by its caller."""

    tokens: tuple[int, ...]
    first_s: float
    """From the call to the first token."""
    total_s: float
    """From the call to the last token."""
    rounds: int
    """Rounds that verified more than their root."""
    tree_tokens: int
    """Tokens those committed."""

    @property
    def time_per_token_s(self) -> float:
        """Seconds per token after the first."""
        return (self.total_s - self.first_s) / max(1, len(self.tokens) - 1)


def bench_load(
    model: str,
    head: str | None,
    dtype: str,
    nodes: int,
    sessions: Sequence[int],
    prompts: Sequence[str],
    max_tokens: int,
    repeats: int,
    json_file: Path | None,
) -> None:
    """Start a verify and a draft replica and let so many sessions at once generate, in both modes."""
    tokenizer = Tokenizer.load(resolve(model))
    chats = [tuple(tokenizer.chat([{"role": "user", "content": text}])) for text in prompts]
    trees = ("--speculative-num-draft-tokens", nodes)
    with both_services(model, head, dtype, *trees) as (verifier, drafter):
        rows = asyncio.run(_measure(verifier.address, drafter.address, chats, sessions, max_tokens, repeats))
    settings = {"model": model, "dtype": dtype, "nodes": nodes, "max_tokens": max_tokens, "repeats": repeats}
    if json_file:
        write_json(json_file, "load", settings, {"rows": rows})
    Console().print(_table(rows))


async def _measure(
    verifier: str,
    drafter: str,
    prompts: Sequence[tuple[int, ...]],
    sessions: Sequence[int],
    max_tokens: int,
    repeats: int,
) -> list[dict[str, Any]]:
    rows = []
    async with connect(drafter) as channel, connect(verifier) as status_channel:
        client, status = DraftClient(channel), VerifyClient(status_channel)
        await until_linked(client)
        await _generate(
            client, Call("warm-up", prompts[0], (), SamplingParams(max_tokens=8, temperature=0.0))
        )
        with tqdm(total=len(sessions) * repeats * len(MODES), desc="bench load", unit="run") as bar:
            for count in sessions:
                runs: dict[str, list[tuple[float, list[Answer], dict[str, int]]]] = {
                    mode: [] for mode in MODES
                }
                for repeat in range(repeats):
                    for mode, speculative in MODES.items():
                        before = await status.status(WITHIN_S)
                        started = time.perf_counter()
                        answers = await asyncio.gather(
                            *(
                                _generate(client, _call(prompts, count, repeat, i, max_tokens, speculative))
                                for i in range(count)
                            )
                        )
                        wall = time.perf_counter() - started
                        runs[mode].append((wall, answers, _counted(before, await status.status(WITHIN_S))))
                        bar.update()
                rows += [_row(count, mode, runs[mode], runs["plain"]) for mode in MODES]
    return rows


def _call(
    prompts: Sequence[tuple[int, ...]], count: int, repeat: int, i: int, max_tokens: int, speculative: bool
) -> Call:
    """The same prompt, parameters and seed in every mode, so that the texts can be compared."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, seed=i)
    name = f"load-{count}-{repeat}-{i}-{speculative}"
    return Call(name, prompts[(repeat * count + i) % len(prompts)], (), params, speculative)


async def _generate(client: DraftClient, call: Call) -> Answer:
    started = time.perf_counter()
    tokens: list[int] = []
    first = rounds = tree_tokens = 0.0
    async for event in client.generate(call):
        if isinstance(event, Round):
            first = first or time.perf_counter() - started
            tokens.extend(event.tokens)
            if event.verified > 1:
                rounds += 1
                tree_tokens += len(event.tokens)
    return Answer(tuple(tokens), first, time.perf_counter() - started, int(rounds), int(tree_tokens))


def _counted(before: VerifyStatus, after: VerifyStatus) -> dict[str, int]:
    return {name: count - before.counters.get(name, 0) for name, count in after.counters.items()}


def _row(
    sessions: int,
    mode: str,
    runs: Sequence[tuple[float, list[Answer], dict[str, int]]],
    plain: Sequence[tuple[float, list[Answer], dict[str, int]]],
) -> dict[str, Any]:
    answers = [answer for _, given, _ in runs for answer in given]
    same = [
        a.tokens == b.tokens
        for r, p in zip(runs, plain, strict=True)
        for a, b in zip(r[1], p[1], strict=True)
    ]
    speed = statistics.median(sum(len(a.tokens) for a in given) / wall for wall, given, _ in runs)
    base = statistics.median(sum(len(a.tokens) for a in given) / wall for wall, given, _ in plain)
    rounds = sum(a.rounds for a in answers)
    return {
        "sessions": sessions,
        "mode": mode,
        "tokens_per_s": speed,
        "ratio": speed / base,
        "ms_per_token_p50": 1e3 * statistics.median(a.time_per_token_s for a in answers),
        "ms_to_first_p50": 1e3 * statistics.median(a.first_s for a in answers),
        "tau": sum(a.tree_tokens for a in answers) / rounds if rounds else None,
        "identical": sum(same),
        "answers": len(answers),
        "counters": dict(sum((Counter(counted) for *_, counted in runs), Counter())),
    }


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="through the services", title_justify="left")
    for name in (
        "sessions",
        "mode",
        "tokens/s",
        "× plain",
        "ms/token",
        "ms to first",
        "τ",
        "identical",
        "missed",
    ):
        table.add_column(name, justify="left" if name == "mode" else "right")
    for row in rows:
        table.add_row(
            str(row["sessions"]),
            row["mode"],
            f"{row['tokens_per_s']:.1f}",
            f"{row['ratio']:.2f}",
            f"{row['ms_per_token_p50']:.1f}",
            f"{row['ms_to_first_p50']:.0f}",
            "" if row["tau"] is None else f"{row['tau']:.2f}",
            f"{row['identical']}/{row['answers']}",
            str(row["counters"].get("missed_trees", 0)),
        )
    return table
