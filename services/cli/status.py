"""`weald status`: what a running replica is and does."""

import asyncio
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from services.cli.options import Authority, Certificate, Key, mutual_tls
from services.types.errors import WealdError
from services.types.messages import DraftStatus, VerifyStatus

if TYPE_CHECKING:
    from services.wire.transport import Tls

WITHIN_S = 5.0


def status(
    endpoint: Annotated[str, typer.Argument(metavar="HOST:PORT", help="A verify or a draft replica.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    tls_certificate: Certificate = None,
    tls_key: Key = None,
    tls_authority: Authority = None,
) -> None:
    """Show a replica: its model, sessions, pages, and what it has counted."""
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
