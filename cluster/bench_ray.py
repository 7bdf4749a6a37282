"""`weald bench ray`: the processor time per token that Ray costs, against the same services without it."""

import json
import os
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from cluster.configuration import parse
from cluster.launch import local
from cluster.processes import RAYS_OWN, SERVICES, part, seconds, tree
from services.bench.replicas import WHOLE_TREES, replica
from services.bench.report import resampled, write_json
from services.sessions.embedded import embedded

MODES = ("plain", "ray")
SETTLE_S = 0.3
"""After an answer, for what is still written of it, before the other mode has its turn."""
WITHIN_S = 120.0

Answer = dict[str, Any]
"""`spent`: processor seconds by part; `wall_s`; `tokens`; `text`."""


@dataclass(frozen=True)
class _Deployment:
    """One way to run the services."""

    url: str
    parts: Callable[[], Mapping[int, str]]
    """Its processes now, and what part each is."""


def bench_ray(
    model: str,
    head: str | None,
    dtype: str,
    prompts: Sequence[str],
    max_tokens: int,
    json_file: Path | None,
) -> None:
    """Answer every prompt by plain processes and on Ray, in turn; compare processor time.

    Both run all the time. The time of one is counted only while it answers, with all else that it does then.

    Args:
        model: that is served, by one replica of each kind.
        head: its draft head; None: its own.
        dtype: of both.
        prompts: questions.
        max_tokens: tokens of each answer.
        json_file: where the figures go.

    Raises:
        WealdError: as `cluster.launch.local` and `services.bench.replicas.replica` do.
    """
    # Ray gives its processes what stands here; torch by itself would choose otherwise.
    threads = int(os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count() or 1)))
    with _plain(model, head, dtype) as (plain, pids), _on_ray(model, head, dtype, pids) as ray:
        answers = _measure({"plain": plain, "ray": ray}, model, prompts, max_tokens)
    figures = _figures(answers)
    if json_file:
        settings = {"model": model, "dtype": dtype, "answers": len(prompts), "max_tokens": max_tokens}
        write_json(json_file, "ray", settings | {"threads_of_each": threads}, figures)
    console = Console()
    console.print(_table(figures["parts"]))
    console.print(
        f"{figures['wall_s_per_answer']['plain']:.2f} s of an answer by plain processes, "
        f"{figures['wall_s_per_answer']['ray']:.2f} s on Ray; {figures['same_texts']} of {len(answers)} "
        "texts are the same"
    )
    for name, cost in figures["costs"].items():
        console.print(
            f"Ray against plain, {name}: {cost['mean']:+.2%} of the plain processor time, "
            f"95 % confidence {cost['low']:+.2%} to {cost['high']:+.2%}"
        )


@contextmanager
def _plain(model: str, head: str | None, dtype: str) -> Iterator[tuple[_Deployment, Sequence[int]]]:
    """The services by `weald verify`, `draft` and `gateway`, and a Redis; also the ids of their processes."""
    exact, heads = ("--dtype", dtype), ("--speculative-model", head) if head else ()
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="weald-bench-"))
        redis = stack.enter_context(embedded(Path(directory)))
        common = ("--model", model, "--port", 0, "--store", redis.file.as_uri())
        started = {
            name: stack.enter_context(replica(name, *common, *options))
            for name, options in (
                ("verify", exact),
                ("draft", (*exact, *heads, *WHOLE_TREES)),
                ("gateway", ()),
            )
        }
        pids = {"redis": redis.process.pid} | {name: one.process.pid for name, one in started.items()}
        yield (
            _Deployment(
                f"http://{started['gateway'].address}",
                lambda: {pid: name for name, root in pids.items() for pid in tree(root)},
            ),
            list(pids.values()),
        )


@contextmanager
def _on_ray(model: str, head: str | None, dtype: str, others: Sequence[int]) -> Iterator[_Deployment]:
    """The same on a Ray of this process; `others` are processes of this one that do not belong to it."""
    whole = {"speculative_budget": 60, "speculative_num_steps": 6}
    described = {"model": model, "speculative_model": head, "dtype": dtype, "draft": whole}
    described |= {"gateway": {"port": 0}}
    with local(parse(described)) as url:
        yield _Deployment(url, lambda: {pid: part(pid) for pid in tree(os.getpid(), others)})


