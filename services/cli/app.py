"""The commands that need no Ray. Each imports what it needs when it runs, so `weald --help` is instant."""

import typer

app = typer.Typer(
    name="weald",
    help="EAGLE-2 speculative decoding as distributed services.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
