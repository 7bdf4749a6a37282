"""Paged storage of keys, values and features."""

import torch
from torch import Tensor


class PagedCache:
    """Keys and values of every layer, and the feature plane, by slot.

    Slot `page * page_size + offset` holds one position of one session. Interval of a session's slots during
    a round, L being the position of its pending token and n the nodes of its tree:

        [0, L)            committed: keys, values and features of the target's own text
        [L, L + n)        the tree in node order, written by the target step
        [L, L + a + 1)    after `move`: the root and the a accepted nodes; the rest is overwritten next round
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
    ) -> None:
        self.page_size = page_size
        slots = num_pages * page_size
        self._kv = torch.zeros(layers, 2, slots, kv_heads, head_dim, dtype=dtype, device=device)
        self._features = torch.zeros(slots, feature_size, dtype=dtype, device=device)
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
        """Store features `[N, feature_size]`."""
        self._features.index_copy_(0, slots, features)

    def features(self, slots: Tensor) -> Tensor:
        """A copy of the features at `slots`, `[N, feature_size]`."""
        return self._features.index_select(0, slots)

    def move(self, sources: Tensor, destinations: Tensor) -> None:
        """Copy all planes from slots to slots; every source is read before any destination is written."""
        self._kv.index_copy_(2, destinations, self._kv.index_select(2, sources))
        self._features.index_copy_(0, destinations, self._features.index_select(0, sources))