def _measure(
    deployments: Mapping[str, _Deployment], model: str, prompts: Sequence[str], max_tokens: int
) -> list[dict[str, Answer]]:
    """An answer of each deployment to every prompt; the first pair warms up and is left out."""
    pairs = []
    for i, prompt in enumerate(tqdm([prompts[0], *prompts], desc="bench ray", unit="pair")):
        asked = {
            "model": model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        pair = {}
        for mode in MODES if i % 2 else reversed(MODES):
            pair[mode] = _answer(deployments[mode], asked)
            time.sleep(SETTLE_S)
        if i:
            pairs.append(pair)
    return pairs


def _answer(deployment: _Deployment, asked: Mapping[str, Any]) -> Answer:
    before, began = seconds(deployment.parts()), time.monotonic()
    text, tokens = _stream(deployment.url, asked)
    wall_s, parts = time.monotonic() - began, deployment.parts()
    spent = dict.fromkeys(parts.values(), 0.0)
    for pid, so_far in seconds(parts).items():
        spent[parts[pid]] += so_far - before.get(pid, 0.0)
    return {"spent": spent, "wall_s": wall_s, "tokens": tokens, "text": text}


def _stream(url: str, asked: Mapping[str, Any]) -> tuple[str, int]:
    """The text of a streamed chat completion, and its tokens. Raises `OSError` when it is refused."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"}
    )
    text, tokens = "", 0
    with opener.open(request, timeout=WITHIN_S) as lines:
        for line in lines:
            if line.startswith(b"data: {"):
                event = json.loads(line.removeprefix(b"data: "))
                text += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
                tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
    return text, tokens


def _figures(pairs: Sequence[Mapping[str, Answer]]) -> dict[str, Any]:
    tokens = {mode: sum(pair[mode]["tokens"] for pair in pairs) for mode in MODES}
    parts = [
        {"part": name}
        | {mode: 1e3 * sum(_spent(pair[mode], (name,)) for pair in pairs) / tokens[mode] for mode in MODES}
        for name in (*SERVICES, *RAYS_OWN)
    ]
    return {
        "parts": parts,
        "costs": {
            "all": _cost(pairs, (*SERVICES, *RAYS_OWN)),
            "Ray's own processes": _cost(pairs, RAYS_OWN),
        },
        "wall_s_per_answer": {
            mode: statistics.fmean(pair[mode]["wall_s"] for pair in pairs) for mode in MODES
        },
        "same_texts": sum(pair["plain"]["text"] == pair["ray"]["text"] for pair in pairs),
        "answers": [
            {mode: {key: value for key, value in pair[mode].items() if key != "text"} for mode in MODES}
            for pair in pairs
        ],
    }


def _cost(pairs: Sequence[Mapping[str, Answer]], names: Sequence[str]) -> dict[str, float]:
    """How much more time these parts take on Ray, as a share of what all take without.

    Mean over the pairs, and the interval of resampled means.
    """
    shares = [
        (_per_token(pair["ray"], names) - _per_token(pair["plain"], names))
        / _per_token(pair["plain"], SERVICES)
        for pair in pairs
    ]
    return resampled(shares)


def _per_token(answer: Answer, names: Sequence[str]) -> float:
    return _spent(answer, names) / float(answer["tokens"])


def _spent(answer: Answer, names: Sequence[str]) -> float:
    spent: Mapping[str, float] = answer["spent"]
    return sum(spent.get(name, 0.0) for name in names)


def _table(parts: Sequence[Mapping[str, Any]]) -> Table:
    all_plain = sum(row["plain"] for row in parts)
    table = Table(title="CPU milliseconds per token", title_justify="left")
    table.add_column("part")
    for name in ("plain", "ray", "more, of all plain"):
        table.add_column(name, justify="right")
    total = {"part": "all"} | {mode: sum(row[mode] for row in parts) for mode in MODES}
    for row in (*parts, total):
        more = (row["ray"] - row["plain"]) / all_plain
        table.add_row(row["part"], f"{row['plain']:.3f}", f"{row['ray']:.3f}", f"{more:+.2%}")
    return table
