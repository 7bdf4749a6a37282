"""A verify replica of several ranks says what one rank says, and ends when one of them is gone."""

import asyncio
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from services.bench.replicas import WEALD, Replica, replica
from services.engine.transfer import from_block
from services.types.errors import ErrorCode, WealdError
from services.types.messages import Open
from services.types.sampling import SamplingParams
from services.types.session import Session

pytestmark = pytest.mark.slow

Make = Callable[..., Any]

FOUR_WAYS = {"num_attention_heads": 8, "num_key_value_heads": 4}
"""61 tokens and 48 columns of the feed-forward layers: not everything divides."""
CPU = torch.device("cpu")
TOLERANCE = 1e-6
"""The norms of transformers' models round to float32; the same rows in another step can differ by that."""
SECONDS_TO_NOTICE = 20.0


@pytest.fixture(scope="module")
def directory(model: Make, checkpoints: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a target with four key-value heads."""
    if torch.accelerator.is_available():
        pytest.skip("ranks run on the CPU only where no accelerator is in sight")
    directory = tmp_path_factory.mktemp("four-ways")
    model("llama", **FOUR_WAYS).save_pretrained(directory)
    shutil.copy(checkpoints.target / "tokenizer.json", directory)
    return directory


@contextmanager
def standard_error_in(log: Path) -> Iterator[None]:
    """What processes started within write to standard error goes to a file."""
    kept = os.dup(2)
    try:
        with log.open("w") as file:
            os.dup2(file.fileno(), 2)
            yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


@pytest.fixture(scope="module")
def ranks(directory: Path) -> Iterator[Callable[[int], Replica]]:
    """`ranks(size)` is a verify replica of so many ranks, whose standard error goes to `size.log`."""
    with ExitStack() as stack:
        running: dict[int, Replica] = {}

        def ranks(size: int) -> Replica:
            if size not in running or running[size].process.poll() is not None:
                arguments = ("--model", directory, "--dtype", "float64", "--port", 0, "--max-num-seqs", 4)
                parallel = ("--kv-cache-memory", "1MiB", "--tensor-parallel-size", size)
                with standard_error_in(directory / f"{size}.log"):
                    started = replica("verify", *arguments, *parallel, threads=1)
                    running[size] = stack.enter_context(started)
            return running[size]

        yield ranks


def session(i: int) -> Session:
    rng = random.Random(i)
    params = SamplingParams(
        max_tokens=30 + i,
        temperature=(0.0, 0.8, 1.4)[i % 3],
        repetition_penalty=1.3 if i % 2 else 1.0,
        ignore_eos=i > 2,
    )
    prompt = tuple(rng.randrange(61) for _ in range((3, 16, 31, 48, 100, 17)[i]))
    return Session(str(i), prompt, params, rng.getrandbits(64))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_any_number_of_ranks_says_what_the_target_says(
    size: int, ranks: Make, plain: Make, by_hand: Make, status: Make, vacant: Make, hidden: Make
) -> None:
    rng = random.Random(size)
    expected = plain("llama", **FOUR_WAYS)
    sessions = [session(i) for i in range(6)]
    streams = {s.id: expected.stream(s, s.params.max_tokens) for s in sessions}
    texts = [expected.text(s, streams[s.id]) for s in sessions]
    address = ranks(size).address

    async def scenario() -> tuple[list[tuple[int, ...]], Any, dict[str, int]]:
        found = await status(address)
        assert found.tensor_parallel_size == size
        async with by_hand(address) as hand:
            playing = [
                hand.play(
                    Open(s, 1, found.fingerprint, i != 1, 0),
                    streams[s.id],
                    lambda root, text: hidden(root, text, 61, 40, rng)[0],
                )
                for i, s in enumerate(sessions)
            ]
            said = await asyncio.gather(*playing)
            return said, hand, dict((await vacant(address)).counters)

    said, hand, counters = asyncio.run(scenario())
    assert said == texts
    assert counters["trees_verified"] > 20
    assert sum(map(len, said)) > sum(map(len, hand.replies.values())) + 20
    for s, text in zip(sessions, texts, strict=True):
        if s.id not in hand.blocks:
            assert s.id == "1"
            continue
        features = torch.cat([from_block(block, torch.float64, CPU) for block in hand.blocks[s.id]])
        whole = expected.run((*s.prompt, *text))[0]
        torch.testing.assert_close(features, whole[: len(features)], rtol=0, atol=TOLERANCE)


def followers_of(verifier: Replica) -> list[psutil.Process]:
    return psutil.Process(verifier.process.pid).children()


def test_the_replica_ends_with_a_reason_when_a_rank_is_killed(
    directory: Path, ranks: Make, by_hand: Make, status: Make
) -> None:
    verifier = ranks(2)
    (follower,) = followers_of(verifier)

    async def told() -> WealdError:
        found = await status(verifier.address)
        async with by_hand(verifier.address) as hand:
            params = SamplingParams(max_tokens=250, ignore_eos=True)
            for i in range(4):
                hand.say(Open(Session(str(i), (1, 2), params, i), 1, found.fingerprint, False, 2))
            for i in range(4):
                await hand.hear(str(i))
            follower.kill()
            async with asyncio.timeout(SECONDS_TO_NOTICE):
                while True:
                    try:
                        await hand.hear("0")
                    except WealdError as error:
                        return error

    error = asyncio.run(told())
    assert error.code is ErrorCode.UNAVAILABLE
    assert verifier.process.wait(SECONDS_TO_NOTICE) == 1
    verifier.process.communicate()
    assert not follower.is_running()
    said = (directory / "2.log").read_text()
    assert "weald: a tensor-parallel rank is gone or out of step: " in said
    assert "; restart the service" in said


def test_a_replica_that_is_told_to_end_ends_all_its_ranks(ranks: Make) -> None:
    verifier = ranks(4)
    followers = followers_of(verifier)
    assert len(followers) == 3
    assert verifier.stop() == 0
    assert not any(follower.is_running() for follower in followers)


def test_a_size_that_does_not_divide_is_refused_with_those_that_do(directory: Path) -> None:
    command = ("verify", "--model", directory, "--port", 0, "--tensor-parallel-size", 3)
    finished = subprocess.run(
        [sys.executable, "-c", WEALD, *map(str, command)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert finished.returncode == 1
    assert finished.stdout == ""
    assert "4 key-value heads cannot be split over 3 ranks; sizes that work: 1, 2, 4" in finished.stderr
    assert "Traceback" not in finished.stderr
