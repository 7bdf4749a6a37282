"""Pages that need nothing besides themselves."""

from pathlib import Path

TREE = Path(__file__).with_name("tree.js")
"""Draws a draft tree."""


def filled(page: Path, **parts: str) -> str:
    """A page with its parts in place: each stands where `/* its name */` does."""
    text = page.read_text()
    for name, part in {"tree": TREE.read_text(), **parts}.items():
        text = text.replace(f"/* {name} */", part)
    return text
