"""`weald generate` and `weald status` with replicas and a store that are processes of their own."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from typer.testing import Result

from services.bench.replicas import WEALD, WITHIN_S, Replica, replica, until_linked
from services.sessions.embedded import embedded
from services.types.session import Cursor
from services.wire.channel import connect
from services.wire.clients import DraftClient

pytestmark = pytest.mark.slow

Generate = Callable[..., dict[str, Any]]
Weald = Callable[..., Result]

LONG = ("--prompt", "abc", "--max-tokens", 200, "--ignore-eos", "--seed", 7)
SHORT = ("--prompt", "abc", "--max-tokens", 40, "--ignore-eos", "--seed", 7)
PATIENCE_S = 60.0
"""For what comes within a second unless something is broken."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a store."""
    with embedded(tmp_path_factory.mktemp("store"), 0) as redis:
        yield redis.file.as_uri()


@pytest.fixture(scope="module")
def verifier(checkpoints: Any, store: str) -> Iterator[Replica]:
    named = ("--model", checkpoints.target, "--dtype", "float64", "--port", 0, "--store", store)
    with replica("verify", *named, threads=1) as started:
        yield started


@pytest.fixture(scope="module")
def pool() -> Iterator[list[Replica]]:
    """The draft replicas of this module; a test may end them."""
    started: list[Replica] = []
    yield started
    for one in started:
        if one.process.poll() is None:
            one.stop()
        else:
            one.process.communicate()


@pytest.fixture
def drafters(pool: list[Replica], checkpoints: Any, store: str, verifier: Replica) -> list[str]:
    """The addresses of two draft replicas that can serve."""

    async def linked(address: str) -> None:
        async with connect(address) as channel, asyncio.timeout(PATIENCE_S):
            await until_linked(DraftClient(channel))

    for one in [one for one in pool if one.process.poll() is not None]:
        one.process.communicate()
        pool.remove(one)
    while len(pool) < 2:
        pool.append(Replica("draft", *checkpoints.options("--port", 0, "--store", store), threads=1))
    addresses = [one.address for one in pool]
    for address in addresses:
        asyncio.run(linked(address))
    return addresses


@pytest.fixture
def asked(weald: Weald, checkpoints: Any) -> Callable[..., Result]:
    """`asked(*options)` is what the command prints whose session is served elsewhere."""
    return lambda *options: weald("generate", "--model", checkpoints.target, *options)


def endpoints(*addresses: str) -> tuple[str, ...]:
    return tuple(word for address in addresses for word in ("--endpoint", address))


def running(address: str) -> int:
    """Sessions at a draft replica."""

    async def ask() -> int:
        async with connect(address) as channel:
            return (await DraftClient(channel).status(WITHIN_S)).running

    return asyncio.run(ask())


