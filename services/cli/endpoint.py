"""A generation at draft replicas, as the steps that a generation in this process has."""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import AbstractAsyncContextManager, aclosing

from services.engine.checkpoints import resolve
from services.gateway.calls import generate
from services.gateway.drafters import Drafters
from services.gateway.tokenizer import Tokenizer
from services.local.decoder import Step
from services.local.models import quiet
from services.types.messages import Call, Moved, Round, Started
from services.types.outcome import Outcome
from services.types.session import Cursor
from services.types.tree import DraftTree


def tokenizer_of(model: str) -> Tokenizer:
    """The tokenizer of a model, without its weights."""
    with quiet():
        return Tokenizer.load(resolve(model))


def generated(
    found: AbstractAsyncContextManager[Drafters], call: Call, within_s: float, cursor: Cursor | None
) -> tuple[int, Iterator[Step | Moved]]:
    """The seed in use, and the steps and moves as they come; leaving the iterator early cancels the call.

    Raises:
        WealdError: as `services.gateway.calls.generate` does.
    """
    steps = _events(found, call, within_s, cursor)
    started = next(steps)
    assert isinstance(started, Started)
    return started.seed, (step for step in steps if not isinstance(step, Started))


def _events(
    found: AbstractAsyncContextManager[Drafters], call: Call, within_s: float, cursor: Cursor | None
) -> Iterator[Started | Step | Moved]:
    with asyncio.Runner() as runner:
        steps = _steps(found, call, within_s, cursor)
        try:
            while True:
                yield runner.run(anext(steps))
        except StopAsyncIteration:
            return
        finally:
            runner.run(steps.aclose())


async def _steps(
    found: AbstractAsyncContextManager[Drafters], call: Call, within_s: float, cursor: Cursor | None
) -> AsyncGenerator[Started | Step | Moved]:
    pending = None
    async with found as drafters, aclosing(generate(drafters, call, within_s, cursor)) as events:
        async for event in events:
            match event:
                case Started() | Moved():
                    yield event
                case Round(tokens=tokens):
                    # What comes from the journal is no round of this generation.
                    root = DraftTree.root(pending) if pending is not None and event.verified else None
                    outcome = Outcome(tokens, event.accepted, event.verified, event.finish)
                    seconds = event.draft_ns / 1e9, event.verify_ns / 1e9
                    yield Step(call.session, event.tree or root, outcome, *seconds)
                    pending = tokens[-1] if tokens else pending
