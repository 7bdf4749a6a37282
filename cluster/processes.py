"""Processes, all that they have started, and their processor time; Linux counts it to the nanosecond."""

import os
import time
from collections.abc import Collection, Iterable
from pathlib import Path

SERVICES = ("verify", "draft", "gateway", "redis")
RAYS_OWN = ("controller", "proxy", "gcs", "raylet", "others")
"""The others are agents and monitors, and the driver."""
_SIGNS = {
    "ray::ServeReplica:weald:Verify": "verify",
    "ray::ServeReplica:weald:Draft": "draft",
    "ray::ServeReplica:weald:Gateway": "gateway",
    "redis-server": "redis",
    "ray::ServeController": "controller",
    "ray::ProxyActor": "proxy",
    "/gcs_server ": "gcs",
    "/raylet ": "raylet",
}
"""What stands in the command line."""


def tree(pid: int, without: Collection[int] = ()) -> list[int]:
    """A process and all that it has started, directly or not, except some and what these have started."""
    found, left = [], [pid]
    while left:
        one = left.pop()
        found.append(one)
        left += [child for child in _children(one) if child not in without]
    return found


def seconds(pids: Iterable[int]) -> dict[int, float]:
    """Processor seconds so far, of those that still run; the thread that asks is left out of its process."""
    counted = {}
    for pid in pids:
        try:
            # Linux makes the clock of a process from its id: see clock_getcpuclockid(3).
            counted[pid] = time.clock_gettime((~pid << 3) | 2)
            if pid == os.getpid():
                counted[pid] -= time.thread_time()
        except OSError:
            continue
    return counted


def part(pid: int) -> str:
    """Which part of an application on Ray a process is: one of `SERVICES` or `RAYS_OWN`."""
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        line = ""
    return next((name for sign, name in _SIGNS.items() if sign in line), RAYS_OWN[-1])


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += map(int, listed.read_text().split())
        except OSError:
            continue
    return found
