"""The deployment of draft replicas."""

import asyncio
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from cluster.configuration import ClusterConfig
from cluster.scaling import draft_load
from cluster.serving import ANSWER_S, Serving, check_progress, outlast, placed, ready
from services.draft.serving import load, run
from services.draft.tracing import Tracer
from services.local.models import head_of, precision, quiet, usable_device
from services.sessions.opening import opened
from services.telemetry.export import exporting
from services.types.replica import ReplicaKind
from services.wire.channel import connect
from services.wire.clients import DraftClient


class DraftReplica:
    """A head, and the sessions it drafts for."""

    async def __init__(self, config: ClusterConfig) -> None:  # type: ignore[misc]
        """Load the head and serve. Raises as `services.draft.serving` does."""
        self._config = config
        self._telemetry = ExitStack()
        config.telemetry.log()
        self._service, self._status = await asyncio.to_thread(self._load)
        self._serving = await Serving.started(self._run)
        self._channel = connect(placed(0).address(self._serving.port), self._config.links)
        self._counted = time.monotonic(), self._drafted_ns()
        # In an update the replicas before this one stay until it can serve.
        await ready(self._linked)

    async def _linked(self) -> bool:
        return any(map(self._service.serves, self._service.links.values()))

    def _load(self) -> Any:
        config, draft, tracing = self._config, self._config.draft, self._config.telemetry.tracing
        device, sink = usable_device("auto"), self._telemetry.enter_context(exporting(tracing, "weald-draft"))
        with quiet():
            return load(
                config.model,
                head_of(config.model, config.speculative_model),
                precision(config.dtype, device),
                device,
                draft.config,
                memory=draft.kv_cache_memory,
                max_num_seqs=draft.max_num_seqs,
                tracer=Tracer(sink, tracing, config.model) if sink else None,
            )

    async def _run(self, told: Callable[[int], None], stopping: asyncio.Event) -> None:
        place = placed(self._config.drain)
        async with opened(self._config.store) as store:
            links = self._config.links
            await run(self._service, self._status, place, store, (), links, told, stopping)

    async def check_health(self) -> None:
        """Raises when the head hangs, or the server does not answer."""
        self._serving.check()
        check_progress("the drafting of trees", self._service.pass_began, self._config.hang_timeout)
        await DraftClient(self._channel).status(ANSWER_S)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """How much of what this replica can take is taken: `load`, 1.0 being all."""
        (then, before), self._counted = self._counted, (time.monotonic(), self._drafted_ns())
        now, drafted = self._counted
        busy = (drafted - before) / 1e9 / max(now - then, 1e-9)
        return {"load": draft_load(len(self._service), self._config.draft.max_num_seqs, busy)}

    def _drafted_ns(self) -> int:
        return int(self._service.counters().get("draft_ns", 0))

    async def __del__(self) -> None:
        await outlast(self._config.store, ReplicaKind.DRAFT, self._status.fingerprint)
        await self._channel.close()
        await self._serving.stop()
        self._telemetry.close()
