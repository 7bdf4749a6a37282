"""What Prometheus scrapes is what happened, counted once, over all workers."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from services.gateway.choices import Figures, Piece
from services.gateway.metrics import SHARED, Metrics
from services.gateway.requests import Job, job_of
from services.gateway.schemas import CompletionRequest
from services.types.session import FinishReason

Item = tuple[int, Piece]
REQUEST = {"model": "tiny", "prompt": ["abc", "ab"], "n": 2}


def piece(
    tokens: int, finish: FinishReason | None = None, trees: int = 0, by_depth: Sequence[int] = ()
) -> Piece:
    accepted = {"verified": 10 * trees, "accepted_per_position": tuple(by_depth)}
    figures = Figures(3, completion_tokens=tokens, tree_rounds=trees, **accepted)
    return Piece("x" * tokens, (), finish, figures)


PIECES: list[Item] = [
    (0, piece(1)),
    (2, piece(1)),
    (0, piece(4, None, 1, (1, 1))),
    (1, piece(1, FinishReason.LENGTH)),
    (3, piece(2, FinishReason.STOP)),
    (0, piece(9, FinishReason.LENGTH, 3, (3, 2, 1))),
    (2, piece(3, FinishReason.STOP, 1, (1,))),
]


@pytest.fixture
def job(checkpoints: Any) -> Job:
    """Two prompts of three and two tokens, two choices each."""
    return job_of(CompletionRequest.model_validate(REQUEST), checkpoints.tokenizer, "cmpl-" + "0" * 32)


async def played(items: Sequence[Item]) -> AsyncGenerator[Item]:
    for item in items:
        yield item


def counted(metrics: Metrics, job: Job, leave_after: int | None = None) -> dict[str, float]:
    """What is scraped after a request whose client leaves after so many pieces, or stays."""

    async def scenario() -> None:
        heard = []
        async with aclosing(metrics.watched(job, played(PIECES), time.perf_counter())) as pieces:
            async for item in pieces:
                heard.append(item)
                if len(heard) == leave_after:
                    break
        assert heard == PIECES[:leave_after]

    asyncio.run(scenario())
    return samples(metrics.exposition())


def samples(exposition: bytes) -> dict[str, float]:
    """Values by name, and by `name{label}` where there is a label besides a bucket's."""
    found = {}
    for family in text_string_to_metric_families(exposition.decode()):
        for sample in family.samples:
            if not sample.name.endswith(("_bucket", "_created")):
                label = "".join(f"{{{value}}}" for value in sample.labels.values())
                found[sample.name + label] = sample.value
    return found


def test_a_request_is_counted_under_the_names_that_people_know(job: Job) -> None:
    found = counted(Metrics(), job)
    sums = {name: found.pop(name) for name in list(found) if name.endswith("_sum")}
    assert found == {
        "weald_request_success_total{length}": 2,
        "weald_request_success_total{stop}": 2,
        "weald_prompt_tokens_total": 5,
        "weald_generation_tokens_total": 15,
        "weald_time_to_first_token_seconds_count": 4,
        "weald_inter_token_latency_seconds_count": 10,
        "weald_e2e_request_latency_seconds_count": 1,
        "weald_num_requests_running": 0,
        "weald_num_requests_waiting": 0,
        "weald_spec_decode_num_drafts_total": 4,
        "weald_spec_decode_num_draft_tokens_total": 40,
        "weald_spec_decode_num_accepted_tokens_total": 7,
        "weald_spec_decode_num_accepted_tokens_per_pos_total{0}": 4,
        "weald_spec_decode_num_accepted_tokens_per_pos_total{1}": 2,
        "weald_spec_decode_num_accepted_tokens_per_pos_total{2}": 1,
    }
    assert all(seconds > 0 for seconds in sums.values())
    whole = sums["weald_e2e_request_latency_seconds_sum"]
    # Of each choice, first and further tokens end with its last piece, which is within the whole.
    tokens = sums["weald_time_to_first_token_seconds_sum"] + sums["weald_inter_token_latency_seconds_sum"]
    assert tokens <= 4 * whole


def test_requests_add_up(job: Job) -> None:
    metrics = Metrics()
    once = counted(metrics, job)
    twice = counted(metrics, job)
    for name, value in twice.items():
        if not name.endswith("_sum"):
            assert value == 2 * once[name]


def test_a_request_whose_client_leaves_counts_as_far_as_it_came(job: Job) -> None:
    found = counted(Metrics(), job, leave_after=3)
    assert found["weald_generation_tokens_total"] == 5
    assert found["weald_time_to_first_token_seconds_count"] == 2
    assert found["weald_e2e_request_latency_seconds_count"] == 0
    assert "weald_request_success_total{length}" not in found


def test_the_load_is_what_was_told_last() -> None:
    metrics = Metrics()
    for load in ((1, 0), (2, 3), (1, 2)):
        metrics.observe_load(*load)
        found = samples(metrics.exposition())
        assert (found["weald_num_requests_running"], found["weald_num_requests_waiting"]) == load


WORKER = """
import asyncio, sys
from services.gateway.metrics import Metrics
from services.gateway.requests import Job
from services.types.messages import Call
from services.types.sampling import SamplingParams

async def no_pieces():
    return
    yield

async def count(prompt):
    call = Call("s", prompt, (), SamplingParams())
    job = Job("cmpl", (call,), 1, None, False, (), False)
    async for _ in metrics.watched(job, no_pieces(), 0.0):
        pass

metrics = Metrics()
metrics.observe_load(int(sys.argv[1]), 0)
asyncio.run(count((1,) * int(sys.argv[1])))
print("ready", flush=True)
sys.stdin.readline()
print(metrics.exposition().decode())
"""


def test_each_worker_tells_the_sum_of_all(tmp_path: Path) -> None:
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(number)],
            env=os.environ | {SHARED: str(tmp_path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in (3, 4)
    ]
    for worker in workers:
        assert worker.stdout
        assert worker.stdout.readline() == "ready\n"
    for worker in workers:
        said, _ = worker.communicate("\n", timeout=60)
        found = samples(said.encode())
        assert found["weald_prompt_tokens_total"] == 7
        if worker is workers[0]:
            assert found["weald_num_requests_running"] == 7
