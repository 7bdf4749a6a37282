"""Paged storage of keys, values and features."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from services.types.errors import ErrorCode, WealdError

if TYPE_CHECKING:
    from services.engine.ranks import Op, Ranks


class PagedCache:
    """Keys and values of every layer, and the feature plane, by slot.

    Slot `page * page_size + offset` holds one position of one session. Interval of a session's slots during
    a round, L being the position of its pending token and n the nodes of its tree:

        [0, L)            committed: keys, values and features of the target's own text
        [L, L + n)        the tree in node order, written by the target step
        [L, L + a + 1)    after `move`: the root and the a accepted nodes; the rest is overwritten next round

    Of tensor-parallel ranks each holds some key-value heads and its columns of the feature plane. What rank 0
    does by `move` and `features`, the others do by following.
    """

    def __init__(
        self,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        feature_size: int,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        ranks: "Ranks | None" = None,
    ) -> None:
        """Allocate all slots, zeroed.

        Args:
            layers: of the model.
            kv_heads: key-value heads of this rank.
            head_dim: of one key or value.
            feature_size: width of a whole feature.
            num_pages: pages.
            page_size: slots of a page.
            dtype: of all planes.
            device: of all planes.
            ranks: those that share the cache; the one they shared before is no longer theirs.
        """
        self.page_size = page_size
        self._ranks = ranks
        self._columns = slice(0, feature_size)
        if ranks is not None:
            self._columns = ranks.share(feature_size)
            ranks.cache = self
        slots = num_pages * page_size
        self._kv = torch.zeros(layers, 2, slots, kv_heads, head_dim, dtype=dtype, device=device)
        columns = self._columns.stop - self._columns.start
        self._features = torch.zeros(slots, columns, dtype=dtype, device=device)
        self._offsets = torch.arange(page_size, device=device)

    def slots(self, table: list[int], start: int, end: int) -> Tensor:
        """Slots of the positions [start, end) of a session with these pages, int64 `[end - start]`."""
        first, last = start // self.page_size, -(-end // self.page_size)
        pages = torch.tensor(table[first:last], dtype=torch.long, device=self._offsets.device)
        skipped = first * self.page_size
        return (pages[:, None] * self.page_size + self._offsets).flatten()[start - skipped : end - skipped]

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values `[N, kv_heads, head_dim]` of one layer."""
        self._kv[layer, 0].index_copy_(0, slots, keys)
        self._kv[layer, 1].index_copy_(0, slots, values)

    def read(self, layer: int, slots: Tensor | slice) -> tuple[Tensor, Tensor]:
        """Keys and values `[N, kv_heads, head_dim]` of one layer; a slice reads without a copy."""
        keys, values = self._kv[layer]
        if isinstance(slots, slice):
            return keys[slots], values[slots]
        return keys.index_select(0, slots), values.index_select(0, slots)

    def write_features(self, slots: Tensor, features: Tensor) -> None:
        """Store features `[N, feature_size]`, whole on every rank."""
        self._features.index_copy_(0, slots, features[:, self._columns])

    def features(self, slots: Tensor) -> Tensor:
        """A copy of the features at `slots`, `[N, feature_size]`, gathered from all ranks.

        Raises:
            WealdError: `UNAVAILABLE` when a rank is gone.
        """
        self.tell("features", slots)
        own = self._features.index_select(0, slots)
        return own if self._ranks is None else self._ranks.gather(own)

    def move(self, sources: Tensor, destinations: Tensor) -> None:
        """Copy all planes from slots to slots; every source is read before any destination is written.

        Raises:
            WealdError: `UNAVAILABLE` when a rank is gone.
        """
        self.tell("move", sources, destinations)
        self._kv.index_copy_(2, destinations, self._kv.index_select(2, sources))
        self._features.index_copy_(0, destinations, self._features.index_select(0, sources))

    def tell(self, op: "Op", *columns: Tensor) -> None:
        """Tell the other ranks, if any, what is about to be done with this cache.

        Raises:
            WealdError: `INTERNAL` when the ranks share a later cache; `UNAVAILABLE` when one is gone.
        """
        if self._ranks is None:
            return
        if self._ranks.cache is not self:
            raise WealdError(
                ErrorCode.INTERNAL, "the ranks share one cache, and this is not the last one made"
            )
        self._ranks.tell(op, *columns)
