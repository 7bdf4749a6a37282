"""`weald bench turns`: what the second turn of a long chat computes anew, at both services."""

import asyncio
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from services.bench.replicas import WHOLE_TREES, WITHIN_S, both_services, until_linked
from services.bench.report import write_json
from services.engine.checkpoints import resolve
from services.gateway.tokenizer import Tokenizer
from services.types.messages import Call, Round
from services.types.sampling import SamplingParams
from services.wire.channel import connect
from services.wire.clients import DraftClient, VerifyClient

STORY = "The keeper climbed the stairs of the lighthouse, lit the lamp, and wrote what he saw into his book. "
SECOND = "Now say the same in one sentence."


def bench_turns(
    model: str, head: str | None, dtype: str, tokens: int, max_tokens: int, json_file: Path | None
) -> None:
    """Start both services and let a chat have two turns, the first of about so many tokens."""
    tokenizer = Tokenizer.load(resolve(model))
    long = {"role": "user", "content": STORY * (tokens // len(tokenizer.encode(STORY)))}
    with both_services(model, head, dtype, *WHOLE_TREES) as (verifier, drafter):
        rows = asyncio.run(_measure(verifier.address, drafter.address, tokenizer, long, max_tokens))
    if json_file:
        write_json(
            json_file, "turns", {"model": model, "dtype": dtype, "max_tokens": max_tokens}, {"rows": rows}
        )
    table = Table(title="tokens that entered a forward", title_justify="left")
    for name in rows[0]:
        table.add_column(name.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console().print(table)


async def _measure(
    verifier: str, drafter: str, tokenizer: Tokenizer, long: dict[str, str], max_tokens: int
) -> list[dict[str, Any]]:
    rows = []
    async with connect(drafter) as channel, connect(verifier) as status_channel:
        draft, verify = DraftClient(channel), VerifyClient(status_channel)
        await until_linked(draft)
        messages, seen = [long], list[int]()
        for turn in (1, 2):
            prompt = tokenizer.chat(messages)
            before = (await verify.status(WITHIN_S)).counters, (await draft.status(WITHIN_S)).counters
            params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
            answer: list[int] = []
            async for event in draft.generate(Call(f"turn-{turn}", tuple(prompt), (), params)):
                if isinstance(event, Round):
                    answer.extend(event.tokens)
            after = (await verify.status(WITHIN_S)).counters, (await draft.status(WITHIN_S)).counters
            rows.append(
                {
                    "turn": turn,
                    "prompt": len(prompt),
                    "known_from_turn_1": _common(seen, prompt),
                    "prefilled_by_the_target": after[0]["tokens_prefilled"] - before[0]["tokens_prefilled"],
                    "output": len(answer),
                    "extended_by_the_head": after[1]["tokens_forwarded"] - before[1]["tokens_forwarded"],
                }
            )
            seen = [*prompt, *answer]
            messages = [long, {"role": "assistant", "content": tokenizer.decode(answer)}]
            messages.append({"role": "user", "content": SECOND})
    return rows


def _common(before: list[int], now: list[int]) -> int:
    """Tokens at the beginning that both share."""
    return next(
        (i for i, (a, b) in enumerate(zip(before, now, strict=False)) if a != b), min(len(before), len(now))
    )
