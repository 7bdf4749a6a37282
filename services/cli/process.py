"""What every service process does: say that it is ready, and stop when it is told to."""

import asyncio
import signal
from collections.abc import Callable

import typer


def stopped_by_signal() -> asyncio.Event:
    """Set when the process is asked to end, by SIGTERM or Ctrl-C."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    return stopping


def announce(what: str) -> Callable[[int], None]:
    """Prints one line, ending with the port, when the service is ready for calls."""
    return lambda port: typer.echo(f"{what}:{port}")
