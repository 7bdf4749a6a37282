"""Replicas started as processes, for what measures or tests them from outside."""

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path

from services.types.errors import ErrorCode, WealdError
from services.wire.clients import DraftClient

WEALD = "from services.cli.app import app; app()"
WHOLE_TREES = ("--speculative-budget", 60, "--speculative-num-steps", 6)
"""Of a draft replica: the paper's trees, in every round, whether they pay or not."""
STOP_S = 60.0
READY_S = 60.0
WITHIN_S = 5.0
"""Of a call for the status of a replica."""
_WARM = (
    "services.bench.replicas",
    "services.bench.stages",
    "services.cli.app",
    "services.cli.process",
    "services.cli.ranks",
    "services.draft.serving",
    "services.local.models",
    "services.sessions.redis",
    "services.verify.serving",
    "transformers.models.llama.modeling_llama",
)
"""What a replica imports; nothing of it starts a thread."""


class Replica:
    """A process that prints one line when it is ready, its address last."""

    def __init__(self, *arguments: object, program: str = WEALD, threads: int | None = None) -> None:
        """Start a Python program, by default `weald` with a verify or draft replica, and wait for its line.

        Raises:
            WealdError: `UNAVAILABLE` when it ends instead; what it said stands on standard error.
        """
        command = [sys.executable, "-c", program, *map(str, arguments)]
        limited = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | limited, text=True)
        assert self.process.stdout
        try:
            line = self.process.stdout.readline()
        except BaseException:
            self.process.kill()
            raise
        if not line:
            self.process.stdout.close()
            raise WealdError(ErrorCode.UNAVAILABLE, f"{command} ended with exit status {self.process.wait()}")
        self.address = line.split()[-1]

    def stop(self) -> int:
        """Ask it to drain and end; its exit status."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        finally:
            assert self.process.stdout
            self.process.stdout.close()


class Forked:
    """A replica forked from a process that has imported all it needs, so it is there in half a second.

    It is a process of its own for all that, and so are its signals and its death.
    """

    def __init__(self, *arguments: object, log: Path, orders: Path | None = None) -> None:
        """Start `weald` with these arguments; `ready` waits for its line.

        Args:
            arguments: of a verify or draft replica.
            log: what it says on standard error is added here.
            orders: a file of `stages.Orders` that it obeys.
        """
        forks = _warm()
        self._line, line = forks.Pipe(duplex=False)
        self._log = log
        words = [str(argument) for argument in arguments]
        self.process = forks.Process(target=_become, args=(words, line, log, orders), daemon=True)
        self.process.start()
        line.close()

    def ready(self, within_s: float = READY_S) -> str:
        """Wait until it serves; its address.

        Raises:
            WealdError: `UNAVAILABLE` when it has ended instead, or does not come in time.
        """
        said = b""
        while not said.endswith(b"\n"):
            more = os.read(self._line.fileno(), 1024) if self._line.poll(within_s) else b""
            if not more:
                self.stop()
                raise WealdError(ErrorCode.UNAVAILABLE, f"a replica did not start; {self._log} says why")
            said += more
        return said.decode().split()[-1]

    def send_signal(self, number: signal.Signals) -> None:
        """Send it a signal, if it still runs."""
        if self.process.is_alive():
            assert self.process.pid
            os.kill(self.process.pid, number)

    def stop(self, number: signal.Signals = signal.SIGKILL, within_s: float = STOP_S) -> int:
        """Send a signal and wait for the end; the exit status, that of a signal being negative.

        Raises:
            WealdError: `DEADLINE_EXCEEDED` when it goes on.
        """
        self.send_signal(number)
        self.process.join(within_s)
        if self.process.exitcode is None:
            raise WealdError(ErrorCode.DEADLINE_EXCEEDED, f"a replica ignores {number.name}; see {self._log}")
        self._line.close()
        return self.process.exitcode


def _warm() -> "multiprocessing.context.ForkServerContext":
    """Start, once, the process that replicas are forked from; its imports take some seconds."""
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(list(_WARM))
    before = dict(os.environ)
    # A pool of threads, as numerical libraries start on import, would not survive the fork.
    os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return forks


def _become(arguments: list[str], line: Connection, log: Path, orders: Path | None) -> None:
    """In the fork: be the command."""
    os.dup2(line.fileno(), 1)
    line.close()
    with log.open("ab") as opened:
        os.dup2(opened.fileno(), 2)
    threading.Thread(target=_end_with_owner, daemon=True).start()
    from services.bench.stages import obey
    from services.cli.app import app

    if orders:
        obey(orders)
    app(arguments)


def _end_with_owner() -> None:
    """Nobody is left to stop a replica whose owner was killed."""
    owner = multiprocessing.parent_process()
    assert owner
    owner.join()
    os._exit(1)


@contextmanager
def replica(*arguments: object, program: str = WEALD, threads: int | None = None) -> Iterator[Replica]:
    """A `Replica` that is stopped at the end, if it still runs."""
    started = Replica(*arguments, program=program, threads=threads)
    try:
        yield started
    finally:
        if started.process.poll() is None:
            started.stop()
        elif started.process.stdout:
            started.process.stdout.close()


@contextmanager
def both_services(
    model: str, head: str | None, dtype: str, *drafting: object
) -> Iterator[tuple[Replica, Replica]]:
    """A verify replica and a draft replica in front of it; `drafting` are more options of the latter."""
    named = ("--model", model, "--dtype", dtype, "--port", 0)
    heads = ("--speculative-model", head) if head else ()
    with (
        replica("verify", *named) as verifier,
        replica("draft", *named, *heads, *drafting, "--verify", verifier.address) as drafter,
    ):
        yield verifier, drafter


async def until_linked(client: DraftClient) -> None:
    """Wait until a draft replica is connected to a verify replica."""
    while not any((await client.status(WITHIN_S)).verifiers.values()):
        await asyncio.sleep(0.05)
