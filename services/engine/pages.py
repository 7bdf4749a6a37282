"""Who owns which page, and which pages can be found again by their content. Storage is the paged cache's.

A page is in exactly one state. Its references are the places where it stands in tables; its key names all
tokens that its content depends on.

    state    references   key    it stands in                  it can be
    free     0            none   the free stack                taken
    idle     0            one    the key map, the idle queue   found, or evicted and taken
    owned    1            none   one table                     written
    cached   1 or more    one    the key map, its tables       found and read, never written

    grow       free → owned; without a free one, the least recently used idle → owned (it loses its key)
    register   owned → cached; when another page has the key, it stays owned
    match      idle, cached → cached, one reference more
    release    owned → free; cached → cached, one reference less, or idle after the last

A table is released from its end, so of its pages the deepest becomes idle, and is evicted, first: as long as
a page can be found, so can the pages before it. (Where two sessions computed the same tokens at the same
time, a page can outlive its ancestor. It is out of reach then, until that is registered again or it is
evicted itself; what is found is right in any case, since a key names the whole prefix.)
"""

import struct
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from services.types.errors import ErrorCode, WealdError

PAGE_SIZE = 16
"""Tokens of a page, unless asked for another size."""


class PagePool:
    """Fixed-size pages, counted by their references, and a prefix cache of those that hold what is final."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._references = [0] * num_pages
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    @property
    def free_pages(self) -> int:
        """Pages that no table holds: free and idle ones."""
        return len(self._free) + len(self._idle)

    @property
    def cached_pages(self) -> int:
        """Pages that can be found by their content, whether a table holds them or not."""
        return len(self._page_of)

    def grow(self, table: list[int], slots: int) -> None:
        """Append pages to `table` until it covers `slots` slots.

        Raises `WealdError(RESOURCE_EXHAUSTED)`, leaving the table as it was, when too few pages are free.
        """
        missing = -(-slots // self.page_size) - len(table)
        if missing > self.free_pages:
            raise WealdError(
                ErrorCode.RESOURCE_EXHAUSTED,
                f"{missing} KV pages of {self.page_size} tokens are needed and {self.free_pages} are free; "
                "retry when other sessions have ended, or give the cache more memory",
            )
        table.extend(self._take() for _ in range(missing))

    def release(self, table: list[int]) -> None:
        """Give back all pages of `table`, leaving it empty."""
        for page in reversed(table):
            self._references[page] -= 1
            if self._references[page]:
                continue
            if page in self._key_of:
                self._idle[page] = None
            else:
                self._free.append(page)
        table.clear()

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """The pages of the longest prefix of `keys` that can be found: the beginning of a table.

        Each gets one reference more, so the list must be released like any table.
        """
        table: list[int] = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            self._idle.pop(page, None)
            self._references[page] += 1
            table.append(page)
        return table

    def register(self, page: int, key: bytes) -> None:
        """Let an owned page be found from now on; when another page has the key, nothing happens.

        Args:
            page: of a table, full, and never to be written again.
            key: as `extend_keys` makes it.
        """
        if key not in self._page_of:
            self._page_of[key] = page
            self._key_of[page] = key

    def require_sole(self, pages: Iterable[int]) -> None:
        """Assert that pages may be written: each is in one table, once, and nobody can find it.

        Raises `WealdError(INTERNAL)` naming those that others read or could come to read.
        """
        shared = [page for page in pages if self._references[page] != 1 or page in self._key_of]
        if shared:
            raise WealdError(
                ErrorCode.INTERNAL, f"KV pages {shared} were to be written, but are not one owner's"
            )

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Verify that every page is in one state, and in `tables` as often as it has references.

        Raises `WealdError(INTERNAL)` naming pages that leaked, that are in more or other places than their
        count says, and whose key is not theirs.
        """
        held = Counter(page for table in tables for page in table)
        spare = Counter((*self._free, *self._idle))
        leaked, miscounted = [], []
        for page, references in enumerate(self._references):
            expected, found = (references, int(references == 0)), (held[page], spare[page])
            if sum(found) < sum(expected):
                leaked.append(page)
            elif found != expected or (references > 1 and page not in self._key_of):
                miscounted.append(page)
        found_by = {(page, key) for key, page in self._page_of.items()}
        astray = {page for page, _ in found_by ^ self._key_of.items()}
        astray |= (self._idle.keys() - self._key_of.keys()) | (self._key_of.keys() & set(self._free))
        if leaked or miscounted or astray:
            raise WealdError(
                ErrorCode.INTERNAL,
                f"KV pages leaked: {leaked}; miscounted: {miscounted}; with a wrong key: {sorted(astray)}",
            )

    def _take(self) -> int:
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._idle.popitem(last=False)
            del self._page_of[self._key_of.pop(page)]
        self._references[page] = 1
        return page


def extend_keys(keys: list[bytes], tokens: Sequence[int], page_size: int, root: bytes = b"") -> None:
    """Append the keys of all full pages of `tokens` that have none yet.

    A key is a digest of the key before it and the page's tokens, so it names the whole prefix.

    Args:
        keys: of the first pages, as an earlier call left them, 16 bytes each.
        tokens: of the whole prefix, from its first page on.
        page_size: tokens of a page.
        root: stands for the key before the first: what else the content of every page depends on.
    """
    for page in range(len(keys), len(tokens) // page_size):
        content = struct.pack(f"<{page_size}q", *tokens[page * page_size : (page + 1) * page_size])
        keys.append(blake2b((keys[-1] if keys else root) + content, digest_size=16).digest())
