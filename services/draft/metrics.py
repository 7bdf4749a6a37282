"""What a draft replica tells Prometheus."""

from collections.abc import Iterator

from services.draft.service import DraftService
from services.telemetry import names
from services.telemetry.metrics import Reading

COUNTERS = {
    "trees_drafted": names.TREES,
    "trees_coupled": names.TREES_COUPLED,
    "tokens_forwarded": names.TOKENS_FORWARDED,
    "nodes_decided": names.NODES_DECIDED,
    "retired_sessions": names.RETIRED,
    "recovered_sessions": names.RECOVERED,
    "handed_over_sessions": names.HANDED_OVER,
    "fenced_sessions": names.FENCED,
    "journal_writes": names.JOURNAL_WRITES,
    "journal_tokens": names.JOURNAL_TOKENS,
    "journal_failures": names.JOURNAL_FAILURES,
    "journal_backlog_tokens": names.JOURNAL_BACKLOG,
}
"""Counters of `weald status`, as Prometheus knows them."""


def readings(service: DraftService) -> Iterator[Reading]:
    """All values now."""
    counters, pool = service.counters(), service.drafter.pool
    for name, metric in COUNTERS.items():
        yield Reading(metric, counters.get(name, 0))
    yield Reading(names.DRAFT_TIME, counters.get("draft_ns", 0) / 1e9)
    for rows, seconds in service.drafter.passes.curve():
        yield Reading(names.PASS_COST, seconds, {"rows": str(rows)})
    for told in service.reliability():
        yield Reading(names.CALIBRATION_ERROR, told.error, {"band": str(told.band)})
    yield Reading(names.RUNNING, len(service))
    yield Reading(names.KV_USAGE, 1 - pool.free_pages / pool.num_pages)
    yield Reading(names.VERIFIERS, sum(map(service.serves, list(service.links.values()))))
