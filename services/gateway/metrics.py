"""What Prometheus scrapes, under the names that people know from vLLM."""

import os
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from itertools import zip_longest

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
    multiprocess,
)

from services.gateway.choices import Figures, Piece
from services.gateway.requests import Job

SHARED = "PROMETHEUS_MULTIPROC_DIR"
"""Variable with the directory where several workers keep their values, so that each can tell those of all."""
_FIRST_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_NEXT_S = (
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1,
    2.5,
)
_WHOLE_S = (0.05, 0.1, 0.25, 0.5, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 60, 120, 240, 480)


class Metrics:
    """The counters, gauges and histograms of one worker."""

    media_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()

        def counter(name: str, what: str, *labels: str) -> Counter:
            return Counter(f"weald_{name}", what, labels, registry=registry)

        def gauge(name: str, what: str) -> Gauge:
            return Gauge(f"weald_{name}", what, registry=registry, multiprocess_mode="livesum")

        def seconds(name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"weald_{name}_seconds", what, registry=registry, buckets=buckets)

        self._success = counter("request_success", "Choices that came to their end.", "finish_reason")
        self._prompt_tokens = counter("prompt_tokens", "Tokens of prompts.")
        self._generation_tokens = counter("generation_tokens", "Tokens of answers.")
        self._first = seconds("time_to_first_token", "From a request to a choice's first tokens.", _FIRST_S)
        self._next = seconds("inter_token_latency", "From token to token, as parts of a round.", _NEXT_S)
        self._whole = seconds("e2e_request_latency", "From a request to the end of its answer.", _WHOLE_S)
        self._running = gauge("num_requests_running", "Requests that are served.")
        self._waiting = gauge("num_requests_waiting", "Requests that wait for their turn.")
        self._drafts = counter("spec_decode_num_drafts", "Rounds with a draft tree.")
        self._draft_tokens = counter("spec_decode_num_draft_tokens", "Draft tokens that were verified.")
        self._accepted = counter("spec_decode_num_accepted_tokens", "Draft tokens that were accepted.")
        self._per_position = counter(
            "spec_decode_num_accepted_tokens_per_pos", "Likewise, by depth in the tree, from 0.", "position"
        )

    def observe_load(self, running: int, waiting: int) -> None:
        """Tell how many requests are served and how many wait."""
        self._running.set(running)
        self._waiting.set(waiting)

    async def watched(
        self, job: Job, pieces: AsyncGenerator[tuple[int, Piece]], began: float
    ) -> AsyncGenerator[tuple[int, Piece]]:
        """The pieces of a job's choices as they are, and counted; it began then by `time.perf_counter`."""
        latest: dict[int, tuple[float, Figures]] = {}
        self._prompt_tokens.inc(sum(len(call.prompt) for call in job.calls[:: job.n]))
        async with aclosing(pieces):
            async for index, piece in pieces:
                now = time.perf_counter()
                before, known = latest.get(index, (began, None))
                latest[index] = now, piece.figures
                self._count(piece.figures, known, now - before)
                if piece.finish:
                    self._success.labels(piece.finish).inc()
                yield index, piece
        self._whole.observe(time.perf_counter() - began)

    def exposition(self) -> bytes:
        """All values as text; of all workers where they share them."""
        if SHARED not in os.environ:
            return generate_latest(self.registry)
        shared = CollectorRegistry()
        multiprocess.MultiProcessCollector(shared)  # type: ignore[no-untyped-call]
        return generate_latest(shared)

    def _count(self, figures: Figures, known: Figures | None, seconds: float) -> None:
        """What is new in the figures of a choice, which took so long to come."""

        def fresh(name: str) -> int:
            return int(getattr(figures, name) - getattr(known, name, 0))

        tokens = fresh("completion_tokens")
        self._generation_tokens.inc(tokens)
        if known is None:
            self._first.observe(seconds)
        else:
            for _ in range(tokens):
                self._next.observe(seconds / tokens)
        self._drafts.inc(fresh("tree_rounds"))
        self._draft_tokens.inc(fresh("verified"))
        self._accepted.inc(fresh("accepted"))
        depths = zip_longest(
            figures.accepted_per_position, known.accepted_per_position if known else (), fillvalue=0
        )
        for position, (now, before) in enumerate(depths):
            self._per_position.labels(position).inc(now - before)
