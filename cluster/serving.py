"""A service that runs on the event loop of a Serve replica, beside the replica's own calls."""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, Self

import ray
from ray.util import get_node_ip_address

from services.sessions.opening import opened
from services.types.configuration import Place
from services.types.errors import ErrorCode, WealdError
from services.types.replica import ReplicaKind

ANSWER_S = 5.0
"""For a service to answer the replica that it runs in, which calls it as others do."""

Run = Callable[[Callable[[int], None], asyncio.Event], Coroutine[None, None, None]]
"""Told whom to tell the port, and when to end; as `services.verify.serving.run`."""

READY_S = 60.0
"""For a new replica to find those that it needs."""
LINGER_S = 8.0
"""Heartbeats and looks at the registry, after which gateways have what they need to take over."""
POLL_S = 0.2


class Serving:
    """A service from its start to its end."""

    def __init__(self, port: int, task: "asyncio.Task[None]", stopping: asyncio.Event) -> None:
        """As `started` does."""
        self.port = port
        self._task = task
        self._stopping = stopping

    @classmethod
    async def started(cls, run: Run) -> Self:
        """The service, once calls can come. Raises what ends it before."""
        port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        stopping = asyncio.Event()
        task = asyncio.create_task(run(port.set_result, stopping))
        either: set[asyncio.Future[Any]] = {task, port}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not port.done():
            task.result()
        return cls(port.result(), task, stopping)

    def check(self) -> None:
        """Raises what ended the service, or `WealdError(UNAVAILABLE)` when it ended without an error."""
        if self._task.done():
            self._task.result()
            raise WealdError(ErrorCode.UNAVAILABLE, "the service has ended")

    async def stop(self) -> None:
        """Let the sessions go on elsewhere, then end. Raises what ended the service before."""
        self._stopping.set()
        await self._task


async def ready(holds: Callable[[], Awaitable[bool]]) -> None:
    """Wait until something holds; not for ever, since what it waits for may be the one that waits."""
    with suppress(TimeoutError):
        async with asyncio.timeout(READY_S):
            while not await holds():
                await asyncio.sleep(POLL_S)


async def outlast(store: str, kind: ReplicaKind, fingerprint: bytes) -> None:
    """Serve on for a moment where another target takes over, until the gateways before it are gone.

    Args:
        store: whose registry tells.
        kind: of the replica that is to end.
        fingerprint: of its target.
    """
    async with opened(store) as sessions:
        try:
            listed = [one for one in await sessions.replicas(kind) if not one.draining]
        except WealdError:
            return
    targets = Counter(one.fingerprint for one in listed)
    if targets[fingerprint] <= 1 < len(targets):
        await asyncio.sleep(LINGER_S)


def placed(drain_s: float) -> Place:
    """Where a replica serves: at a free port of the node that it runs on."""
    host: str = get_node_ip_address()  # type: ignore[no-untyped-call]
    return Place(host, 0, None, drain_s, ray.get_runtime_context().get_node_id(), metrics_port=0)


def check_progress(what: str, began: float | None, within_s: float) -> None:
    """Raises `WealdError(UNAVAILABLE)` when something takes longer than a model that works ever does.

    Args:
        what: that is in work.
        began: when it began, `time.monotonic()`; None when nothing is in work.
        within_s: seconds it may take.
    """
    if began is not None and (took := time.monotonic() - began) > within_s:
        raise WealdError(ErrorCode.UNAVAILABLE, f"{what} has taken {took:.0f} s; the model hangs")
