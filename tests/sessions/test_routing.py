"""Sessions go where their prefix lies, unless that replica has too much to do."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.sessions.routing import OVERLOAD, PREFIX_TOKENS, route
from services.types.errors import ErrorCode, WealdError
from services.types.replica import ReplicaKind

VERIFY = ReplicaKind.VERIFY
TOKENS = st.lists(st.integers(0, 99), min_size=1, max_size=2 * PREFIX_TOKENS)
SESSIONS = st.dictionaries(st.sampled_from("abcdefgh").map("{}:1".format), st.integers(0, 40), min_size=1)
"""Of replicas, how many each has."""


def idle(*addresses: str) -> dict[str, int]:
    return dict.fromkeys(addresses, 0)


@given(tokens=TOKENS, sessions=SESSIONS)
def test_a_replica_is_chosen_among_those_that_are_not_overloaded(
    tokens: list[int], sessions: dict[str, int]
) -> None:
    mean = sum(sessions.values()) / len(sessions)
    assert sessions[route(VERIFY, tokens, sessions)] <= OVERLOAD * mean + 1


@given(tokens=TOKENS, more=TOKENS, sessions=SESSIONS)
def test_the_choice_depends_on_the_first_tokens_alone(
    tokens: list[int], more: list[int], sessions: dict[str, int]
) -> None:
    prefix = (tokens * PREFIX_TOKENS)[:PREFIX_TOKENS]
    chosen = route(VERIFY, [*prefix, *tokens], sessions)
    assert route(VERIFY, [*prefix, *more], sessions) == chosen
    assert route(VERIFY, prefix, dict(reversed(sessions.items()))) == chosen


@given(tokens=TOKENS, sessions=SESSIONS)
def test_a_replica_that_comes_or_goes_moves_no_prefix_between_the_others(
    tokens: list[int], sessions: dict[str, int]
) -> None:
    chosen = route(VERIFY, tokens, idle(*sessions))
    for other in sessions.keys() - {chosen}:
        assert route(VERIFY, tokens, idle(*(sessions.keys() - {other}))) == chosen
    assert route(VERIFY, tokens, idle(*sessions, "new:1")) in (chosen, "new:1")


def test_prefixes_spread_over_all_replicas() -> None:
    rng = random.Random(0)
    replicas = idle("a:1", "b:1", "c:1", "d:1")
    chosen = Counter(route(VERIFY, [rng.randrange(1000) for _ in range(20)], replicas) for _ in range(800))
    # Each count is binomial with a mean of 200 and a standard deviation of 12.
    assert all(140 < chosen[address] < 260 for address in replicas)


def test_one_prefix_that_everybody_sends_spreads_once_its_replica_is_overloaded() -> None:
    sessions = idle("a:1", "b:1", "c:1")
    first = route(VERIFY, [1, 2, 3], sessions)
    for _ in range(30):
        sessions[route(VERIFY, [1, 2, 3], sessions)] += 1
    assert sessions[first] == max(sessions.values()) <= OVERLOAD * 10 + 2
    assert min(sessions.values()) > 0


@pytest.mark.parametrize("kind", ReplicaKind)
def test_without_a_replica_the_caller_is_told_of_which_kind_and_when_to_try_again(kind: ReplicaKind) -> None:
    with pytest.raises(WealdError, match=f"no {kind.value} replica is connected; start one") as refused:
        route(kind, [1, 2, 3], {})
    assert refused.value.code is ErrorCode.UNAVAILABLE
    assert refused.value.retry_after_s is not None
