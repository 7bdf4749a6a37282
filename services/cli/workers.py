"""Workers of the gateway: processes that take connections from one socket."""

import asyncio
import logging
import multiprocessing
import os
import signal
import socket
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection

from prometheus_client import multiprocess

from services.cli.process import stopped_by_signal
from services.gateway.app import Settings
from services.gateway.metrics import SHARED
from services.gateway.serving import run
from services.types.errors import ErrorCode, WealdError

POLL_S = 0.5
"""How often it is seen whether all workers still run."""

_log = logging.getLogger(__name__)
_processes = multiprocessing.get_context("spawn")


def serve(
    settings: Settings, listener: socket.socket, workers: int, drain_s: float, ready: Callable[[int], None]
) -> None:
    """Serve until the process is asked to end: by itself, or by so many workers, each replaced when it dies.

    Args:
        settings: what is served.
        listener: where.
        workers: number of processes.
        drain_s: for answers to end at shutdown.
        ready: told the port when all workers answer.

    Raises:
        WealdError: as `services.gateway.serving.run` does; `UNAVAILABLE` when a worker does not start.
    """
    if workers == 1:
        asyncio.run(_serve(settings, listener, drain_s, ready))
        return
    with tempfile.TemporaryDirectory(prefix="weald-metrics-") as metrics:
        given = os.environ.setdefault(SHARED, metrics)
        try:
            asyncio.run(_supervise(lambda: _Worker(settings, listener, drain_s), workers, ready))
        finally:
            if given == metrics:
                del os.environ[SHARED]


async def _serve(
    settings: Settings, listener: socket.socket, drain_s: float, ready: Callable[[int], None]
) -> None:
    await run(settings, listener, drain_s, ready, stopped_by_signal())


async def _supervise(start: "Callable[[], _Worker]", count: int, ready: Callable[[int], None]) -> None:
    stopping = stopped_by_signal()
    workers = [start() for _ in range(count)]
    try:
        for worker in workers:
            port = await asyncio.to_thread(worker.port)
        ready(port)
        while not stopping.is_set():
            for index, worker in enumerate(workers):
                if (status := worker.process.exitcode) is not None:
                    _log.error("a worker ended with exit status %d; another one starts", status)
                    multiprocess.mark_process_dead(worker.process.pid)  # type: ignore[no-untyped-call]
                    workers[index] = start()
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await stopping.wait()
    finally:
        for worker in workers:
            worker.process.terminate()
        for worker in workers:
            await asyncio.to_thread(worker.process.join)


class _Worker:
    def __init__(self, settings: Settings, listener: socket.socket, drain_s: float) -> None:
        self._line, line = _processes.Pipe(duplex=False)
        self.process = _processes.Process(target=_work, args=(settings, listener, drain_s, line))
        self.process.start()
        line.close()

    def port(self) -> int:
        """Wait until it answers; the port. Raises `WealdError`, its own or `UNAVAILABLE`, when it ends."""
        try:
            said: int | tuple[ErrorCode, str] = self._line.recv()
        except EOFError:
            raise WealdError(
                ErrorCode.UNAVAILABLE, "a worker of the gateway did not start; see what it said above"
            ) from None
        if isinstance(said, tuple):
            raise WealdError(*said)
        return said


def _work(settings: Settings, listener: socket.socket, drain_s: float, line: Connection) -> None:
    threading.Thread(target=_end_with_owner, daemon=True).start()
    try:
        with listener:
            asyncio.run(_serve(settings, listener, drain_s, line.send))
    except WealdError as error:
        line.send((error.code, error.message))


def _end_with_owner() -> None:
    """Nobody is left to stop a worker whose owner was killed."""
    owner = multiprocessing.parent_process()
    assert owner
    owner.join()
    os.kill(os.getpid(), signal.SIGTERM)
