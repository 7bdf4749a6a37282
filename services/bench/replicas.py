"""Replicas started as processes, for what measures or tests them from outside."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from services.types.errors import ErrorCode, WealdError

WEALD = "from services.cli.app import app; app()"
STOP_S = 60.0


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
        line = self.process.stdout.readline()
        if not line:
            self.process.stdout.close()
            raise WealdError(ErrorCode.UNAVAILABLE, f"{command} ended with exit status {self.process.wait()}")
        self.address = line.split()[-1]

    def kill(self) -> None:
        """End it without a farewell."""
        self.process.send_signal(signal.SIGKILL)
        self._wait()

    def stop(self) -> int:
        """Ask it to drain and end; its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self._wait()

    def _wait(self) -> int:
        try:
            return self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        finally:
            assert self.process.stdout
            self.process.stdout.close()


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
