"""A verify replica as a process: from options to a served address."""

import asyncio
import time
from collections.abc import Callable
from functools import partial

import torch

from services.engine.checkpoints import fingerprint, resolve
from services.engine.pages import PAGE_SIZE
from services.engine.ranks import Ranks
from services.engine.target import Target
from services.engine.transfer import dtype_name
from services.sessions.registry import announce
from services.sessions.store import Store
from services.telemetry.metrics import scraped
from services.telemetry.spans import Sink
from services.types.configuration import Place, VerifyLimits
from services.types.messages import Load, VerifyStatus
from services.types.replica import Replica, ReplicaKind
from services.verify.grammar import Grammars
from services.verify.metrics import readings
from services.verify.service import VerifyService
from services.verify.servicer import VerifyServicer
from services.verify.verifier import Verifier
from services.wire.server import serve
from services.wire.transport import Tls

_WATCH_NS = 50_000_000


def load(
    model: str,
    dtype: torch.dtype,
    device: torch.device,
    *,
    memory: int,
    max_model_len: int | None,
    limits: VerifyLimits,
    ranks: Ranks | None = None,
    sink: Sink | None = None,
) -> tuple[VerifyService, VerifyStatus]:
    """A verify service that is ready to start, and what it says of itself.

    Args:
        model: as `checkpoints.resolve` takes it.
        dtype: of weights and cache.
        device: of this rank.
        memory: bytes of the KV cache, on each rank.
        max_model_len: tokens of one session at most; None for the target's context.
        limits: what is taken on at once.
        ranks: the tensor-parallel group this process leads.
        sink: takes spans.

    Raises:
        WealdError: as `Target.load` and `VerifyService` do.
    """
    directory = resolve(model)
    target = Target.load(directory, dtype, device, ranks)
    pages = memory // (target.token_bytes * PAGE_SIZE)
    grammars = Grammars(directory, target.vocab_size, target.eos_token_ids)
    verifier = Verifier(target, num_pages=pages, max_model_len=max_model_len, grammars=grammars)
    mark = fingerprint(directory)
    status = VerifyStatus(
        model=model,
        fingerprint=mark,
        dtype=dtype_name(dtype),
        device=str(device),
        tensor_parallel_size=ranks.size if ranks else 1,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=verifier.max_model_len,
        page_size=PAGE_SIZE,
        num_pages=pages,
        load=Load(),
        counters={},
    )
    service = VerifyService(verifier, limits, mark, sink)
    service.warm_up()
    return service, status


async def run(
    service: VerifyService,
    status: VerifyStatus,
    place: Place,
    store: Store,
    tls: Tls | None,
    ready: Callable[[int], None],
    stopping: asyncio.Event,
) -> None:
    """Serve until `stopping` is set, then drain.

    Args:
        service: not started yet.
        status: what it says of itself.
        place: where it serves.
        store: whose registry lists this replica.
        tls: of both sides.
        ready: told the port when streams can come.
        stopping: set to end.

    Raises:
        WealdError: `INVALID_ARGUMENT` when an address cannot be used; what ended the service, when it ended
            by itself.
    """
    loop = asyncio.get_running_loop()
    servicer = VerifyServicer(service, status)
    server = await serve(servicer, f"{place.host}:{place.port}", tls)
    address = place.address(server.port)

    def replica() -> Replica:
        load = service.load()
        sessions = load.running + load.waiting
        return Replica(
            ReplicaKind.VERIFY,
            address,
            status.fingerprint,
            status.model,
            sessions,
            service.draining,
            place.node,
            metrics,
        )

    service.start(partial(loop.call_soon_threadsafe, stopping.set))
    with scraped(place, partial(readings, service)) as metrics:
        beside = [asyncio.create_task(_watch(service)), asyncio.create_task(announce(store, replica))]
        ready(server.port)
        await stopping.wait()
        await server.drain()
        if service.failed is None:
            servicer.drain()
            await asyncio.to_thread(service.drain, place.drain_s)
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
    servicer.close()
    await server.stop(1.0)
    await asyncio.to_thread(service.stop)
    if service.failed:
        raise service.failed


async def _watch(service: VerifyService) -> None:
    """Note the longest that the event loop has been late."""
    while True:
        due = time.perf_counter_ns() + _WATCH_NS
        await asyncio.sleep(_WATCH_NS / 1e9)
        service.loop_lag_ns = max(service.loop_lag_ns, time.perf_counter_ns() - due)
