"""`weald bench step`: a target step by tree size, beside a step of transformers' own `generate`."""

import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from services.bench.report import write_json
from services.engine.checkpoints import load_model, resolve
from services.engine.target import Target
from services.types.sampling import SamplingParams
from services.types.session import Session
from services.types.tree import DraftTree
from services.verify.verifier import Verifier, pages_for

NODES = (1, 4, 8, 16, 26, 60)
STEPS = 24
FIRST_LEAF = 100
"""Leaves carry tokens from here on, behind most tokenizers' special ones."""


def bench_step(
    model: str, dtype: torch.dtype, device: torch.device, context: int, repeats: int, json_file: Path | None
) -> None:
    """Time steps behind `context` tokens, all variants interleaved `repeats` times, and print medians."""
    directory = resolve(model)
    theirs = load_model(directory, dtype, device, "sdpa")
    ours = Target.load(directory, dtype, device)
    prompt = torch.randint(
        FIRST_LEAF, ours.vocab_size, (context,), generator=torch.Generator().manual_seed(0)
    )
    variants: dict[str, Callable[[], float]] = {
        "transformers generate": partial(_generate_step, theirs, prompt.to(device))
    }
    for nodes in NODES:
        variants[f"weald, nodes: {nodes}"] = partial(_verify_step, ours, prompt.tolist(), nodes)
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for repeat in tqdm(range(repeats + 1), desc="bench step", dynamic_ncols=True):
        for name, run in variants.items():
            took = run()
            if repeat:  # the first round warms up
                seconds[name].append(took)
    rows = [_row(name, taken, seconds["transformers generate"]) for name, taken in seconds.items()]
    title = f"{model}, {dtype}, {context} tokens before"
    table = Table("step", "median ms", "spread ms", "× transformers", title=title)
    for row in rows:
        table.add_row(row["step"], f"{row['ms']:.1f}", f"{row['spread_ms']:.1f}", f"{row['ratio']:.2f}")
    Console().print(table)
    if json_file:
        settings = {"model": model, "dtype": str(dtype), "context": context, "repeats": repeats}
        write_json(json_file, "step", settings, {"rows": rows})


def _row(name: str, taken: list[float], baseline: list[float]) -> dict[str, Any]:
    # Ratios of runs side by side: the machine's own drift cancels.
    ratio = statistics.median(a / b for a, b in zip(taken, baseline, strict=True))
    return {
        "step": name,
        "ms": 1e3 * statistics.median(taken),
        "spread_ms": 1e3 * (max(taken) - min(taken)),
        "ratio": ratio,
    }


def _generate_step(model: Any, prompt: torch.Tensor) -> float:
    """Seconds per token of transformers' greedy `generate`, prefill taken out."""
    settings = {"do_sample": False, "use_cache": True, "eos_token_id": None, "pad_token_id": 0}
    mask = torch.ones_like(prompt)[None]
    taken = []
    for tokens in (1, 1 + STEPS):
        started = time.perf_counter()
        length = {"max_new_tokens": tokens, "min_new_tokens": tokens}
        model.generate(prompt[None], attention_mask=mask, **length, **settings)
        taken.append(time.perf_counter() - started)
    return (taken[1] - taken[0]) / STEPS


def _verify_step(target: Target, prompt: list[int], nodes: int) -> float:
    """Seconds per round of the verifier with star-shaped trees of so many nodes."""
    verifier = Verifier(target, num_pages=pages_for(len(prompt) + 2 * STEPS))
    params = SamplingParams(max_tokens=4 * STEPS, temperature=0, ignore_eos=True)
    pending = verifier.open(Session("bench", tuple(prompt), params, 0)).outcome.tokens[-1]
    started = time.perf_counter()
    for _ in range(STEPS):
        leaves = range(FIRST_LEAF, FIRST_LEAF + nodes - 1)
        tree = DraftTree((pending, *leaves), (-1, *(0 for _ in leaves)), (1.0, *(0.01 for _ in leaves)))
        pending = verifier.verify({"bench": tree})["bench"].outcome.tokens[-1]
    return (time.perf_counter() - started) / STEPS
