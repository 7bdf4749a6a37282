"""A draft replica as a process: from options to a served address."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

import torch

from services.draft.drafter import Drafter
from services.draft.link import Links
from services.draft.metrics import readings
from services.draft.service import DraftService, RoundTimes
from services.draft.servicer import DraftServicer
from services.draft.tracing import Tracer
from services.engine.checkpoints import fingerprint, read_embeddings, resolve
from services.engine.head import EagleHead
from services.engine.pages import PAGE_SIZE
from services.engine.transfer import dtype_name
from services.sessions.registry import Directory, announce
from services.sessions.store import Store
from services.telemetry.metrics import scraped
from services.types.configuration import DraftConfig, Place
from services.types.messages import DraftStatus
from services.types.replica import Replica, ReplicaKind
from services.wire.server import serve
from services.wire.transport import Tls


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
    tracer: Tracer | None = None,
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
        tracer: told of all calls.

    Raises:
        WealdError: `INCOMPATIBLE_CHECKPOINT` when head and target do not fit.
    """
    directory = resolve(model)
    loaded = EagleHead.load(resolve(head), *read_embeddings(directory, dtype, device))
    pages = memory // (loaded.token_bytes * PAGE_SIZE)
    mark = fingerprint(directory)
    service = DraftService(
        Drafter(loaded, config, num_pages=pages),
        mark,
        max_num_seqs=max_num_seqs,
        observe=observe,
        tracer=tracer,
    )
    status = DraftStatus(
        model=model,
        fingerprint=mark,
        dtype=dtype_name(dtype),
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
    place: Place,
    store: Store,
    verifiers: Sequence[str],
    tls: Tls | None,
    ready: Callable[[int], None],
    stopping: asyncio.Event,
) -> None:
    """Serve until `stopping` is set, then drain.

    Args:
        service: not started yet.
        status: what it says of itself.
        place: where it serves.
        store: of its journal; its registry lists this replica, and verify replicas to use.
        verifiers: further verify replicas, host:port.
        tls: of both sides.
        ready: told the port when calls can come.
        stopping: set to end.

    Raises:
        WealdError: `INVALID_ARGUMENT` when an address cannot be used.
    """
    server = await serve(DraftServicer(service, status), f"{place.host}:{place.port}", tls)
    address = place.address(server.port)

    def replica() -> Replica:
        return Replica(
            ReplicaKind.DRAFT,
            address,
            status.fingerprint,
            status.model,
            len(service),
            service.draining,
            place.node,
            metrics,
        )

    async with Links(verifiers, tls, service) as links:
        service.links = links
        service.start(store)
        with scraped(place, partial(readings, service)) as metrics:
            directory = Directory(store, ReplicaKind.VERIFY, links.told)
            listing = [asyncio.create_task(directory.run()), asyncio.create_task(announce(store, replica))]
            ready(server.port)
            await stopping.wait()
            await server.drain()
            await service.drain(place.drain_s)
            await server.stop(1.0)
            for task in listing:
                task.cancel()
            await asyncio.gather(*listing, return_exceptions=True)
        await service.stop()
