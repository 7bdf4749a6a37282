"""Replicas started as processes, for what measures or tests them from outside."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from services.types.errors import ErrorCode, WealdError
from services.wire.clients import DraftClient

WEALD = "from services.cli.app import app; app()"
STOP_S = 60.0
WITHIN_S = 5.0
"""Of a call for the status of a replica."""


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
