"""A worker of the gateway: from settings to a served socket."""

import asyncio
import math
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn

from services.gateway.app import Gateway, Settings, create_app
from services.types.errors import invalid

BACKLOG = 2048
"""Connections that may wait to be taken."""
KEEP_ALIVE_S = 75
"""A connection without a request stays open so long: longer than clients keep theirs."""
UNREAD_S = 60
"""A client that reads nothing for so long is cut off."""
UNREAD = 2**18
"""Bytes that the kernel keeps for a client that reads slowly; by itself it would keep megabytes."""
END_S = 2
"""For answers to tell that they end, once the time to drain is over."""
POLL_S = 0.01


def listen(host: str, port: int) -> socket.socket:
    """A socket that clients can connect to from now on; port 0 is a free one.

    Raises:
        WealdError: `INVALID_ARGUMENT` when the address cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host.strip("[]"), port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise invalid(f"cannot listen at {host}:{port}: {error}; choose another --host or --port") from error
    # Connections inherit all of these. asyncio turns off Nagle's algorithm only where a socket names TCP.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNREAD)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * UNREAD_S)
    return listener


async def run(
    settings: Settings,
    listener: socket.socket,
    drain_s: float,
    ready: Callable[[int], None],
    stopping: asyncio.Event,
) -> None:
    """Serve until `stopping` is set, then let answers come to their end.

    Args:
        settings: what is served.
        listener: from `listen`; several workers can share it.
        drain_s: for answers to end at shutdown; those that go on then are told where another gateway can.
        ready: told the port when requests are answered.
        stopping: set to end.

    Raises:
        WealdError: `INCOMPATIBLE_CHECKPOINT` when there is no tokenizer; `INVALID_ARGUMENT` when the store
            or certificates cannot be used.
    """
    async with Gateway.opened(settings) as gateway:
        server = _Server(
            uvicorn.Config(
                create_app(gateway),
                # The strictest parser, whichever others are installed.
                http="h11",
                lifespan="off",
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=math.ceil(drain_s) + END_S,
            )
        )
        serving = asyncio.create_task(server.serve([listener]))
        while not (server.started or serving.done()):
            await asyncio.sleep(POLL_S)
        ready(listener.getsockname()[1])
        stopped = asyncio.create_task(stopping.wait())
        await asyncio.wait({serving, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        server.should_exit = True
        await asyncio.wait({serving}, timeout=drain_s)
        gateway.ending.set_result(None)
        await serving


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the process, which sets `stopping`."""
        yield
