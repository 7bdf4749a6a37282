"""Who owns which page. Storage is the paged cache's; here are only numbers."""

from collections.abc import Iterable, Sequence

from services.types.errors import ErrorCode, WealdError


class PagePool:
    """Fixed-size pages, each free or owned by exactly one table."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def free_pages(self) -> int:
        """Pages nobody owns."""
        return len(self._free)

    def grow(self, table: list[int], slots: int) -> None:
        """Append pages to `table` until it covers `slots` slots.

        Raises `WealdError(RESOURCE_EXHAUSTED)`, leaving the table as it was, when too few pages are free.
        """
        missing = -(-slots // self.page_size) - len(table)
        if missing > len(self._free):
            raise WealdError(
                ErrorCode.RESOURCE_EXHAUSTED,
                f"{missing} KV pages of {self.page_size} tokens are needed and {len(self._free)} are free; "
                "retry when other sessions have ended, or give the cache more memory",
            )
        table.extend(self._free.pop() for _ in range(missing))

    def release(self, table: list[int]) -> None:
        """Give back all pages of `table`, leaving it empty."""
        self._free.extend(reversed(table))
        table.clear()

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Verify that the free pages and those of `tables` are all pages, each exactly once.

        Raises `WealdError(INTERNAL)` naming pages that leaked or have two owners.
        """
        owners = [0] * self.num_pages
        for pages in (self._free, *tables):
            for page in pages:
                owners[page] += 1
        leaked = [page for page, count in enumerate(owners) if count == 0]
        shared = [page for page, count in enumerate(owners) if count > 1]
        if leaked or shared:
            raise WealdError(ErrorCode.INTERNAL, f"KV pages leaked: {leaked}; owned more than once: {shared}")
