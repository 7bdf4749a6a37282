"""The deployment of verify replicas."""

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from cluster.configuration import ClusterConfig
from cluster.ranks import Followers
from cluster.scaling import verify_load
from cluster.serving import ANSWER_S, Serving, check_progress, outlast, placed
from services.engine.ranks import Ranks
from services.local.models import precision, quiet, usable_device
from services.sessions.opening import opened
from services.telemetry.export import exporting
from services.types.replica import ReplicaKind
from services.verify.serving import load, run
from services.wire.channel import connect
from services.wire.clients import VerifyClient


class VerifyReplica:
    """Rank 0 of a target; further ranks are actors in its placement group."""

    async def __init__(self, config: ClusterConfig) -> None:  # type: ignore[misc]
        """Load the target and serve. Raises as `services.verify.serving` does."""
        self._config = config
        self._telemetry = ExitStack()
        config.telemetry.log()
        self._followers: Followers | None = None
        device = usable_device("auto")
        ranks: Ranks | None = None
        if (size := config.verify.tensor_parallel_size) > 1:
            self._followers = Followers(config.model, config.dtype, size, config.verify.resources)
            ranks = await self._followers.joined(size, device)
        self._ranks = ranks
        self._service, self._status = await asyncio.to_thread(self._load, device, ranks)
        self._serving = await Serving.started(self._run)
        self._channel = connect(placed(0).address(self._serving.port), self._config.links)
        self._counted = self._service.counters()

    def _load(self, device: torch.device, ranks: Ranks | None) -> Any:
        config, verify = self._config, self._config.verify
        sink = self._telemetry.enter_context(exporting(config.telemetry.tracing, "weald-verify"))
        with quiet():
            return load(
                config.model,
                precision(config.dtype, device),
                device,
                memory=verify.kv_cache_memory,
                max_model_len=verify.max_model_len,
                limits=verify.limits,
                ranks=ranks,
                sink=sink,
            )

    async def _run(self, ready: Callable[[int], None], stopping: asyncio.Event) -> None:
        place = placed(self._config.drain)
        async with opened(self._config.store) as store:
            await run(self._service, self._status, place, store, self._config.links, ready, stopping)
        if self._ranks:
            self._ranks.stop()

    async def check_health(self) -> None:
        """Raises when the target hangs, a rank is gone, or the stream server does not answer."""
        self._serving.check()
        if self._followers:
            self._followers.check()
        check_progress("a target step", self._service.step_began, self._config.hang_timeout)
        await VerifyClient(self._channel).status(ANSWER_S)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """How much of what this replica can take is taken: `load`, 1.0 being all."""
        before, self._counted = self._counted, self._service.counters()
        steps = self._counted.get("steps", 0) - before.get("steps", 0)
        tokens = self._counted["tokens_forwarded"] - before["tokens_forwarded"]
        load = self._service.load()
        return {
            "load": verify_load(
                running=load.running,
                waiting=load.waiting,
                max_num_seqs=self._config.verify.max_num_seqs,
                free_pages=load.free_pages,
                num_pages=self._status.num_pages,
                tokens_per_step=tokens / steps if steps else 0.0,
                max_num_batched_tokens=self._config.verify.max_num_batched_tokens,
            )
        }

    async def __del__(self) -> None:
        await outlast(self._config.store, ReplicaKind.VERIFY, self._status.fingerprint)
        await self._channel.close()
        await self._serving.stop()
        self._telemetry.close()
