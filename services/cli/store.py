"""`weald store`: a Redis for the services of one machine."""

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from services.types.errors import ErrorCode, WealdError

if TYPE_CHECKING:
    from services.sessions.embedded import EmbeddedRedis

POLL_S = 0.2
"""How often it is seen whether Redis still runs."""


def store(
    directory: Annotated[Path, typer.Option(metavar="DIR", help="Where the sessions are kept.")],
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="0: the same as the last time, at first a free one.")
    ] = 0,
) -> None:
    """Run a Redis for this machine; give the others what it prints last as their `--store`."""
    from services.sessions.embedded import embedded

    with embedded(directory.absolute(), port) as redis:
        asyncio.run(_serve(redis))


async def _serve(redis: "EmbeddedRedis") -> None:
    from services.cli.process import stopped_by_signal

    stopping = stopped_by_signal()
    # The password stands in the file alone, so that no log has it.
    typer.echo(f"weald store: {redis.file.as_uri()}")
    while redis.process.poll() is None:
        with suppress(TimeoutError):
            async with asyncio.timeout(POLL_S):
                await stopping.wait()
                return
    raise WealdError(
        ErrorCode.UNAVAILABLE,
        f"Redis ended with exit status {redis.process.returncode}; "
        f"{redis.file.with_name('redis.log')} says why",
    )
