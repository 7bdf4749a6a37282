import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.speculation.stopping import cut, end_tokens
from services.types.sampling import SamplingParams
from services.types.session import FinishReason

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


@given(
    tokens=st.lists(st.integers(0, 5), min_size=1, max_size=8),
    room=st.integers(1, 9),
    ends=st.frozensets(st.integers(0, 5), max_size=2),
)
def test_a_cut_text_is_what_writing_token_by_token_gives(
    tokens: list[int], room: int, ends: frozenset[int]
) -> None:
    text: list[int] = []
    finish = None
    for token in tokens:
        text.append(token)
        if token in ends:
            finish = STOP
        elif len(text) == room:
            finish = LENGTH
        if finish is not None:
            break
    assert cut(tokens, room, ends) == (tuple(text), finish)


@pytest.mark.parametrize(
    ("room", "ends", "expected"),
    [
        (4, set(), ((7, 8, 9), None)),
        (3, set(), ((7, 8, 9), LENGTH)),
        (2, set(), ((7, 8), LENGTH)),
        (1, set(), ((7,), LENGTH)),
        (9, {8}, ((7, 8), STOP)),
        (9, {9, 8}, ((7, 8), STOP)),
        (2, {8}, ((7, 8), STOP)),
        (1, {8}, ((7,), LENGTH)),
        (1, {7}, ((7,), STOP)),
        (3, {9}, ((7, 8, 9), STOP)),
    ],
)
def test_a_text_ends_exactly_at_its_first_end_token_or_at_its_last_allowed_one(
    room: int, ends: set[int], expected: tuple[tuple[int, ...], FinishReason | None]
) -> None:
    assert cut([7, 8, 9], room, frozenset(ends)) == expected


def test_ends_are_those_of_the_model_and_of_the_request() -> None:
    eos = frozenset({1, 2})
    assert end_tokens(SamplingParams(), eos) == {1, 2}
    assert end_tokens(SamplingParams(stop_token_ids=(2, 7)), eos) == {1, 2, 7}
    assert end_tokens(SamplingParams(ignore_eos=True), eos) == frozenset()
    assert end_tokens(SamplingParams(ignore_eos=True, stop_token_ids=(2, 7)), eos) == {2, 7}
