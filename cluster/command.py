"""The `weald` command: its own commands, joined to those that need no Ray."""

from cluster import benchmarks
from cluster.commands import check, demo, drain, manifest, scale, serve, status
from services.cli.app import app
from services.cli.bench import bench

for command in (serve, check, scale, status, manifest, drain, demo):
    app.command()(command)
for benchmark in (benchmarks.scale, benchmarks.ray):
    bench.command()(benchmark)


def main() -> None:
    """Run the command line."""
    app()
