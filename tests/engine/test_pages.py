"""Every page is in one state whatever happens, and what is found by its content is what was written."""

import random
from collections import OrderedDict
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.engine.pages import PagePool, extend_keys
from services.types.errors import ErrorCode, WealdError

Text = tuple[int, ...]
"""Tokens; two of them fill a page of the stateful test."""


def keys_of(tokens: Text, page_size: int = 2, root: bytes = b"") -> list[bytes]:
    keys: list[bytes] = []
    extend_keys(keys, tokens, page_size, root)
    return keys


class Cached(RuleBasedStateMachine):
    """Sessions that open on a cached prefix, write, let full pages be found and close.

    The model: what was written where, which prefix each key stands for, and the order of last use. Texts are
    over two tokens, so that sessions often share a beginning.
    """

    @initialize(num_pages=st.integers(0, 9))
    def begin(self, num_pages: int) -> None:
        self.pool = PagePool(num_pages, 2)
        self.tables: dict[int, list[int]] = {}
        self.texts: dict[int, list[int]] = {}
        self.written: dict[int, Text] = {}
        self.known: dict[bytes, int] = {}
        self.idle: OrderedDict[bytes, int] = OrderedDict()
        self.opened = 0

    @rule(tokens=st.lists(st.integers(0, 1), max_size=9))
    def open(self, tokens: list[int]) -> None:
        keys = keys_of(tuple(tokens))
        expected: list[int] = []
        for key in keys:
            if key not in self.known:
                break
            expected.append(self.known[key])
        table = self.pool.match(keys)
        assert table == expected
        for index, page in enumerate(table):
            self.idle.pop(keys[index], None)
            assert self.written[page] == tuple(tokens[: 2 * index + 2])
        self.opened += 1
        self.tables[self.opened] = table
        self.texts[self.opened] = tokens[: 2 * len(table)]

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), max_size=5), scratch=st.integers(0, 5))
    def write(self, data: st.DataObject, tokens: list[int], scratch: int) -> None:
        id = data.draw(st.sampled_from(sorted(self.tables)))
        table, text = self.tables[id], self.texts[id]
        free, before = self._free(), list(table)
        slots = len(text) + len(tokens) + scratch
        missing = max(0, -(-slots // 2) - len(table))
        if missing > free + len(self.idle):
            with pytest.raises(WealdError) as refused:
                self.pool.grow(table, slots)
            assert refused.value.code is ErrorCode.RESOURCE_EXHAUSTED
            assert table == before
            return
        self.pool.grow(table, slots)
        evicted = [self.idle.popitem(last=False) for _ in range(missing - free)]
        for key, _ in evicted:
            del self.known[key]
        assert table[: len(before)] == before
        assert len(table) == len(before) + missing
        if missing > free:
            assert {page for _, page in evicted} <= set(table[len(before) :])
        begun = len(text) // 2
        self.pool.require_sole(table[begun:])
        text.extend(tokens)
        keys = keys_of(tuple(text))
        for index in range(begun, len(text) // 2):
            self.written[table[index]] = tuple(text[: 2 * index + 2])
            self.pool.register(table[index], keys[index])
            self.known.setdefault(keys[index], table[index])

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(sorted(self.tables)))
        table = self.tables.pop(id)
        keys, pages = keys_of(tuple(self.texts.pop(id))), list(table)
        self.pool.release(table)
        assert table == []
        held = {page for table in self.tables.values() for page in table}
        for key, page in reversed(list(zip(keys, pages, strict=False))):
            if page not in held and self.known[key] == page:
                self.idle[key] = page

    @invariant()
    def everything_is_accounted_for(self) -> None:
        self.pool.check(self.tables.values())
        assert self.pool.free_pages == self._free() + len(self.idle)
        assert self.pool.cached_pages == len(self.known)

    def _free(self) -> int:
        held = {page for table in self.tables.values() for page in table}
        return self.pool.num_pages - len(held) - len(self.idle)

    def teardown(self) -> None:
        for table in self.tables.values():
            self.pool.release(table)
        self.pool.check([])
        assert self.pool.free_pages == self.pool.num_pages


Cached.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
test_a_pool_does_what_a_simple_model_says = Cached.TestCase


@given(st.integers(1, 5), st.integers(0, 2**32), st.integers(1, 12))
def test_a_sequence_loses_its_deepest_pages_first(pages: int, seed: int, taken: int) -> None:
    """After any sessions on prefixes of one text, what is left of it is a prefix."""
    pool, rng = PagePool(pages, 1), random.Random(seed)
    keys = keys_of(tuple(range(pages)), 1)
    tables = []
    for _ in range(rng.randint(1, 6)):
        end = rng.randint(1, pages)
        table = pool.match(keys[:end])
        if pool.free_pages >= end - len(table):
            pool.grow(table, end)
        for page, key in zip(table, keys, strict=False):
            pool.register(page, key)
        tables.append(table)
        if rng.random() < 0.5:
            pool.release(tables.pop(rng.randrange(len(tables))))
    for table in tables:
        pool.release(table)
    other: list[int] = []
    pool.grow(other, min(taken, pages))
    found = pool.match(keys)
    assert len(found) == pool.cached_pages
    pool.check([found, other])


def test_free_pages_are_taken_before_idle_ones_and_of_those_the_one_used_longest_ago() -> None:
    pool = PagePool(4, 1)
    keys = {text: keys_of((text,), 1) for text in range(3)}
    for text in keys:
        table: list[int] = []
        pool.grow(table, 1)
        pool.register(table[0], keys[text][0])
        pool.release(table)
    pool.release(pool.match(keys[0]))
    table = []
    for gone in ([], [1], [1, 2], [0, 1, 2]):
        pool.grow(table, len(table) + 1)
        found = {text: pool.match(keys[text]) for text in keys}
        assert [text for text in keys if not found[text]] == gone
        # Looked up in the order of last use, which so stays as it was.
        for text in (1, 2, 0):
            pool.release(found[text])
    assert pool.cached_pages == 0


def test_a_page_can_be_found_while_its_first_owner_still_holds_it() -> None:
    pool, keys = PagePool(4, 2), keys_of((1, 2, 3, 4))
    one: list[int] = []
    pool.grow(one, 5)
    pool.register(one[0], keys[0])
    two = pool.match(keys)
    assert two == one[:1]
    pool.release(one)
    assert pool.free_pages == 3
    pool.grow(two, 4)
    pool.check([two])
    with pytest.raises(WealdError) as refused:
        pool.grow(two, 10)
    assert refused.value.code is ErrorCode.RESOURCE_EXHAUSTED
    assert pool.match(keys) == two[:1]


def test_the_first_page_of_a_content_stays_the_one_that_is_found() -> None:
    pool, keys = PagePool(4, 2), keys_of((1, 2))
    one: list[int] = []
    two: list[int] = []
    pool.grow(one, 2)
    pool.grow(two, 2)
    pool.register(one[0], keys[0])
    pool.register(two[0], keys[0])
    assert pool.match(keys) == one
    pool.require_sole(two)
    pool.release(two)
    assert (pool.free_pages, pool.cached_pages) == (3, 1)
    pool.check([one, one])


def test_only_a_page_of_one_owner_that_nobody_can_find_may_be_written() -> None:
    pool, keys = PagePool(4, 2), keys_of((1, 2))
    table: list[int] = []
    pool.grow(table, 4)
    pool.require_sole(table)
    pool.register(table[0], keys[0])
    with pytest.raises(WealdError, match=rf"pages \[{table[0]}\] were to be written") as refused:
        pool.require_sole(table)
    assert refused.value.code is ErrorCode.INTERNAL
    pool.require_sole(table[1:])
    found = pool.match(keys)
    with pytest.raises(WealdError, match="were to be written"):
        pool.require_sole(found)
    last = table[1]
    pool.release(table)
    with pytest.raises(WealdError, match="were to be written"):
        pool.require_sole([last])


@given(st.lists(st.integers(0, 3), max_size=30), st.lists(st.integers(0, 30)), st.integers(1, 5))
def test_keys_come_out_the_same_in_whatever_steps_a_text_becomes_known(
    tokens: list[int], ends: list[int], page_size: int
) -> None:
    keys: list[bytes] = []
    for end in sorted(ends):
        extend_keys(keys, tokens[:end], page_size, b"root")
        assert len(keys) == min(end, len(tokens)) // page_size
    extend_keys(keys, tokens, page_size, b"root")
    assert keys == keys_of(tuple(tokens), page_size, b"root")


@given(st.lists(st.integers(0, 1), max_size=12), st.lists(st.integers(0, 1), max_size=12), st.integers(1, 4))
def test_two_texts_share_the_keys_of_exactly_the_full_pages_of_their_common_beginning(
    one: list[int], two: list[int], page_size: int
) -> None:
    shared = 0
    while shared < min(len(one), len(two)) and one[shared] == two[shared]:
        shared += 1
    first, second = keys_of(tuple(one), page_size), keys_of(tuple(two), page_size)
    assert set(first) & set(second) == set(first[: shared // page_size])
    assert len({*first, *second}) == len(first) + len(second) - shared // page_size
    assert not {*first} & {*keys_of(tuple(one), page_size, b"another root")}


def test_a_key_is_a_digest_of_the_parent_key_and_the_tokens_as_64_bit_integers() -> None:
    """Golden values: a key must be the same in every process."""
    assert [key.hex() for key in keys_of((1, 2, 3, 2**40))] == [
        "f59df9f51bfcb52f7ae49756810ec78b",
        "65206879b9a4f592ae5f12ee712374c7",
    ]


def test_exhaustion_says_how_many_pages_are_missing_and_how_many_are_free() -> None:
    pool = PagePool(3, 16)
    with pytest.raises(WealdError, match="4 KV pages of 16 tokens are needed and 3 are free; retry when"):
        pool.grow([], 49)


def leaked(pool: PagePool, one: list[int], two: list[int]) -> str:
    return rf"leaked: \[{one.pop(1)}\]; miscounted: \[\]; with a wrong key: \[\]"


def leaked_by_one_of_two_owners(pool: PagePool, one: list[int], two: list[int]) -> str:
    return rf"leaked: \[{two.pop(0)}\]; miscounted: \[\]"


def with_two_owners(pool: PagePool, one: list[int], two: list[int]) -> str:
    two.append(one[1])
    return rf"leaked: \[\]; miscounted: \[{one[1]}\]"


def with_more_owners_than_references(pool: PagePool, one: list[int], two: list[int]) -> str:
    two.append(one[0])
    return rf"leaked: \[\]; miscounted: \[{one[0]}\]"


def free_and_owned(pool: PagePool, one: list[int], two: list[int]) -> str:
    pool._free.append(one[1])
    return rf"leaked: \[\]; miscounted: \[{one[1]}\]"


def counted_twice_in_one_place(pool: PagePool, one: list[int], two: list[int]) -> str:
    pool._references[one[1]] += 1
    return rf"leaked: \[{one[1]}\]"


def shared_without_a_key(pool: PagePool, one: list[int], two: list[int]) -> str:
    pool._references[one[1]] += 1
    two.append(one[1])
    return rf"leaked: \[\]; miscounted: \[{one[1]}\]"


def released_twice(pool: PagePool, one: list[int], two: list[int]) -> str:
    copy = list(one)
    pool.release(one)
    pool.release(copy)
    return r"miscounted: \[.*\d.*\]"


def found_under_a_key_it_has_lost(pool: PagePool, one: list[int], two: list[int]) -> str:
    del pool._key_of[one[0]]
    return rf"with a wrong key: \[{one[0]}\]"


def no_longer_found_by_its_key(pool: PagePool, one: list[int], two: list[int]) -> str:
    pool._page_of.clear()
    return rf"leaked: \[\]; miscounted: \[\]; with a wrong key: \[{one[0]}\]"


def registered_though_free(pool: PagePool, one: list[int], two: list[int]) -> str:
    page = pool._free[0]
    pool.register(page, b"some key")
    return rf"with a wrong key: \[{page}\]"


Harm = Callable[[PagePool, list[int], list[int]], str]


@pytest.mark.parametrize(
    "harm",
    [
        leaked,
        leaked_by_one_of_two_owners,
        with_two_owners,
        with_more_owners_than_references,
        free_and_owned,
        counted_twice_in_one_place,
        shared_without_a_key,
        released_twice,
        found_under_a_key_it_has_lost,
        no_longer_found_by_its_key,
        registered_though_free,
    ],
)
def test_the_integrity_check_names_a_page_that_is(harm: Harm) -> None:
    pool, keys = PagePool(6, 2), keys_of((1, 2))
    one: list[int] = []
    pool.grow(one, 6)
    pool.register(one[0], keys[0])
    two = pool.match(keys)
    pool.check([one, two])
    sentence = harm(pool, one, two)
    with pytest.raises(WealdError, match=sentence) as broken:
        pool.check([one, two])
    assert broken.value.code is ErrorCode.INTERNAL
