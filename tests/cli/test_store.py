"""`weald store` as a process: what it prints, what others reach by that, and how it ends."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
from typer.testing import Result

from services.sessions.opening import opened
from services.types.errors import WealdError
from services.types.sampling import SamplingParams
from services.types.session import Record, Session

PATIENCE_S = 60.0
"""For what ends within a second unless something is broken."""
RECORD = Record(Session("a", (1, 2), SamplingParams(), 7, (3,)), b"f", 0)
WEALD = "from services.cli.app import app; app()"


@contextmanager
def weald_store(directory: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command, and the line it prints."""
    command = [sys.executable, "-c", WEALD, "store", "--directory", str(directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout
        try:
            yield process, process.stdout.readline()
        finally:
            process.kill()


def redis_of(process: subprocess.Popen[str]) -> psutil.Process:
    """The Redis that the command has started."""
    (redis,) = psutil.Process(process.pid).children()
    return redis


async def create(url: str) -> None:
    """Write a session."""
    async with opened(url) as store:
        await store.create(RECORD)


async def load(url: str) -> Record:
    """Read it."""
    async with opened(url) as store:
        return await store.load(RECORD.session.id)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_what_it_prints_is_what_the_others_need_and_what_they_write_is_kept(
    number: signal.Signals, tmp_path: Path
) -> None:
    directory = tmp_path / "with space"
    for deed in (create, load, load):
        with weald_store(directory) as (process, line):
            assert line.startswith("weald store: file:///")
            url = line.split()[-1]
            assert asyncio.run(deed(url)) in (None, RECORD)
            redis = redis_of(process)
            process.send_signal(number)
            out, error = process.communicate(timeout=PATIENCE_S)
            assert (process.returncode, out, error) == (0, "", "")
            assert not redis.is_running()
            password = urlsplit((directory / "url").read_text()).password
            assert password
            assert password not in line


def test_it_ends_with_an_error_when_its_redis_ends(tmp_path: Path) -> None:
    with weald_store(tmp_path) as (process, _):
        redis_of(process).kill()
        out, error = process.communicate(timeout=PATIENCE_S)
        assert (process.returncode, out) == (1, "")
        assert error.startswith("weald: Redis ended with exit status -9;")
        assert error.count("\n") == 1
        assert "redis.log" in error


def test_what_it_printed_still_names_a_store_when_it_is_gone(tmp_path: Path) -> None:
    with weald_store(tmp_path) as (process, line):
        url = line.split()[-1]
        process.terminate()
        process.communicate(timeout=PATIENCE_S)
    with pytest.raises(WealdError, match=r"the store at 127\.0\.0\.1:"):
        asyncio.run(load(url))


def test_a_directory_that_cannot_be_used_is_told_in_one_sentence(
    weald: Callable[..., Result], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    finished = weald("store", "--directory", tmp_path / "file")
    assert finished.exit_code == 1
    assert finished.stderr.startswith("weald: ")
    assert finished.stderr.endswith("name another directory\n")
