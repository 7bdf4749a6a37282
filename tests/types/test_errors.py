"""Errors of the catalogue."""

import pickle

from hypothesis import given
from hypothesis import strategies as st

from services.types.errors import ErrorCode, WealdError


@given(st.sampled_from(ErrorCode), st.text(), st.none() | st.floats(0, 1e6))
def test_errors_cross_processes_whole(code: ErrorCode, message: str, retry_after_s: float | None) -> None:
    error = WealdError(code, message, retry_after_s=retry_after_s)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is WealdError
    assert (again.code, again.message, again.retry_after_s) == (code, message, retry_after_s)
    assert str(again) == message
