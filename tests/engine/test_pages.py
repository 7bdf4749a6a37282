"""Every page is free or has exactly one owner, whatever happens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.engine.pages import PagePool
from services.types.errors import ErrorCode, WealdError

actions = st.lists(st.tuples(st.integers(0, 4), st.none() | st.integers(0, 60)), max_size=40)


@given(st.integers(0, 12), st.integers(1, 7), actions)
def test_any_growing_and_releasing_keeps_every_page_with_one_owner(
    num_pages: int, page_size: int, actions: list[tuple[int, int | None]]
) -> None:
    pool = PagePool(num_pages, page_size)
    tables: list[list[int]] = [[] for _ in range(5)]
    for who, slots in actions:
        before = [list(table) for table in tables]
        free = pool.free_pages
        if slots is None:
            pool.release(tables[who])
            assert tables[who] == []
            assert pool.free_pages == free + len(before[who])
        else:
            needed = -(-slots // page_size)
            missing = max(0, needed - len(before[who]))
            if missing > free:
                with pytest.raises(WealdError) as refused:
                    pool.grow(tables[who], slots)
                assert refused.value.code is ErrorCode.RESOURCE_EXHAUSTED
                assert tables == before
            else:
                pool.grow(tables[who], slots)
                assert len(tables[who]) == max(needed, len(before[who]))
                assert tables[who][: len(before[who])] == before[who]
                assert pool.free_pages == free - missing
        others = [i for i in range(5) if i != who]
        assert [tables[i] for i in others] == [before[i] for i in others]
        pool.check(tables)
        assert len({page for table in tables for page in table}) + pool.free_pages == num_pages


def test_exhaustion_says_how_many_pages_are_missing_and_how_many_are_free() -> None:
    pool = PagePool(3, 16)
    with pytest.raises(WealdError, match="4 KV pages of 16 tokens are needed and 3 are free; retry when"):
        pool.grow([], 49)


def test_a_leaked_page_is_named() -> None:
    pool = PagePool(4, 16)
    table: list[int] = []
    pool.grow(table, 40)
    lost = table.pop(1)
    with pytest.raises(WealdError, match=rf"leaked: \[{lost}\]; owned more than once: \[\]") as broken:
        pool.check([table])
    assert broken.value.code is ErrorCode.INTERNAL


def test_a_page_with_two_owners_is_named() -> None:
    pool = PagePool(4, 16)
    one: list[int] = []
    two: list[int] = []
    pool.grow(one, 16)
    pool.grow(two, 16)
    two.append(one[0])
    with pytest.raises(WealdError, match=rf"leaked: \[\]; owned more than once: \[{one[0]}\]"):
        pool.check([one, two])


def test_a_page_that_is_both_free_and_owned_is_named() -> None:
    pool = PagePool(2, 16)
    table: list[int] = []
    pool.grow(table, 16)
    copy = list(table)
    pool.release(table)
    with pytest.raises(WealdError, match=rf"owned more than once: \[{copy[0]}\]"):
        pool.check([copy])
