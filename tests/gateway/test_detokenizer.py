from collections.abc import Sequence
from itertools import chain, pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.detokenizer import Detokenizer
from services.gateway.tokenizer import Tokenizer

byte_level = pytest.mark.parametrize("checkpoint", ["byte_level"], indirect=True)
byte_fallback = pytest.mark.parametrize("checkpoint", ["byte_fallback"], indirect=True)

TEXTS = st.text("the of.日本語木🌲𐍈👩‍🌾é\ufffd\n", max_size=30)


def pushed(tokenizer: Tokenizer, chunks: Sequence[Sequence[int]]) -> list[str]:
    """What each push brings, and last what the flush does."""
    detokenizer = Detokenizer(tokenizer)
    return [*map(detokenizer.push, chunks), detokenizer.flush()]


def one_by_one(tokenizer: Tokenizer, text: str) -> list[str]:
    return pushed(tokenizer, [[token] for token in tokenizer.encode(text)])


def streams(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Random tokens, special and unknown ones among them, mixed with the tokens of real text."""
    token = st.integers(0, tokenizer.vocab_size + 2).map(lambda token: [token])
    return st.lists(token | TEXTS.map(tokenizer.encode)).map(lambda parts: list(chain.from_iterable(parts)))


@given(data=st.data())
def test_the_pieces_make_up_the_whole_text(tokenizer: Tokenizer, data: st.DataObject) -> None:
    tokens = data.draw(streams(tokenizer))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(tokens)))))
    chunks = [tokens[start:end] for start, end in pairwise([0, *cuts, len(tokens)])]
    assert "".join(pushed(tokenizer, chunks)) == tokenizer.decode(tokens)


@given(data=st.data())
def test_text_that_is_out_never_changes(tokenizer: Tokenizer, data: st.DataObject) -> None:
    tokens = data.draw(streams(tokenizer))
    detokenizer = Detokenizer(tokenizer)
    out = ""
    for count, token in enumerate(tokens, start=1):
        out += detokenizer.push([token])
        assert tokenizer.decode(tokens[:count]).startswith(out)
    assert tokenizer.decode(tokens).startswith(out)


@given(data=st.data())
def test_half_a_character_is_never_sent(tokenizer: Tokenizer, data: st.DataObject) -> None:
    text = data.draw(TEXTS)
    known = tokenizer.decode(tokenizer.encode(text))
    sent = "".join(one_by_one(tokenizer, text))
    assert sent.count("\ufffd") == known.count("\ufffd") <= text.count("\ufffd")


@byte_level
def test_an_emoji_split_across_tokens_comes_whole_with_its_last_one(tokenizer: Tokenizer) -> None:
    assert one_by_one(tokenizer, "a🐟.") == ["", "a", "", "", "🐟", ".", ""]
    assert one_by_one(tokenizer, "a𐍈.") == ["", "a", "", "", "", "𐍈", ".", ""]


@byte_level
@given(data=st.data())
def test_only_an_unfinished_character_is_held_back(tokenizer: Tokenizer, data: st.DataObject) -> None:
    tokens = data.draw(streams(tokenizer))
    detokenizer = Detokenizer(tokenizer)
    out = ""
    for count, token in enumerate(tokens, start=1):
        out += detokenizer.push([token])
        assert out == tokenizer.decode(tokens[:count]).removesuffix("\ufffd")


@byte_level
def test_special_tokens_inside_a_character_leave_no_trace(tokenizer: Tokenizer) -> None:
    first, *rest = tokenizer.encode("🐟", special=False)
    special = min(tokenizer.special_ids)
    assert pushed(tokenizer, [[special, first], [special], rest, [special]]) == ["", "", "🐟", "", ""]


@byte_level
def test_a_text_that_ends_inside_a_character_ends_with_a_replacement_character(tokenizer: Tokenizer) -> None:
    first, *_ = tokenizer.encode("🐟", special=False)
    assert pushed(tokenizer, [[first]]) == ["", "\ufffd"]


@byte_fallback
def test_a_run_of_fallback_bytes_is_held_until_it_ends(tokenizer: Tokenizer) -> None:
    assert one_by_one(tokenizer, "木a") == ["", "", "", "", "木a", ""]
    assert one_by_one(tokenizer, "木") == ["", "", "", "", "木"]


@byte_fallback
def test_one_bad_byte_spoils_its_whole_run(tokenizer: Tokenizer) -> None:
    tree = tokenizer.encode("木")[1:]
    letter = tokenizer.encode("木a")[-1]
    assert pushed(tokenizer, [[letter, *tree], [min(tokenizer.byte_ids) + 255], [letter]]) == [
        "a",
        "",
        "\ufffd\ufffd\ufffd\ufffda",
        "",
    ]


@pytest.mark.parametrize("checkpoint", ["byte_fallback", "metaspace"], indirect=True)
def test_only_the_first_space_is_dropped(tokenizer: Tokenizer) -> None:
    assert "".join(one_by_one(tokenizer, "the of the")) == "the of the"


class CountingTokenizer(Tokenizer):
    """Counts the tokens that it decodes."""

    decoded = 0

    def decode(self, token_ids: Sequence[int], skip_special: bool = True) -> str:
        self.decoded += len(token_ids)
        return super().decode(token_ids, skip_special)


@settings(max_examples=20)
@given(data=st.data())
def test_the_work_per_token_does_not_grow_with_the_text(checkpoint: Path, data: st.DataObject) -> None:
    tokenizer = CountingTokenizer.load(checkpoint)
    tokens = data.draw(streams(tokenizer)) or [0]
    tokens *= 1000 // len(tokens)
    pushed(tokenizer, [[token] for token in tokens])
    assert tokenizer.decoded <= 10 * len(tokens)
