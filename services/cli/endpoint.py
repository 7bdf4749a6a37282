"""A generation at a draft service, as the steps that a generation in this process has."""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack, aclosing

from services.engine.checkpoints import resolve
from services.gateway.tokenizer import Tokenizer
from services.local.decoder import Step
from services.local.models import quiet
from services.types.messages import Call, Round, Started
from services.types.outcome import Outcome
from services.types.tree import DraftTree
from services.wire.channel import connect
from services.wire.clients import DraftClient
from services.wire.transport import Tls


def tokenizer_of(model: str) -> Tokenizer:
    """The tokenizer of a model, without its weights."""
    with quiet():
        return Tokenizer.load(resolve(model))


def generated(endpoint: str, call: Call, tls: Tls | None, within_s: float) -> tuple[int, Iterator[Step]]:
    """The seed in use, and the steps as they come; leaving the iterator early cancels the call.

    Raises:
        WealdError: as the service does; `DEADLINE_EXCEEDED` after `within_s` seconds.
    """
    steps = _events(endpoint, call, tls, within_s)
    started = next(steps)
    assert isinstance(started, Started)
    return started.seed, (step for step in steps if isinstance(step, Step))


def _events(endpoint: str, call: Call, tls: Tls | None, within_s: float) -> Iterator[Started | Step]:
    with asyncio.Runner() as runner:
        steps = _steps(endpoint, call, tls, within_s)
        try:
            while True:
                yield runner.run(anext(steps))
        except StopAsyncIteration:
            return
        finally:
            runner.run(steps.aclose())


async def _steps(
    endpoint: str, call: Call, tls: Tls | None, within_s: float
) -> AsyncGenerator[Started | Step]:
    pending = None
    async with AsyncExitStack() as stack:
        channel = await stack.enter_async_context(connect(endpoint, tls))
        events = await stack.enter_async_context(aclosing(DraftClient(channel).generate(call, within_s)))
        async for event in events:
            if isinstance(event, Started):
                yield event
            elif isinstance(event, Round):
                root = None if pending is None else DraftTree.root(pending)
                outcome = Outcome(event.tokens, event.accepted, event.verified, event.finish)
                seconds = event.draft_ns / 1e9, event.verify_ns / 1e9
                yield Step(call.session, event.tree or root, outcome, *seconds)
                pending = event.tokens[-1]
