"""The tensor-parallel ranks of a verify replica: rank 0 in the replica, an actor in each further bundle."""

import asyncio
from typing import Any

import ray
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.configuration import Resources
from cluster.serving import placed
from services.engine.checkpoints import resolve
from services.engine.ranks import Ranks, follow, free_port
from services.engine.target import Target
from services.local.models import precision, quiet, usable_device
from services.types.errors import ErrorCode, WealdError

POLL_S = 0.5


class Rank:
    """A rank other than 0; it ends with its replica, whose placement group it lives in."""

    def follow(self, model: str, dtype: str, rank: int, size: int, address: str, port: int) -> None:
        """Load a shard and do as rank 0 tells, until it tells to stop. Raises as `Ranks.join` does."""
        device = usable_device("auto")
        with quiet():
            ranks = Ranks.join(rank, size, address, port, device)
            target = Target.load(resolve(model), precision(dtype, device), device, ranks)
        follow(target)


class Followers:
    """The actors of the further ranks, as rank 0 sees them."""

    def __init__(self, model: str, dtype: str, size: int, each: Resources) -> None:
        """Start them in the bundles behind the first one of the replica's placement group."""
        self.address = placed(0).host
        self.port = free_port()
        group = get_current_placement_group()
        assert group
        self._actors: list[Any] = []
        for rank in range(1, size):
            where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
            options = {
                "num_cpus": each.num_cpus,
                "num_gpus": each.num_gpus,
                "resources": dict(each.resources),
            }
            self._actors.append(ray.remote(Rank).options(scheduling_strategy=where, **options).remote())
        self._ends = [
            actor.follow.remote(model, dtype, rank, size, self.address, self.port)
            for rank, actor in enumerate(self._actors, 1)
        ]

    async def joined(self, size: int, device: Any) -> Ranks:
        """Rank 0 among them. Raises what ends another rank before they have met, and as `Ranks.join` does."""
        meeting = asyncio.ensure_future(
            asyncio.to_thread(Ranks.join, 0, size, self.address, self.port, device)
        )
        while not (await asyncio.wait({meeting}, timeout=POLL_S))[0]:
            self.check()
        return meeting.result()

    def check(self) -> None:
        """Raises what ended a rank, or `WealdError(UNAVAILABLE)` when one ended without an error."""
        ended, _ = ray.wait(self._ends, num_returns=1, timeout=0)
        if ended:
            ray.get(ended)
            raise WealdError(ErrorCode.UNAVAILABLE, "a tensor-parallel rank has ended")
