"""The `weald` command: its own commands, joined to those that need no Ray."""

from services.cli.app import app


def main() -> None:
    """Run the command line."""
    app()
