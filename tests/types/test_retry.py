from itertools import islice

from hypothesis import given
from hypothesis import strategies as st

from services.types.retry import backoff


@given(first_s=st.floats(0.01, 1.0), last_s=st.floats(1.0, 100.0))
def test_pauses_double_up_to_the_last_and_jitter_by_half_at_most(first_s: float, last_s: float) -> None:
    for attempt, pause_s in enumerate(islice(backoff(first_s, last_s), 30)):
        longest_s = min(first_s * 2**attempt, last_s)
        assert longest_s / 2 <= pause_s <= longest_s


def test_those_who_begin_together_do_not_come_back_together() -> None:
    assert len({next(backoff(1.0, 1.0)) for _ in range(50)}) > 40
