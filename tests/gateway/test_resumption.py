"""A stream that goes on behind any of its events is the same text, or an error, never another one."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.choices import Figures, Piece, Token
from services.gateway.errors import HttpError
from services.gateway.resumption import Delivery, EventId, Point
from services.types.errors import ErrorCode, WealdError
from services.types.session import FinishReason

ID = "chatcmpl-" + "0123456789abcdef" * 2
FIGURES = Figures(1)

points = st.builds(
    Point,
    st.integers(0, 10**10 - 1),
    st.integers(0, 10**10 - 1),
    st.from_regex(r"[0-9a-f]{16}", fullmatch=True),
    st.booleans(),
)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


def token(index: int) -> Token:
    return Token(index, "", None, None, (), index)


def cut(text: str, cuts: Sequence[int]) -> list[Piece]:
    """A text in pieces, each with one token per character of it; the last one ends it."""
    bounds = sorted({0, len(text), *(at for at in cuts if at < len(text))})
    pieces = [Piece(text[a:b], tuple(map(token, range(a, b))), None, FIGURES) for a, b in pairwise(bounds)]
    last = pieces.pop() if pieces else Piece("", (), None, FIGURES)
    return [*pieces, replace(last, finish=FinishReason.STOP)]


def heard(delivery: Delivery, pieces: Sequence[Piece]) -> list[Piece]:
    return [fresh for piece in pieces if (fresh := delivery.take(piece))]


def text_of(pieces: Sequence[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def tokens_of(pieces: Sequence[Piece]) -> list[int]:
    return [token.id for piece in pieces for token in piece.tokens]


@given(st.sampled_from(["chatcmpl-", "cmpl-"]), st.lists(points, min_size=1, max_size=5))
def test_an_id_of_an_event_is_read_as_it_was_written(kind: str, at: list[Point]) -> None:
    id = EventId(kind + "0123456789abcdef" * 2, tuple(at))
    assert EventId.parse(str(id)) == id
    assert str(id).isascii()
    assert not {"\n", "\r", " "} & set(str(id))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "7",
        ID,
        f"{ID}/",
        f"{ID}/1.1.{'0' * 15}",
        f"{ID}/1.{'0' * 16}",
        f"{ID}/-1.1.{'0' * 16}",
        f"{ID}/1.1.{'0' * 16}..",
        f"{ID}/1.1.{'0' * 16}/",
        f"{ID}/1.1.{'0' * 16}\n",
        f"{ID}/{'9' * 11}.1.{'0' * 16}",
        f"{ID}/¹.1.{'0' * 16}",
        f"{ID[:-1]}/1.1.{'0' * 16}",
        f"x{ID}/1.1.{'0' * 16}",
        f"../{ID}/1.1.{'0' * 16}",
    ],
)
def test_what_is_no_id_of_an_event_is_refused(text: str) -> None:
    with pytest.raises(WealdError, match="Last-Event-ID") as refused:
        EventId.parse(text)
    assert refused.value.code is ErrorCode.INVALID_ARGUMENT


@given(texts, st.lists(st.integers(0, 30)), st.lists(st.integers(0, 30)), st.data())
def test_behind_any_event_comes_exactly_the_rest_however_it_is_cut(
    text: str, cuts: list[int], others: list[int], data: st.DataObject
) -> None:
    whole = cut(text, cuts)
    before = Delivery(Point())
    lost = data.draw(st.integers(0, len(whole)))
    first = heard(before, whole[:lost])
    after = Delivery(before.point)
    rest = heard(after, cut(text, others))
    assert text_of(first) + text_of(rest) == text
    assert tokens_of(first) + tokens_of(rest) == list(range(len(text)))
    assert [piece.finish for piece in [*first, *rest] if piece.finish] == [FinishReason.STOP]
    assert after.point == Point(len(text), len(text), after.point.digest, ended=True)
    assert not any(heard(Delivery(after.point), cut(text, cuts)))


@given(texts.filter(bool), st.lists(st.integers(0, 30)), st.data())
def test_a_stream_that_is_lost_again_before_it_has_caught_up_stands_where_it_stood(
    text: str, cuts: list[int], data: st.DataObject
) -> None:
    first = Delivery(Point())
    heard(first, cut(text, []))
    again = Delivery(first.point)
    pieces = cut(text, cuts)
    for piece in pieces[: data.draw(st.integers(0, len(pieces) - 1))]:
        assert again.take(piece) is None
        assert again.point == first.point


@given(texts.filter(bool), st.data())
def test_another_text_is_never_delivered(text: str, data: st.DataObject) -> None:
    first = Delivery(Point())
    first.take(replace(cut(text, [])[0], finish=None))
    at = data.draw(st.integers(0, len(text) - 1))
    changed = chr(ord("a") + (text[at] == "a"))
    other = cut(text[:at] + changed + text[at + 1 :] + "more", data.draw(st.lists(st.integers(0, 30))))
    again, delivered = Delivery(first.point), []

    def listen() -> None:
        delivered.extend(fresh for piece in other if (fresh := again.take(piece)))

    with pytest.raises(HttpError, match="are others") as diverged:
        listen()
    assert (diverged.value.problem.status, diverged.value.problem.code) == (409, "diverged")
    assert not delivered


@pytest.mark.parametrize(
    ("again", "says"), [("abc", "ends after 3"), ("", "ends after 0"), ("abcdef", "goes on after 4")]
)
def test_a_text_that_ends_elsewhere_is_an_error(again: str, says: str) -> None:
    first = Delivery(Point())
    heard(first, cut("abcd", []))
    with pytest.raises(HttpError, match=says):
        heard(Delivery(first.point), cut(again, [4]))
