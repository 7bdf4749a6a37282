"""All choices of a request at once."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from services.gateway.calls import generate
from services.gateway.choices import Choice, Piece
from services.gateway.drafters import Drafters
from services.gateway.requests import Job
from services.types.messages import Finished, Round


async def answer(job: Job, drafters: Drafters, within_s: float) -> AsyncGenerator[tuple[int, Piece]]:
    """The pieces of all choices as they come, each with the choice's index.

    Those of one choice are in order; its last one has a finish. A session is called off at once when a stop
    string ends its text, when another choice fails, and when this iterator is closed: close it to end early.
    While nobody takes a piece, none is read further ahead than two.

    Args:
        job: the request.
        drafters: the draft replicas that can be called.
        within_s: seconds that each choice may take.

    Raises:
        WealdError: as `services.gateway.calls.generate` does, for the first choice that fails.
    """
    ready: asyncio.Queue[tuple[int, Piece] | Exception | None] = asyncio.Queue(maxsize=1)
    """Pieces, the error of a choice that failed, and None for each one that is over."""

    async def run(index: int) -> None:
        choice, last = Choice(job, index), None
        try:
            async with aclosing(generate(drafters, job.calls[index], within_s)) as events:
                async for event in events:
                    piece = choice.take(event)
                    if piece and piece.finish and not _ends(event):
                        last = piece
                        break
                    if piece:
                        await ready.put((index, piece))
            if last:
                await ready.put((index, last))
            await ready.put(None)
        except Exception as error:
            await ready.put(error)

    running = [asyncio.create_task(run(index)) for index in range(len(job.calls))]
    left = len(running)
    try:
        while left:
            item = await ready.get()
            if isinstance(item, Exception):
                raise item
            if item:
                yield item
            else:
                left -= 1
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def _ends(event: object) -> bool:
    """Whether the session is over by itself with this event."""
    return isinstance(event, Finished) or (isinstance(event, Round) and event.finish is not None)
