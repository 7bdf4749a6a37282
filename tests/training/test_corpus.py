import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from services.training.corpus import draft_vocabulary, read_corpus
from services.types.errors import WealdError


def test_dialogues_and_text_are_read_in_a_fixed_order_and_cut_to_length(
    checkpoints: Any, tmp_path: Path
) -> None:
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as lines:
        lines.write(json.dumps({"prompt_len": 1, "ids": [3, 4, 5, 6, 7]}) + "\n")
        lines.write(json.dumps({"ids": [8]}) + "\n")
    (tmp_path / "b.txt").write_text("abcab")
    (tmp_path / "ignored.bin").write_bytes(b"\xff")
    corpus = read_corpus([tmp_path], checkpoints.tokenizer, 4)
    pieces = [corpus.tokens[a:b].tolist() for a, b in zip(corpus.starts, corpus.starts[1:], strict=False)]
    text = checkpoints.tokenizer.encode("abcab", special=False)
    assert pieces == [[3, 4, 5, 6], text[:4]]


def test_a_corpus_without_text_or_of_another_form_is_refused_by_name(
    checkpoints: Any, tmp_path: Path
) -> None:
    with pytest.raises(WealdError, match="no sequences"):
        read_corpus([tmp_path], checkpoints.tokenizer, 4)
    (tmp_path / "bad.jsonl").write_text('{"tokens": [1]}\n')
    with pytest.raises(WealdError, match=r"bad\.jsonl cannot be read"):
        read_corpus([tmp_path], checkpoints.tokenizer, 4)
    with pytest.raises(WealdError, match=r"missing\.txt cannot be read"):
        read_corpus([tmp_path / "missing.txt"], checkpoints.tokenizer, 4)


def test_the_draft_vocabulary_is_the_most_frequent_tokens_with_the_ends_among_them() -> None:
    tokens = torch.tensor([5, 5, 5, 9, 9, 1, 1, 1, 1, 3])
    assert draft_vocabulary(tokens, 3, always=[7]).tolist() == [1, 5, 7]
    assert draft_vocabulary(tokens, 99, always=[7]).tolist() == [1, 3, 5, 7, 9]
