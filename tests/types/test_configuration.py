import pytest

from services.types.configuration import DraftConfig, Place, TreeShape
from services.types.errors import ErrorCode, WealdError


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"levels": 0}, "a tree needs at least 1 level, got 0"),
        ({"beam": 0}, "the beam must be at least 1, got 0"),
        ({"budget": 0}, "the tree budget must be in [1, 64], got 0"),
        ({"budget": 65}, "the tree budget must be in [1, 64], got 65"),
    ],
)
def test_a_size_out_of_range_is_refused_by_name(values: dict[str, int], message: str) -> None:
    with pytest.raises(WealdError) as raised:
        DraftConfig(**values)  # type: ignore[arg-type]
    assert (raised.value.code, raised.value.message) == (ErrorCode.INVALID_ARGUMENT, message)


def test_the_smallest_and_the_largest_trees_are_allowed() -> None:
    assert DraftConfig(levels=1, beam=1, budget=1).budget == 1
    assert DraftConfig(TreeShape.CHAIN, budget=64).budget == 64


def test_the_defaults_are_the_dynamic_tree_of_the_paper() -> None:
    assert DraftConfig() == DraftConfig(TreeShape.DYNAMIC, levels=6, beam=10, budget=60)


@pytest.mark.parametrize(
    ("place", "address"),
    [
        (Place("10.0.0.5"), "10.0.0.5:50051"),
        (Place("0.0.0.0", advertised="verify-0.weald"), "verify-0.weald:50051"),
        (Place("0.0.0.0", advertised="gate.example:443"), "gate.example:443"),
        (Place("[::1]"), "[::1]:50051"),
        (Place("[::]", advertised="[2001:db8::1]:443"), "[2001:db8::1]:443"),
    ],
)
def test_a_replica_is_found_where_it_says_or_else_where_it_listens(place: Place, address: str) -> None:
    assert place.address(50051) == address


def test_a_time_to_drain_below_zero_is_refused() -> None:
    with pytest.raises(WealdError, match="must not be negative, got -1"):
        Place(drain_s=-1)
