"""What the README promises is shown by a test of that name."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_test_that_the_readme_names_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "README.md").read_text()))
    sources = "\n".join(file.read_text() for file in Path(__file__).parent.rglob("test_*.py"))
    assert len(named) > 10
    assert named <= set(re.findall(r"^(?:async )?def (test_\w+)", sources, re.MULTILINE))
