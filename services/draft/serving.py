"""A draft replica as a process: from options to a served address."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress

import torch

from services.draft.drafter import Drafter
from services.draft.link import VerifyLink
from services.draft.service import DraftService, RoundTimes
from services.draft.servicer import DraftServicer
from services.engine.checkpoints import fingerprint, read_embeddings, resolve
from services.engine.head import EagleHead
from services.types.configuration import DraftConfig
from services.types.messages import DraftStatus
from services.wire.channel import connect
from services.wire.clients import VerifyClient
from services.wire.server import serve
from services.wire.transport import Tls

PAGE_SIZE = 16


def load(
    model: str,
    head: str,
    dtype: torch.dtype,
    device: torch.device,
    config: DraftConfig,
    *,
    memory: int,
    max_num_seqs: int,
    observe: Callable[[RoundTimes], None] | None = None,
) -> tuple[DraftService, DraftStatus]:
    """A draft service that is ready to start, and what it says of itself.

    Args:
        model: the target, as `checkpoints.resolve` takes it; only its embedding and LM head are read.
        head: the draft head, likewise.
        dtype: of weights and cache.
        device: where the head runs.
        config: the trees of calls that ask for none of their own.
        memory: bytes of the head's KV cache.
        max_num_seqs: sessions at once.
        observe: told of every round that had a tree.

    Raises:
        WealdError: `INCOMPATIBLE_CHECKPOINT` when head and target do not fit.
    """
    directory = resolve(model)
    loaded = EagleHead.load(resolve(head), *read_embeddings(directory, dtype, device))
    pages = memory // (loaded.token_bytes * PAGE_SIZE)
    mark = fingerprint(directory)
    service = DraftService(
        Drafter(loaded, config, num_pages=pages, page_size=PAGE_SIZE),
        mark,
        max_num_seqs=max_num_seqs,
        observe=observe,
    )
    status = DraftStatus(
        model=model,
        fingerprint=mark,
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
        running=0,
        num_pages=pages,
        free_pages=pages,
        verifiers={},
        counters={},
    )
    return service, status


async def run(
    service: DraftService,
    status: DraftStatus,
    address: str,
    verifiers: Sequence[str],
    tls: Tls | None,
    ready: Callable[[int], None],
    stopping: asyncio.Event,
    drain_s: float,
) -> None:
    """Serve until `stopping` is set, then drain; `ready` is told the port.

    Raises:
        WealdError: `INVALID_ARGUMENT` when the address cannot be used.
    """
    async with AsyncExitStack() as stack:
        for verifier in dict.fromkeys(verifiers):
            channel = await stack.enter_async_context(connect(verifier, tls))
            link = VerifyLink(verifier, VerifyClient(channel), service.received, service.broken)
            service.links[verifier] = link
            stack.push_async_callback(_end, asyncio.create_task(link.run()))
        service.start()
        stack.callback(service.stop)
        server = await serve(DraftServicer(service, status), address, tls)
        ready(server.port)
        await stopping.wait()
        await server.drain()
        await service.drain(drain_s)
        await server.stop(1.0)


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
