"""The command line, in this process and as one of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from cluster.command import app

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def weald() -> Callable[..., Result]:
    """`weald(*arguments, input=…)` runs the command line in this process."""
    runner = CliRunner()

    def run(*arguments: object, input: str | bytes | None = None) -> Result:
        return runner.invoke(app, [str(a) for a in arguments], input=input)

    return run


@pytest.fixture(scope="session")
def generate(weald: Callable[..., Result], checkpoints: Any) -> Callable[..., dict[str, Any]]:
    """`generate(*arguments, input=…)` is the object that `weald generate --json` prints."""

    def run(*arguments: object, input: str | bytes | None = None) -> dict[str, Any]:
        whole = ("--speculative-budget", 60, "--speculative-num-steps", 6)
        finished = weald("generate", *checkpoints.options("--json", *whole, *arguments), input=input)
        assert finished.exit_code == 0, finished.output
        printed: dict[str, Any] = json.loads(finished.stdout)
        return printed

    return run


@pytest.fixture(scope="session")
def spawn() -> Callable[..., subprocess.CompletedProcess[str]]:
    """`spawn(*arguments)` runs the command as a process of its own."""

    def run(*arguments: object, prelude: str = "") -> subprocess.CompletedProcess[str]:
        script = f"from cluster.command import main; {prelude}main()"
        path = os.pathsep.join([str(ROOT), str(ROOT / "protos")])
        return subprocess.run(
            [sys.executable, "-c", script, *map(str, arguments)],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )

    return run
