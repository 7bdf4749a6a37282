from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.detokenizer import Detokenizer
from services.gateway.stops import StopMatcher
from services.gateway.tokenizer import Tokenizer
from services.types.errors import ErrorCode, WealdError

TEXTS = st.text("ab🌲", max_size=40)
STOPS = st.lists(st.text("ab🌲", min_size=1, max_size=6), max_size=16)


def cut(text: str, stops: Sequence[str], include: bool = False, blind: int = 0) -> tuple[str, bool]:
    """The definition: the text before the stop that is complete first, the longest if several are.

    No stop counts that ends within the first `blind` characters.
    """
    for end in range(blind + 1, len(text) + 1):
        complete = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end if include else end - max(complete)], True
    return text, False


def streamed(matcher: StopMatcher, chunks: Sequence[str]) -> tuple[str, bool]:
    pushes = [matcher.push(chunk) for chunk in chunks]
    found = any(found for _, found in pushes)
    return "".join(text for text, _ in pushes) + matcher.flush(), found


@given(text=TEXTS, stops=STOPS, cuts=st.lists(st.integers(0, 40)))
def test_however_a_text_is_chunked_it_is_cut_at_the_first_stop(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    chunks = [text[start:end] for start, end in pairwise([0, *sorted(cuts), 40])]
    assert streamed(StopMatcher(stops), chunks) == cut(text, stops)


@given(
    text=TEXTS, stops=STOPS, cuts=st.lists(st.integers(0, 40)), blind=st.integers(0, 9), include=st.booleans()
)
def test_a_stop_is_found_where_it_ends_behind_the_part_where_none_counts(
    text: str, stops: list[str], cuts: list[int], blind: int, include: bool
) -> None:
    matcher = StopMatcher(stops, include)
    out, found = matcher.push(text[:blind], armed=False)
    assert not found
    rest, found = streamed(
        matcher, [text[a:b] for a, b in pairwise([blind, *(blind + c for c in sorted(cuts)), 90])]
    )
    assert (out + rest, found) == cut(text, stops, include, blind)


def test_a_stop_that_does_not_count_yet_can_begin_one_that_does() -> None:
    matcher = StopMatcher(["aa"])
    assert matcher.push("aa", armed=False) == ("a", False)
    assert matcher.push("ab") == ("", True)


@given(text=TEXTS, stops=STOPS)
def test_nothing_is_held_back_when_the_stop_belongs_to_the_text(text: str, stops: list[str]) -> None:
    matcher, out = StopMatcher(stops, include=True), ""
    for character in text:
        safe, found = matcher.push(character)
        assert safe == character
        out += safe
        if found:
            break
    assert out == cut(text, stops, include=True)[0]


@given(text=TEXTS, stops=STOPS)
def test_only_the_beginning_of_a_stop_is_held_back(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    out = ""
    for count, character in enumerate(text, start=1):
        safe, found = matcher.push(character)
        out += safe
        if found:
            return
        held = text[len(out) : count]
        assert text[:count] == out + held
        assert not held or any(stop.startswith(held) for stop in stops)


def test_of_overlapping_stops_the_one_complete_first_wins() -> None:
    assert StopMatcher(["abcd", "bc"]).push("xabcd") == ("xa", True)


def test_of_stops_complete_at_the_same_character_the_longest_wins() -> None:
    assert StopMatcher(["c", "abc", "bc"]).push("xabcd") == ("x", True)


def test_a_stop_that_begins_again_inside_itself_is_found() -> None:
    matcher = StopMatcher(["aab"])
    assert [matcher.push(character) for character in "aaab"] == [
        ("", False),
        ("", False),
        ("a", False),
        ("", True),
    ]


def test_what_looked_like_a_stop_comes_out_when_it_is_none() -> None:
    matcher = StopMatcher(["\n\nUser:"])
    assert matcher.push("Hi\n\nUse") == ("Hi", False)
    assert matcher.push("d.") == ("\n\nUsed.", False)
    assert matcher.push("\n") == ("", False)
    assert matcher.flush() == "\n"
    assert matcher.flush() == ""


def test_after_a_stop_nothing_more_comes_out() -> None:
    matcher = StopMatcher(["."])
    assert matcher.push("a.b") == ("a", True)
    assert matcher.push("c") == ("", True)
    assert matcher.flush() == ""


def test_without_stops_all_text_passes() -> None:
    assert StopMatcher([]).push("abc") == ("abc", False)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(WealdError) as raised:
        StopMatcher(["a", ""])
    assert raised.value.code is ErrorCode.INVALID_ARGUMENT


def test_a_stop_string_that_ends_inside_a_token_cuts_the_text_exactly_there(tokenizer: Tokenizer) -> None:
    detokenizer, matcher = Detokenizer(tokenizer), StopMatcher(["e t"])
    chunks = [detokenizer.push([token]) for token in tokenizer.encode("the the")]
    assert streamed(matcher, [*chunks, detokenizer.flush()]) == ("th", True)
