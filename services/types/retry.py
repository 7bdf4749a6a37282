"""Pauses between attempts."""

import random
from collections.abc import Iterator


def backoff(first_s: float, last_s: float) -> Iterator[float]:
    """Seconds to wait before each further attempt: they double up to `last_s`, with jitter, without end."""
    pause_s = first_s
    while True:
        yield pause_s * random.uniform(0.5, 1.0)
        pause_s = min(2 * pause_s, last_s)