def spawned(checkpoints: Any, *options: object) -> subprocess.Popen[str]:
    """The command as a process that has begun to write."""
    words = ("generate", "--model", checkpoints.target, *options)
    return subprocess.Popen(
        [sys.executable, "-c", WEALD, *map(str, words)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_the_text_is_the_same_wherever_draft_replicas_are_found(
    asked: Weald, generate: Generate, drafters: list[str], store: str
) -> None:
    here = generate(*SHORT)
    for where in (endpoints(drafters[0]), endpoints(*drafters), ("--store", store)):
        finished = asked(*where, *SHORT, "--json")
        assert finished.exit_code == 0, finished.output
        served = json.loads(finished.stdout)
        assert (served["text"], served["token_ids"]) == (here["text"], here["token_ids"])
        assert served["recoveries"] == 0
        assert len(served["session"]) == 32
    shown = asked(*where, *SHORT)
    assert shown.stdout == here["text"] + "\n"
    assert ", seed 7, session " in shown.stderr


def test_a_session_of_the_journal_is_told_again_or_behind_what_was_delivered(
    asked: Weald, drafters: list[str], store: str
) -> None:
    first = json.loads(asked("--store", store, *SHORT, "--json").stdout)
    session, tokens = first["session"], first["token_ids"]
    again = json.loads(asked(*endpoints(drafters[1]), "--resume", session, "--json").stdout)
    for key in ("text", "token_ids", "finish_reason", "seed", "session"):
        assert again[key] == first[key]
    assert asked("--store", store, "--resume", session).stdout == first["text"] + "\n"
    stop = first["text"][20:23]
    stopped = json.loads(asked("--store", store, "--resume", session, "--stop", stop, "--json").stdout)
    assert stopped["text"] == first["text"][: first["text"].index(stop)]
    for count in (1, 17, len(tokens)):
        before = json.loads(
            asked(
                "--store",
                store,
                "--prompt",
                "abc",
                "--seed",
                7,
                "--ignore-eos",
                "--max-tokens",
                count,
                "--json",
            ).stdout
        )
        rest = asked("--store", store, "--resume", Cursor.behind(session, tokens[:count]))
        assert before["text"] + rest.stdout == first["text"] + "\n"


def test_a_cursor_that_does_not_fit_is_refused_and_so_is_a_session_that_nobody_knows(
    asked: Weald, drafters: list[str], store: str
) -> None:
    first = json.loads(asked("--store", store, *SHORT, "--json").stdout)
    session, tokens = first["session"], first["token_ids"]
    other = asked("--store", store, "--resume", Cursor.behind(session, [tokens[0] + 1]))
    assert (other.exit_code, other.stdout) == (1, "")
    assert "the text is not the one that was delivered" in other.stderr
    nobody = asked("--store", store, "--resume", "nobody")
    assert (nobody.exit_code, nobody.stdout) == (1, "")
    assert "session nobody is not in the journal" in nobody.stderr


def test_a_text_whose_draft_replica_is_killed_goes_on_at_another_one(
    generate: Generate,
    drafters: list[str],
    pool: list[Replica],
    verifier: Replica,
    checkpoints: Any,
    store: str,
) -> None:
    with spawned(checkpoints, "--store", store, *LONG, "--speculative", "off", "--json") as process:
        deadline = time.monotonic() + PATIENCE_S
        while not any(serving := [running(address) for address in drafters]):
            assert time.monotonic() < deadline
        pool[serving.index(1)].process.kill()
        stdout, stderr = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, stderr) == (0, "")
    served = json.loads(stdout)
    assert served["token_ids"] == generate(*LONG)["token_ids"]
    assert served["recoveries"] == 1


def test_a_text_that_cannot_go_on_says_how_to_get_the_rest_and_that_is_the_rest(
    asked: Weald,
    generate: Generate,
    drafters: list[str],
    pool: list[Replica],
    verifier: Replica,
    checkpoints: Any,
) -> None:
    here = generate(*LONG)
    options = (*endpoints(drafters[0]), *LONG, "--speculative", "off", "--timeout", 6)
    with spawned(checkpoints, *options) as process:
        assert process.stdout
        begun = process.stdout.read(1)
        verifier.process.send_signal(signal.SIGSTOP)
        pool[0].process.kill()
        verifier.process.send_signal(signal.SIGCONT)
        rest, stderr = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert stderr.startswith("weald: no draft replica went on within 6 s; the last attempt: ")
    cursor = Cursor.parse(stderr.split("--resume ")[1].strip())
    assert 0 < cursor.delivered < 200
    resumed = asked(*endpoints(drafters[1]), "--resume", cursor)
    assert begun + rest + resumed.stdout == here["text"] + "\n"
    whole = json.loads(asked(*endpoints(drafters[1]), "--resume", cursor, "--json").stdout)
    assert whole["token_ids"] == here["token_ids"]


def test_the_status_of_a_store_lists_the_replicas_of_both_kinds(
    weald: Weald, drafters: list[str], verifier: Replica, store: str, checkpoints: Any
) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        told = json.loads(weald("status", store, "--json").stdout)["replicas"]
        if {one["address"] for one in told} == {*drafters, verifier.address}:
            break
        assert time.monotonic() < deadline, "a replica that was killed is listed until its time is over"
        time.sleep(0.2)
    kinds = {one["address"]: one["kind"] for one in told}
    assert kinds == {verifier.address: "verify"} | dict.fromkeys(drafters, "draft")
    assert {one["model"] for one in told} == {str(checkpoints.target)}
    assert len({one["fingerprint"] for one in told}) == 1
    table = weald("status", store)
    assert table.exit_code == 0
    assert all(kind in table.stdout for kind in ("draft", "verify", "draining"))
    refused = weald("status", "memory://")
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert "known to one process alone" in refused.stderr
