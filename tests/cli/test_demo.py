"""The comparison that `weald demo` shows, on a tiny random model."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import StringIO
from typing import Any

import pytest
from rich.console import Console
from typer.testing import Result

from services.bench.replicas import WHOLE_TREES, both_services, replica
from services.cli.demo import MAX_TOKENS, QUESTION, compare


@pytest.mark.slow
def test_the_demo_streams_answers_over_http_and_ends_with_a_table_that_compares_them(
    checkpoints: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What others keep in the environment does not come between the demo and its gateway.
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    shown = StringIO()
    target = str(checkpoints.target)

    @contextmanager
    def service() -> Iterator[str]:
        with (
            both_services(target, str(checkpoints.head), "float64", *WHOLE_TREES) as (_, drafter),
            replica("gateway", "--model", target, "--port", 0, "--endpoint", drafter.address) as gateway,
        ):
            yield f"http://{gateway.address}"

    compare(service(), target, Console(file=shown, width=100))
    lines = shown.getvalue().splitlines()
    assert lines[0] == QUESTION
    for temperature in (0, 1):
        assert lines[lines.index(f"temperature {temperature}, with draft trees") + 1]
    rows = [line.strip("│ ").split("│") for line in lines if line.startswith("│")]
    cells = [[cell.strip() for cell in row] for row in rows]
    assert [row[0] for row in cells] == [f"temperature {t}, {m}" for t in (0, 1) for m in ("plain", "trees")]
    for plain, trees in (cells[:2], cells[2:]):
        assert plain[1] == trees[1]
        assert 0 < int(plain[1]) <= MAX_TOKENS
        assert (plain[3], plain[5]) == ("–", "1.00")
        assert int(trees[2]) <= int(plain[2])
        assert trees[6] == "yes"


def test_without_the_openai_package_the_demo_says_how_to_get_it(
    weald: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "openai", None)
    finished = weald("demo")
    assert finished.exit_code == 1
    assert "pip install openai" in finished.output
