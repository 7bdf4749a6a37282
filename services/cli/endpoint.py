"""A generation at a draft service, as the steps that a generation in this process has."""

import asyncio
from collections.abc import AsyncGenerator, Iterator

from services.engine.checkpoints import resolve
from services.gateway.tokenizer import Tokenizer
from services.local.decoder import Step
from services.local.models import quiet
from services.types.messages import Call, Finished, Round, Started
from services.types.outcome import Outcome
from services.types.tree import DraftTree
from services.wire.channel import connect
from services.wire.clients import DraftClient
from services.wire.transport import Tls


def tokenizer_of(model: str) -> Tokenizer:
    """The tokenizer of a model, without its weights."""
    with quiet():
        return Tokenizer.load(resolve(model))


def generated(endpoint: str, call: Call, tls: Tls | None) -> tuple[int, Iterator[Step]]:
    """The seed in use, and the steps as they come; leaving the iterator early cancels the call.

    Raises:
        WealdError: as the service does.
    """
    steps = _events(endpoint, call, tls)
    started = next(steps)
    assert isinstance(started, Started)
    return started.seed, (step for step in steps if isinstance(step, Step))


def _events(endpoint: str, call: Call, tls: Tls | None) -> Iterator[Started | Step]:
    with asyncio.Runner() as runner:
        steps = _steps(endpoint, call, tls)
        try:
            while True:
                yield runner.run(anext(steps))
        except StopAsyncIteration:
            return
        finally:
            runner.run(steps.aclose())


async def _steps(endpoint: str, call: Call, tls: Tls | None) -> AsyncGenerator[Started | Step]:
    pending = None
    async with connect(endpoint, tls) as channel:
        async for event in DraftClient(channel).generate(call):
            match event:
                case Started():
                    yield event
                case Round():
                    root = None if pending is None else DraftTree.root(pending)
                    outcome = Outcome(event.tokens, event.accepted, event.verified, event.finish)
                    yield Step(
                        call.session, event.tree or root, outcome, event.draft_ns / 1e9, event.verify_ns / 1e9
                    )
                    pending = event.tokens[-1]
                case Finished():
                    return
