"""How many replicas of a kind there are: a rule over their own loads, which Ray Serve asks again and again.

Serve copies this module to where it is asked, so nothing of Weald can be imported here.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

LOAD = "load"
"""What replicas call their load in what they report."""
MARGIN = 0.85
"""A replica goes only when the others then stay so far below the load aimed at, lest it be missed at once."""
_PATIENCE = "patience"
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Aims:
    """What the number of replicas is to achieve."""

    target_load: float
    """Of each replica; 1.0 is all that it can take."""
    upscale_delay_s: float
    """So long more replicas must be wanted before they come."""
    downscale_delay_s: float
    """So long fewer must do before one goes."""


@dataclass(frozen=True)
class Observed:
    """The replicas of one kind at one moment."""

    loads: Sequence[float]
    """Of those that have reported; above 1.0 work waits."""
    running: int
    """Replicas that are there, whether they have reported or not."""
    target: int
    """Replicas that there are to be, by the last decision."""
    least: int
    most: int
    now: float
    """Seconds, by any one clock."""


@dataclass(frozen=True)
class Patience:
    """What has been wanted without a break, and since when."""

    more_since: float | None = None
    more: int = 0
    """The least number of replicas wanted since then."""
    fewer_since: float | None = None


def decide(aims: Aims, observed: Observed, before: Patience) -> tuple[int, Patience]:
    """How many replicas there are to be.

    What has come due takes effect at once: as many more as have been wanted all the time, but only one less.
    Replicas that have not reported yet are capacity on its way; as long as one of those that are there has
    not, none goes.

    Args:
        aims: of this kind.
        observed: now.
        before: from the last time.
    """
    current = min(max(observed.target, observed.least), observed.most)
    load = sum(observed.loads)
    wanted = min(math.ceil(load / aims.target_load - _ROUNDING), observed.most)
    if wanted > current:
        since = _since(before.more_since, observed.now)
        if before.more_since is not None:
            wanted = max(min(wanted, before.more), current + 1)
        if observed.now - since >= aims.upscale_delay_s:
            return wanted, Patience()
        return current, Patience(more_since=since, more=wanted)
    known = len(observed.loads) >= observed.running > 0
    if known and current > observed.least and load <= MARGIN * aims.target_load * (current - 1):
        since = _since(before.fewer_since, observed.now)
        if observed.now - since >= aims.downscale_delay_s:
            return current - 1, Patience()
        return current, Patience(fewer_since=since)
    return current, Patience()


def _since(before: float | None, now: float) -> float:
    """When it began; a clock that was set back begins anew."""
    return now if before is None else min(before, now)


class LoadPolicy:
    """`decide` as an autoscaling policy of Serve, which keeps what it has to remember.

    Serve applies the delays of its own configuration on top: they have to be 0.
    """

    def __init__(self, target_load: float, upscale_delay_s: float, downscale_delay_s: float) -> None:
        self._aims = Aims(target_load, upscale_delay_s, downscale_delay_s)

    def __call__(self, context: "AutoscalingContext") -> tuple[int, dict[str, Any]]:
        """The number of replicas, and what is to be remembered until the next time."""
        assert context.current_time is not None
        observed = Observed(
            loads=list((context.aggregated_metrics or {}).get(LOAD, {}).values()),
            running=context.current_num_replicas,
            target=context.target_num_replicas,
            least=context.capacity_adjusted_min_replicas,
            most=context.capacity_adjusted_max_replicas,
            now=context.current_time,
        )
        wanted, patience = decide(self._aims, observed, context.policy_state.get(_PATIENCE, Patience()))
        return wanted, {_PATIENCE: patience}


def verify_load(
    *,
    running: int,
    waiting: int,
    max_num_seqs: int,
    free_pages: int,
    num_pages: int,
    tokens_per_step: float,
    max_num_batched_tokens: int,
) -> float:
    """The load of a verify replica, 1.0 being all it can take: the largest of what it may run short of.

    That is its places for sessions, its KV pages, and the tokens of a step. Sessions that wait count as if
    they ran, with as many pages as those that do.

    Args:
        running: sessions that run.
        waiting: sessions that wait for a place or for pages.
        max_num_seqs: sessions that run at once.
        free_pages: KV pages that no session holds.
        num_pages: all KV pages.
        tokens_per_step: mean over the latest steps; 0.0 when there was none.
        max_num_batched_tokens: tokens of one step at most.
    """
    sessions = running + waiting
    pages = (num_pages - free_pages) / num_pages * sessions / max(running, 1)
    return max(sessions / max_num_seqs, pages, tokens_per_step / max_num_batched_tokens)


def draft_load(sessions: int, max_num_seqs: int, busy_share: float) -> float:
    """The load of a draft replica, 1.0 being all it can take.

    Args:
        sessions: open ones.
        max_num_seqs: sessions at once.
        busy_share: of the latest time, how much the head was at work.
    """
    return max(sessions / max_num_seqs, busy_share)
