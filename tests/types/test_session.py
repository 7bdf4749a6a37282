import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.types.errors import ErrorCode, WealdError
from services.types.sampling import SamplingParams
from services.types.session import MOVES, Cursor, Session, lease_epoch, running_hash

OUTPUTS = st.lists(st.integers(0, 2**32 - 1), max_size=20)


def test_the_tokens_of_a_session_are_prompt_and_output() -> None:
    assert Session("s", (1, 2), SamplingParams(), 0, (3, 4)).tokens == (1, 2, 3, 4)


@given(above=st.integers(0, 2**52))
def test_a_lease_stands_above_everything_before_it_also_where_the_clock_is_behind(above: int) -> None:
    epoch = lease_epoch(above)
    assert epoch > above
    assert epoch % MOVES == 0


def test_a_lease_stands_above_those_given_a_millisecond_ago_by_one_who_did_not_know_of_it() -> None:
    earlier = lease_epoch()
    time.sleep(0.002)
    assert lease_epoch() > earlier


def test_every_language_counts_epochs_exactly_for_a_century_to_come() -> None:
    century_ms = 100 * 365 * 24 * 3600 * 1000
    assert lease_epoch() + century_ms * MOVES < 2**53


@given(above=st.integers(0, 2**52))
def test_all_moves_of_a_lease_stay_below_the_next_lease(above: int) -> None:
    lease = lease_epoch(above)
    last = lease + MOVES - 1
    assert lease_epoch(lease) > last
    assert lease_epoch(last) > last


@given(session=st.text(), output=OUTPUTS)
def test_a_cursor_comes_back_from_its_text(session: str, output: list[int]) -> None:
    cursor = Cursor.behind(session, output)
    assert Cursor.parse(str(cursor)) == cursor
    assert (cursor.session, cursor.delivered, cursor.digest) == (session, len(output), running_hash(output))


def test_an_id_alone_stands_before_all_output() -> None:
    assert Cursor.parse("some-id") == Cursor.behind("some-id", ())


@pytest.mark.parametrize("text", ["s:3", "s:many:0123456789abcdef", ":", "s::"])
def test_what_is_no_cursor_is_refused_with_how_one_looks(text: str) -> None:
    with pytest.raises(WealdError, match="write ID, or ID:COUNT:DIGEST") as refused:
        Cursor.parse(text)
    assert refused.value.code is ErrorCode.INVALID_ARGUMENT


@given(output=OUTPUTS, other=OUTPUTS)
def test_the_running_hash_tells_outputs_apart(output: list[int], other: list[int]) -> None:
    assert (running_hash(output) == running_hash(other)) == (output == other)


def test_the_running_hash_is_what_cursors_that_were_given_out_say() -> None:
    assert running_hash(()) == "e4a6a0577479b2b4"
    assert running_hash((1, 2, 3)) == running_hash([1, 2, 3]) == "d69c56745f6a3d9e"
    assert len({running_hash(range(n)) for n in range(200)}) == 200
