"""`weald gateway` says what is wrong with its options, and is light where it does not serve."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]

SHOW_HELP = """
import sys
from services.cli.app import app

try:
    app(["gateway", "--help"])
except SystemExit as exit:
    assert not exit.code
print(*{name.partition(".")[0] for name in sys.modules})
"""


def test_its_help_is_shown_without_what_it_serves_with() -> None:
    finished = subprocess.run([sys.executable, "-c", SHOW_HELP], capture_output=True, text=True, check=True)
    assert "--endpoint" in finished.stdout
    loaded = set(finished.stdout.splitlines()[-1].split())
    assert not loaded & {"fastapi", "grpc", "ray", "tokenizers", "torch", "transformers", "uvicorn"}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], "name draft replicas with --endpoint, or the store that lists them with --store"),
        (["--store", "memory://"], "memory:// is known to one process alone"),
        (["--endpoint", "a:1", "--max-request-size", "much"], "'much' is no size of memory"),
        (["--endpoint", "a:1", "--request-timeout", "0"], "limits must be positive"),
        (["--endpoint", "a:1", "--tls-key", "key.pem"], "mutual TLS needs all of"),
        (["--endpoint", "a:1", "--api-key-file", "/no/such/file"], "/no/such/file cannot be read"),
        (["--endpoint", "a:1", "--host", "192.0.2.1"], "cannot listen at 192.0.2.1:8000"),
        (["--endpoint", "a:1", "--model", "/no/such/model"], "no model at '/no/such/model'"),
    ],
)
def test_options_that_cannot_be_are_refused_in_one_sentence(
    options: list[str], says: str, weald: Run, checkpoints: Any
) -> None:
    finished = weald("gateway", "--model", checkpoints.target, *options)
    assert finished.exit_code == 1
    assert finished.stderr.startswith("weald: ")
    assert finished.stderr.count("\n") == 1
    assert says in finished.stderr


def test_a_file_without_a_key_lets_nobody_in_by_accident(
    weald: Run, checkpoints: Any, tmp_path: Path
) -> None:
    (tmp_path / "keys").write_text(" \n\n")
    named = ("gateway", "--model", checkpoints.target, "--endpoint", "a:1")
    finished = weald(*named, "--api-key-file", tmp_path / "keys")
    assert finished.exit_code == 1
    assert "has no key" in finished.stderr


def test_workers_that_cannot_start_end_the_command(weald: Run, tmp_path: Path) -> None:
    finished = weald("gateway", "--model", tmp_path, "--endpoint", "a:1", "--port", 0, "--workers", 2)
    assert finished.exit_code == 1
    assert f"{tmp_path / 'tokenizer.json'} is missing" in finished.stderr
    assert "Traceback" not in finished.stderr
