"""The six question sets of the EAGLE papers, read from where the user keeps them."""

import json
from itertools import zip_longest
from pathlib import Path

from services.types.errors import invalid

PROMPTS = (
    "Explain why the sky is blue.",
    "Write a short story about a lighthouse keeper.",
    "List five uses for a paper clip.",
    "What is the difference between a virus and a bacterium?",
)
"""What is asked when no question sets are given."""


def read_questions(directory: Path, limit: int | None) -> dict[str, list[str]]:
    """First turns by task, from every `TASK.jsonl` of objects with `turns`.

    Args:
        directory: holds the files.
        limit: questions of each task, evenly spread over the file; None for all.

    Raises:
        WealdError: `INVALID_ARGUMENT` when there is none.
    """
    tasks = {}
    for file in sorted(directory.glob("*.jsonl")):
        turns = [json.loads(line)["turns"][0] for line in file.read_text().splitlines() if line]
        count = len(turns) if limit is None else min(limit, len(turns))
        tasks[file.stem] = [turns[i * len(turns) // count] for i in range(count)]
    if not tasks:
        raise invalid(f"{directory} holds no question sets; give a directory of TASK.jsonl files")
    return tasks


def some_prompts(directory: Path | None, count: int) -> list[str]:
    """So many first turns, from all question sets alike; without a directory, `PROMPTS` over and over."""
    if directory is None:
        return [PROMPTS[i % len(PROMPTS)] for i in range(count)]
    tasks = read_questions(directory, -(-count // 2))
    turns = [turn for same in zip_longest(*tasks.values()) for turn in same if turn is not None]
    return [turns[i % len(turns)] for i in range(count)]
