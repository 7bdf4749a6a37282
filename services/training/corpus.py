"""What a head learns from: token sequences of dialogues and of plain text."""

import gzip
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from services.gateway.tokenizer import Tokenizer
from services.types.errors import invalid

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py")


@dataclass(frozen=True, slots=True)
class Sequences:
    """Token sequences laid end to end."""

    tokens: Tensor
    """int64 `[N]`."""
    starts: Tensor
    """First token of each sequence, then N: int64 `[sequences + 1]`."""

    def __len__(self) -> int:
        return len(self.starts) - 1

    def lengths(self) -> Tensor:
        """Tokens of each sequence, int64 `[sequences]`."""
        return self.starts.diff()


def read_corpus(paths: Sequence[Path], tokenizer: Tokenizer, max_length: int) -> Sequences:
    """Read corpora in a fixed order.

    Args:
        paths: `.jsonl` or `.jsonl.gz` files of objects with `ids` (token ids of a dialogue, chat template
            included), text files (`.txt .md .rst .py`, cut into pieces), or directories of such files.
        tokenizer: the target's.
        max_length: tokens of a sequence at most; the rest of a dialogue is dropped, text goes on in the next.

    Raises:
        WealdError: `INVALID_ARGUMENT` for an unreadable or empty corpus.
    """
    sequences: list[list[int]] = []
    for path in paths:
        for file in _files(path):
            try:
                sequences.extend(_read(file, tokenizer, max_length))
            except (OSError, ValueError, KeyError) as error:
                raise invalid(f"the corpus {file} cannot be read: {error}") from error
    kept = [s for s in sequences if len(s) > 1]
    if not kept:
        raise invalid(f"no sequences of two tokens or more in {', '.join(map(str, paths))}")
    starts = torch.tensor([0, *(len(s) for s in kept)]).cumsum(0)
    return Sequences(torch.tensor([t for s in kept for t in s]), starts)


def draft_vocabulary(tokens: Tensor, size: int, always: Iterable[int]) -> Tensor:
    """The most frequent tokens of a corpus as a draft vocabulary, int64 `[size]`, ascending.

    Args:
        tokens: int64 `[N]`.
        size: tokens to choose; fewer when the corpus has fewer.
        always: tokens that belong to it whatever their count, such as the ends of a text.
    """
    counts = Counter(tokens.tolist())
    first = list(dict.fromkeys(always))
    rest = (token for token, _ in counts.most_common() if token not in set(first))
    return torch.tensor(sorted([*first, *rest][:size]))


def _files(path: Path) -> Iterator[Path]:
    if not path.is_dir():
        yield path
        return
    for file in sorted(path.rglob("*")):
        if file.is_file() and (file.suffix in TEXT_SUFFIXES or ".jsonl" in file.suffixes):
            yield file


def _read(file: Path, tokenizer: Tokenizer, max_length: int) -> Iterator[list[int]]:
    if ".jsonl" in file.suffixes:
        opener = gzip.open if file.suffix == ".gz" else open
        with opener(file, "rt", encoding="utf-8") as lines:
            for line in lines:
                yield json.loads(line)["ids"][:max_length]
        return
    ids = tokenizer.encode(file.read_text(encoding="utf-8", errors="replace"), special=False)
    for start in range(0, len(ids), max_length):
        yield ids[start : start + max_length]
