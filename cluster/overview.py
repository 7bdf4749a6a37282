"""What runs: replicas, their roles, nodes, load and sessions."""

import asyncio
from collections.abc import Sequence
from typing import Any

import ray
from rich.table import Table

from cluster.app import NAME
from cluster.launch import deployments, described
from services.sessions.opening import opened
from services.sessions.registry import everyone
from services.types.errors import WealdError
from services.types.replica import Replica, ReplicaKind
from services.wire.channel import connect
from services.wire.clients import DraftClient, VerifyClient
from services.wire.transport import Tls

ANSWER_S = 2.0


def overview() -> list[dict[str, Any]]:
    """A row for each replica: those that the registry lists as they answer, and those on their way.

    Raises:
        WealdError: `UNAVAILABLE` when no application runs.
    """
    config = described()
    names = {node["NodeID"]: node["NodeManagerHostname"] for node in ray.nodes()}  # type: ignore[no-untyped-call]
    rows = asyncio.run(_replicas(config.store, config.links))
    states = deployments()
    for role, deployment in states.items():
        listed = sum(row["role"] == role.lower() for row in rows)
        for state, count in deployment.replica_states.items():
            missing = count - listed if state == "RUNNING" else count
            rows += [_row(role.lower(), "", "", state.lower())] * max(0, missing)
    return [
        row | {"node": names.get(row["node"], row["node"])} for row in sorted(rows, key=lambda r: r["role"])
    ]


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """The rows for people."""
    shown = Table(title=NAME, title_justify="left")
    for name in rows[0]:
        shown.add_column(name)
    for row in rows:
        shown.add_row(*map(str, row.values()))
    return shown


async def _replicas(store: str, tls: Tls | None) -> list[dict[str, Any]]:
    async with opened(store) as sessions:
        listed = await everyone(sessions)
    return list(await asyncio.gather(*(_asked(replica, tls) for replica in listed)))


async def _asked(replica: Replica, tls: Tls | None) -> dict[str, Any]:
    state = "draining" if replica.draining else "running"
    row = _row(str(replica.kind), replica.address, replica.node, state, str(replica.sessions))
    if replica.kind is ReplicaKind.GATEWAY:
        return row
    async with connect(replica.address, tls) as channel:
        try:
            if replica.kind is ReplicaKind.VERIFY:
                told = await VerifyClient(channel).status(ANSWER_S)
                used = 1 - told.load.free_pages / told.num_pages
                return row | {
                    "load": f"{told.load.running} running, {told.load.waiting} waiting, {used:.0%} of pages"
                }
            drafter = await DraftClient(channel).status(ANSWER_S)
            used = 1 - drafter.free_pages / drafter.num_pages
            return row | {"load": f"{drafter.running} running, {used:.0%} of pages"}
        except WealdError:
            return row | {"state": "does not answer"}


def _row(role: str, address: str, node: str, state: str, sessions: str = "") -> dict[str, Any]:
    return {"role": role, "state": state, "address": address, "node": node, "sessions": sessions, "load": ""}
