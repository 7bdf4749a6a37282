"""The commands that need no Ray. Each imports what it needs when it runs, so `weald --help` is instant."""

import sys
import warnings
from typing import Any

import typer
from typer.core import TyperGroup

from services.cli.bench import bench
from services.cli.draft import draft
from services.cli.gateway import gateway
from services.cli.generate import generate
from services.cli.simulate import simulate
from services.cli.store import store
from services.cli.trace import trace
from services.cli.train_head import train_head
from services.cli.verify import verify
from services.types.errors import WealdError


class _Commands(TyperGroup):
    """Tells the user about errors in their one sentence, and keeps to itself what third parties warn of."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was asked for."""
        with warnings.catch_warnings():
            if not sys.warnoptions:
                warnings.simplefilter("ignore")
            try:
                return super().invoke(ctx)
            except WealdError as error:
                typer.echo(f"weald: {error.message}", err=True)
                raise typer.Exit(1) from error


app = typer.Typer(
    name="weald",
    cls=_Commands,
    help="EAGLE-2 speculative decoding as distributed services.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command()(generate)
app.command()(verify)
app.command()(draft)
app.command()(gateway)
app.command()(store)
app.command()(train_head)
app.add_typer(bench)
app.add_typer(simulate)
app.add_typer(trace)
