from collections.abc import Sequence
from itertools import chain, pairwise
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from services.gateway.detokenizer import Detokenizer
from services.gateway.tokenizer import Tokenizer

byte_level = pytest.mark.parametrize("checkpoint", ["byte_level"], indirect=True)
byte_fallback = pytest.mark.parametrize("checkpoint", ["byte_fallback"], indirect=True)

TEXTS = st.text("the of.日本語木🌲𐍈👩‍🌾ée\u0301\u0300🇯🇵한\ufffd\n", max_size=30)
"""Characters of one to four bytes; combining ones, joiners and flags among them."""


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


@given(data=st.data())
def test_no_replacement_character_comes_that_the_whole_text_has_not(
    tokenizer: Tokenizer, data: st.DataObject
) -> None:
    tokens = data.draw(streams(tokenizer))
    pieces = pushed(tokenizer, [[token] for token in tokens])
    assert sum(piece.count("\ufffd") for piece in pieces) == tokenizer.decode(tokens).count("\ufffd")


@given(data=st.data())
def test_what_a_token_reveals_of_those_before_it_is_told_apart_from_its_own_text(
    tokenizer: Tokenizer, data: st.DataObject
) -> None:
    tokens = data.draw(streams(tokenizer))
    detokenizer = Detokenizer(tokenizer)
    out = ""
    for count, token in enumerate(tokens):
        earlier, rest = detokenizer.read(token)
        if earlier:
            assert tokenizer.decode(tokens[:count]) == out + earlier
        out += earlier + rest
    assert out + detokenizer.flush() == tokenizer.decode(tokens)


@byte_fallback
def test_a_letter_behind_a_run_of_bytes_is_its_own_text(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer)
    *run, letter = tokenizer.encode("木a")
    assert [detokenizer.read(token) for token in run] == [("", "")] * len(run)
    assert detokenizer.read(letter) == ("木", "a")


@byte_level
def test_bytes_that_are_no_character_are_told_apart_from_the_letter_that_shows_it(
    tokenizer: Tokenizer,
) -> None:
    first, *_ = tokenizer.encode("🐟", special=False)
    letter = tokenizer.encode("a", special=False)[0]
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.read(first), detokenizer.read(letter)] == [("", ""), ("\ufffd", "a")]


def behind(tokenizer: Tokenizer, prompt: Sequence[int], tokens: Sequence[int]) -> str:
    detokenizer = Detokenizer(tokenizer, prompt)
    return detokenizer.push(tokens) + detokenizer.flush()


@given(data=st.data())
def test_behind_a_prompt_comes_what_the_whole_text_adds_to_it(
    tokenizer: Tokenizer, data: st.DataObject
) -> None:
    prompt, tokens = tokenizer.encode(data.draw(TEXTS)), data.draw(streams(tokenizer))
    seen = [token for token in (*prompt, None, *tokens) if token is None or tokenizer.has_text(token)]
    place = seen.index(None)
    assume(not {*seen[place - 1 : place], *seen[place + 1 : place + 2]} <= tokenizer.byte_ids)
    assert tokenizer.decode(prompt) + behind(tokenizer, prompt, tokens) == tokenizer.decode(
        [*prompt, *tokens]
    )


@pytest.mark.parametrize("checkpoint", ["byte_fallback", "metaspace"], indirect=True)
def test_a_text_that_goes_on_behind_a_prompt_keeps_its_first_space(tokenizer: Tokenizer) -> None:
    prompt, tokens = tokenizer.encode("the"), tokenizer.encode("of the")
    assert behind(tokenizer, prompt, tokens) == " of the"
    assert behind(tokenizer, (), tokens) == "of the", "a text of its own has none"
    assert behind(tokenizer, prompt * 100, tokens) == " of the"


@byte_fallback
def test_bytes_of_the_output_cannot_spoil_those_of_the_prompt(tokenizer: Tokenizer) -> None:
    tree, bad = tokenizer.encode("a木"), [min(tokenizer.byte_ids) + 255]
    assert tokenizer.decode([*tree, *bad]) == "a" + "\ufffd" * 4
    assert behind(tokenizer, tree, bad) == "\ufffd"
    assert behind(tokenizer, tree, tokenizer.encode("本")[1:]) == "本"
    assert behind(tokenizer, tree, tokenizer.encode("the")) == " the"


@byte_level
def test_a_character_that_the_prompt_leaves_unfinished_comes_whole(tokenizer: Tokenizer) -> None:
    first, *rest = tokenizer.encode("🐟", special=False)
    assert behind(tokenizer, [first], rest) == "🐟"
    assert behind(tokenizer, [first], tokenizer.encode("a", special=False)) == "a"
    assert behind(tokenizer, [first, rest[0]], rest[1:]) == "🐟"
    assert behind(tokenizer, [first], rest[:1]) == ""


@pytest.mark.parametrize("checkpoint", ["byte_level", "byte_fallback"], indirect=True)
def test_a_prompt_that_ends_with_a_replacement_character_keeps_it(tokenizer: Tokenizer) -> None:
    assert behind(tokenizer, tokenizer.encode("a\ufffd"), tokenizer.encode("a", special=False)[-1:]) == "a"


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
