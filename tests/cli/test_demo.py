"""The comparison that `weald demo` shows, on a tiny random model."""

from io import StringIO
from typing import Any

from rich.console import Console

from services.cli.demo import MAX_TOKENS, QUESTION, show
from services.local.models import load


def test_the_demo_streams_answers_and_ends_with_a_table_that_compares_them(checkpoints: Any) -> None:
    models = load(
        str(checkpoints.target), str(checkpoints.head), speculative=True, device="cpu", dtype="float64"
    )
    shown = StringIO()
    show(models, Console(file=shown, width=100))
    lines = shown.getvalue().splitlines()
    assert lines[0] == QUESTION
    rows = [line.strip("│ ").split("│") for line in lines if line.startswith("│")]
    cells = [[cell.strip() for cell in row] for row in rows]
    assert [row[0] for row in cells] == [f"temperature {t}, {m}" for t in (0, 1) for m in ("plain", "trees")]
    for plain, trees in (cells[:2], cells[2:]):
        assert plain[1] == trees[1]
        assert 0 < int(plain[1]) <= MAX_TOKENS
        assert (plain[3], plain[5]) == ("–", "1.00")
        assert int(trees[2]) <= int(plain[2])
        assert trees[6] == "yes"
