"""The same answers by two draft replicas in turn: what one costs more processor time than the other."""

import asyncio
import time
from collections.abc import Mapping, Sequence

from tqdm import tqdm

from services.bench.replicas import until_linked
from services.bench.report import resampled
from services.types.messages import Call, Round
from services.types.sampling import SamplingParams
from services.wire.channel import connect
from services.wire.clients import DraftClient

SETTLE_S = 0.3
"""After an answer, for what is still done behind its back."""

Answer = dict[str, float]
"""Processor seconds of each process, `tokens`, and `wall`, the seconds until they were there."""
Pair = dict[str, Answer]
"""An answer in each mode."""


async def pairs(
    addresses: Mapping[str, str],
    processes: Mapping[str, Mapping[str, int]],
    chats: Sequence[tuple[int, ...]],
    max_tokens: int,
    title: str,
) -> list[Pair]:
    """Every prompt answered in both modes, the first of them by turns; one more pair warms up before.

    Args:
        addresses: of the draft replica of each mode.
        processes: process ids of each mode, by name.
        chats: token ids of the prompts.
        max_tokens: of every answer, whatever it says.
        title: of the progress bar.
    """
    measured = []
    one, other = addresses
    async with connect(addresses[one]) as first, connect(addresses[other]) as second:
        clients = {one: DraftClient(first), other: DraftClient(second)}
        for client in clients.values():
            await until_linked(client)
        for i, chat in enumerate(tqdm([chats[0], *chats], desc=title, unit="pair")):
            pair: Pair = {}
            for mode, client in clients.items():
                # Whoever comes first would compute the prompt for both.
                await _answer(client, f"{mode}-{i}-prompt", chat, 1)
            for mode in (one, other) if i % 2 else (other, one):
                before, began = _seconds(processes[mode]), time.perf_counter()
                tokens = await _answer(clients[mode], f"{mode}-{i}", chat, max_tokens)
                wall = time.perf_counter() - began
                await asyncio.sleep(SETTLE_S)
                after = _seconds(processes[mode])
                took = {name: after[name] - before[name] for name in after}
                pair[mode] = took | {"tokens": tokens, "wall": wall}
            if i:
                measured.append(pair)
    return measured


def cost(
    pairs: Sequence[Pair], base: str, mode: str, names: Sequence[str], of: Sequence[str]
) -> dict[str, float]:
    """How much more a mode takes than the one that is the base, as a share of what they take on average.

    Mean over the pairs, and the interval of resampled means. A share of the base alone would be too large on
    average: noise that makes the base small makes it large.

    Args:
        pairs: from `pairs`.
        base: the mode to compare with.
        mode: the other one.
        names: what is compared: processes, or `wall`.
        of: what it is a share of.
    """
    return resampled(
        [
            2
            * (_sum(pair[mode], names) - _sum(pair[base], names))
            / (_sum(pair[mode], of) + _sum(pair[base], of))
            for pair in pairs
        ]
    )


def _sum(answer: Answer, names: Sequence[str]) -> float:
    """Of these processes; both modes gave the same tokens."""
    return sum(answer.get(name, 0.0) for name in names)


async def _answer(client: DraftClient, id: str, prompt: tuple[int, ...], max_tokens: int) -> int:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    tokens = 0
    async for event in client.generate(Call(id, prompt, (), params)):
        if isinstance(event, Round):
            tokens += len(event.tokens)
    return tokens


def _seconds(pids: Mapping[str, int]) -> Answer:
    """Processor seconds of processes so far, to the nanosecond."""
    # Linux makes the clock of a process from its id: see clock_getcpuclockid(3).
    return {name: time.clock_gettime((~pid << 3) | 2) for name, pid in pids.items()}
