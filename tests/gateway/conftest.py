"""Checkpoints with small tokenizers of the kinds that language models use."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from services.gateway.tokenizer import Tokenizer

SPECIAL = ["<|bos|>", "<|im_start|>", "<|im_end|>"]
PIECES = ["▁", "▁the", "▁of", "th", "e", "a", "o", "f", "t", "h", "▁a", "y", "▁▁", ".", "日", "\ufffd"]

Write = Callable[..., Path]


def byte_level() -> tokenizers.Tokenizer:
    """As GPT-2, Llama 3 and Qwen have it: any byte is a token, so characters split anywhere."""
    core = tokenizers.Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    lines = ["the forest of the trees", "日本語の木、日本の森", "trees 🌲🌲🌳 and 👩‍🌾", "naïve café"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    core.train_from_iterator(lines, trainer)
    core.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    core.add_tokens(["<think>", "木é"])
    core.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", core.token_to_id("<|bos|>"))]
    )
    return core


def byte_fallback() -> tokenizers.Tokenizer:
    """As Llama 2 and Mistral have it: pieces with a visible space, bytes for what has no piece."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    merges = [("t", "h")]
    vocabulary = {name: index for index, name in enumerate(names)}
    core = tokenizers.Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    core.add_special_tokens(["<unk>", "<s>", "</s>"])
    return core


def metaspace() -> tokenizers.Tokenizer:
    """As T5 has it: unigram pieces, and a decoder that drops the first space."""
    core = tokenizers.Tokenizer(
        models.Unigram([("<unk>", 0.0), *((piece, -1.0) for piece in PIECES)], 0, False)
    )
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoders.Metaspace()
    core.add_special_tokens(["</s>"])
    return core


def word_pieces() -> tokenizers.Tokenizer:
    """As BERT has it: the decoder puts spaces between words and joins what continues one."""
    names = ["[UNK]", "the", "tree", "##s", "##es", ".", ",", "'", "do", "n't"]
    core = tokenizers.Tokenizer(models.WordPiece({name: index for index, name in enumerate(names)}))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.decoder = decoders.WordPiece()
    core.add_special_tokens(["[UNK]"])
    return core


KINDS = {kind.__name__: kind for kind in (byte_level, byte_fallback, metaspace, word_pieces)}


def write_checkpoint(directory: Path, core: tokenizers.Tokenizer, **files: Mapping[str, object]) -> Path:
    """Write `core` and the JSON files named by the keywords into `directory`."""
    core.save(str(directory / "tokenizer.json"))
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return directory


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a byte-level checkpoint with the JSON files named by the keywords; return its folder."""
    return lambda **files: write_checkpoint(tmp_path, byte_level(), **files)


@pytest.fixture(scope="session", params=KINDS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a checkpoint with a tokenizer of each kind."""
    directory = tmp_path_factory.mktemp("checkpoint")
    return write_checkpoint(directory, KINDS[request.param](), config={"eos_token_id": 2})


@pytest.fixture(scope="session")
def tokenizer(checkpoint: Path) -> Tokenizer:
    """A tokenizer of each kind."""
    return Tokenizer.load(checkpoint)
