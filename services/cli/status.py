"""`weald status`: what a running replica is and does, or which replicas a store lists."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from services.cli.options import Authority, Certificate, Key, mutual_tls, shared
from services.types.errors import WealdError
from services.types.messages import DraftStatus, VerifyStatus
from services.types.replica import Replica

if TYPE_CHECKING:
    from services.wire.transport import Tls

WITHIN_S = 5.0


def status(
    endpoint: Annotated[
        str,
        typer.Argument(
            metavar="HOST:PORT|URL", help="A verify or a draft replica, or a store like redis://…"
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    tls_certificate: Certificate = None,
    tls_key: Key = None,
    tls_authority: Authority = None,
) -> None:
    """Show a replica: its model, sessions, pages, and what it has counted; or all that a store lists."""
    if "://" in endpoint:
        _show(asyncio.run(_listed(shared(endpoint))), as_json)
        return
    found = asyncio.run(_ask(endpoint, mutual_tls(tls_certificate, tls_key, tls_authority)))
    kind = "verify" if isinstance(found, VerifyStatus) else "draft"
    facts: dict[str, Any] = {"service": kind} | asdict(found) | {"fingerprint": found.fingerprint.hex()}
    if as_json:
        typer.echo(json.dumps(facts))
        return
    table = Table(title=f"{kind} replica at {endpoint}", title_justify="left", show_header=False)
    for name, value in facts.items():
        nested = value.items() if isinstance(value, dict) else [("", value)]
        for key, one in nested:
            table.add_row(f"{name} {key}".strip().replace("_", " "), str(one))
    Console().print(table)


def _show(replicas: Sequence[Replica], as_json: bool) -> None:
    rows = [asdict(replica) | {"fingerprint": replica.fingerprint.hex()} for replica in replicas]
    if as_json:
        typer.echo(json.dumps({"replicas": rows}))
        return
    # What no replica says, like the name of a node, gets no column.
    names = [each.name for each in fields(Replica) if not rows or any(row[each.name] != "" for row in rows)]
    table = Table(*names, title="replicas that the store lists", title_justify="left")
    for row in rows:
        table.add_row(*(str(row[name]) for name in names))
    Console().print(table)


async def _listed(store: str) -> list[Replica]:
    from services.sessions.opening import opened
    from services.sessions.registry import everyone

    async with opened(store) as sessions:
        return await everyone(sessions)


async def _ask(endpoint: str, tls: "Tls | None") -> VerifyStatus | DraftStatus:
    from services.wire.channel import connect
    from services.wire.clients import DraftClient, VerifyClient

    async with connect(endpoint, tls) as channel:
        try:
            return await VerifyClient(channel).status(WITHIN_S)
        except WealdError as no_verifier:
            try:
                return await DraftClient(channel).status(WITHIN_S)
            except WealdError:
                raise no_verifier from None
