"""The `weald` command: its own commands, joined to those that need no Ray."""

from cluster.commands import check, demo, scale, serve, status
from services.cli.app import app

for command in (serve, check, scale, status, demo):
    app.command()(command)


def main() -> None:
    """Run the command line."""
    app()
