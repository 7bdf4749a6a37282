"""Where spans belong, and how both services name the same round."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.telemetry.spans import Trace, begun

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_a_trace_is_what_its_traceparent_says() -> None:
    trace = Trace.parse(TRACE)
    assert trace == Trace("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331", True)
    assert str(trace) == TRACE
    off = Trace.parse(TRACE[:-1] + "0")
    assert off
    assert not off.sampled


@pytest.mark.parametrize(
    "header",
    [
        *("", "00-1-2-01", TRACE.upper(), TRACE + "-x", "ff" + TRACE[2:], "cc" + TRACE[2:] + "x"),
        f"00-{'0' * 32}-b7ad6b7169203331-01",
        f"00-{'1' * 32}-{'0' * 16}-01",
    ],
)
def test_what_is_no_traceparent_is_no_trace(header: str) -> None:
    assert Trace.parse(header) is None


def test_what_a_later_version_of_a_traceparent_says_besides_is_not_read() -> None:
    assert Trace.parse("cc" + TRACE[2:] + "-what-comes-next") == Trace.parse(TRACE)


def test_a_request_goes_on_below_the_trace_it_came_with_and_is_sampled_as_that_is() -> None:
    trace, parent = begun(TRACE, 0.0)
    assert (trace.id, parent, trace.sampled) == (TRACE[3:35], TRACE[36:52], True)
    assert trace.span != parent
    assert not begun(TRACE[:-1] + "0", 1.0)[0].sampled


def test_a_request_without_a_trace_begins_one_as_often_as_asked_for() -> None:
    assert all(begun("", 1.0)[0].sampled for _ in range(50))
    assert not any(begun("nonsense", 0.0)[0].sampled for _ in range(50))
    assert {begun("", 0.5)[0].sampled for _ in range(200)} == {True, False}
    assert len({begun("", 1.0)[0].id for _ in range(50)}) == 50


@given(st.lists(st.tuples(st.integers(0, 2**64), st.integers(0, 2**32)), unique=True, max_size=50))
def test_each_round_of_a_session_has_a_span_that_both_services_know(rounds: list[tuple[int, int]]) -> None:
    here, there = Trace.parse(TRACE), Trace.parse(TRACE)
    assert here
    assert there
    named = [here.round(*round) for round in rounds]
    assert named == [there.round(*round) for round in rounds]
    assert len({trace.span for trace in named}) == len(rounds)
    assert all(Trace.parse(str(trace)) == trace for trace in named)
