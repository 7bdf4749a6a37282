"""What a verify replica tells Prometheus."""

from collections.abc import Iterator

from services.telemetry import names
from services.telemetry.metrics import Reading
from services.verify.service import VerifyService

COUNTERS = {
    "trees_verified": names.DRAFTS,
    "draft_tokens": names.DRAFT_TOKENS,
    "accepted_tokens": names.ACCEPTED_TOKENS,
    "offered_nodes": names.OFFERED,
    "plain_steps": names.PLAIN_STEPS,
    "stale_trees": names.STALE_TREES,
    "missed_trees": names.MISSED_TREES,
    "shrunk_trees": names.SHRUNK_TREES,
    "steps": names.STEPS,
    "tokens_forwarded": names.TOKENS_FORWARDED,
    "tokens_prefilled": names.TOKENS_PREFILLED,
    "prefix_hit_tokens": names.PREFIX_HITS,
    "preemptions": names.PREEMPTIONS,
    "expired_sessions": names.EXPIRED,
}
"""Counters of `weald status`, as Prometheus knows them."""
SECONDS = {"step_ns": names.STEP_TIME, "forward_ns": names.FORWARD_TIME, "loop_lag_ns": names.LOOP_LAG}
PER_POSITION = "accepted_at_"


def readings(service: VerifyService) -> Iterator[Reading]:
    """All values now."""
    counters, load = service.counters(), service.load()
    for name, metric in COUNTERS.items():
        yield Reading(metric, counters.get(name, 0))
    for name, metric in SECONDS.items():
        yield Reading(metric, counters.get(name, 0) / 1e9)
    for name, count in counters.items():
        if name.startswith(PER_POSITION):
            yield Reading(names.ACCEPTED_PER_POSITION, count, {"position": name.removeprefix(PER_POSITION)})
    for tokens, seconds in service.cost().items():
        yield Reading(names.STEP_COST, seconds, {"tokens": str(tokens)})
    yield Reading(names.RATE, service.rate())
    yield Reading(names.RUNNING, load.running)
    yield Reading(names.WAITING, load.waiting)
    yield Reading(names.KV_USAGE, 1 - load.free_pages / service.verifier.pool.num_pages)
