"""Tree attention over pages, as an attention function registered with transformers.

A step's rows are flat: the tokens of several sessions one after the other, in a batch of one sequence. What
each row sees, its session's prefix and the visible part of a window behind it, travels as the `batch`
argument through the model's forward; masks made elsewhere are ignored.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from services.engine.cache import PagedCache
from services.types.errors import ErrorCode, WealdError
from services.types.tree import DraftTree

ATTENTION = "weald"
_PADDED_ROWS = 64
"""Segments of more rows than this, prefill chunks, are not padded to a common shape with others."""


@dataclass(frozen=True, slots=True)
class Segment:
    """The rows of one session in a flat batch: the last `rows` slots of a window behind a visible prefix."""

    slots: Tensor
    """Slot of every position the rows may see, prefix then window, int64 `[start + window]`."""
    positions: Tensor
    """RoPE position of each window slot, int64 `[window]`."""
    visible: Tensor
    """Which window slots each row sees, itself included, bool `[rows, window]`; all see the whole prefix."""

    @property
    def rows(self) -> int:
        """Rows this segment adds to the batch."""
        return self.visible.shape[0]

    @property
    def start(self) -> int:
        """Length of the prefix."""
        return self.slots.numel() - self.positions.numel()


def causal_segment(slots: Tensor, rows: int) -> Segment:
    """The last `rows` positions of a session, each seeing all before it: a prefill chunk."""
    start = slots.numel() - rows
    positions = torch.arange(start, start + rows, device=slots.device)
    return Segment(slots, positions, torch.ones(rows, rows, dtype=torch.bool, device=slots.device).tril_())


def tree_segment(slots: Tensor, tree: DraftTree) -> Segment:
    """A draft tree behind its committed prefix: node i sees its ancestors and itself (one word each)."""
    n, device = len(tree), slots.device
    start = slots.numel() - n
    words = torch.tensor([w - (w >> 63 << 64) for w in tree.ancestors], device=device)
    visible = (words[:, None] >> torch.arange(n, device=device) & 1).bool()
    return Segment(slots, torch.tensor(tree.depths, device=device) + start, visible)


class _Group:
    """Segments that run as one padded attention call."""

    def __init__(self, segments: Sequence[Segment], first_rows: Sequence[int], contiguous: bool) -> None:
        self.segments = segments
        self.size = len(segments)
        self.max_rows = max(s.rows for s in segments)
        self.length = max(s.slots.numel() for s in segments)
        device = segments[0].slots.device
        slots = torch.stack([_padded(s.slots, self.length) for s in segments]).flatten()
        self.slots: Tensor | slice = slots
        if contiguous and self.size == 1:
            low = int(slots[0])
            if bool((slots == torch.arange(low, low + self.length, device=device)).all()):
                self.slots = slice(low, low + self.length)
        rows = [torch.arange(f, f + s.rows, device=device) for f, s in zip(first_rows, segments, strict=True)]
        self.gather = torch.stack([_padded(r, self.max_rows) for r in rows]).flatten()
        self.scatter = torch.cat(rows)
        self.real = torch.cat(
            [torch.arange(s.rows, device=device) + i * self.max_rows for i, s in enumerate(segments)]
        )
        self._masks: dict[tuple[int | None, int, torch.dtype], Tensor] = {}

    def mask(self, window: int | None, repeats: int, dtype: torch.dtype) -> Tensor:
        """Additive mask `[size, 1, repeats * max_rows, length]` under a sliding window of positions."""
        key = window, repeats, dtype
        if key not in self._masks:
            device = self.gather.device
            allowed = torch.ones(self.size, self.max_rows, self.length, dtype=torch.bool, device=device)
            for i, s in enumerate(self.segments):
                seen, end = allowed[i, : s.rows], s.slots.numel()
                seen[:, s.start : end] = s.visible
                seen[:, end:] = False
                if window is not None:
                    at = torch.cat([torch.arange(s.start, device=device), s.positions])
                    seen[:, :end] &= at > s.positions[-s.rows :, None] - window
            mask = torch.zeros(allowed.shape, dtype=dtype, device=device).masked_fill_(~allowed, -torch.inf)
            self._masks[key] = mask.repeat(1, repeats, 1)[:, None]
        return self._masks[key]


class Batch:
    """One step's rows for tree attention, and the cache they read and write."""

    def __init__(self, segments: Sequence[Segment], cache: PagedCache) -> None:
        self.cache = cache
        self.written: set[int] = set()
        """Layers that have written their keys and values in this step."""
        self.slots = torch.cat([s.slots[-s.rows :] for s in segments])
        """Slot each row writes, int64 `[N]`."""
        self.positions = torch.cat([s.positions[-s.rows :] for s in segments])
        """RoPE position of each row, int64 `[N]`."""
        first_rows, count = [], 0
        for segment in segments:
            first_rows.append(count)
            count += segment.rows
        small = [i for i, s in enumerate(segments) if s.rows <= _PADDED_ROWS]
        large = [[i] for i, s in enumerate(segments) if s.rows > _PADDED_ROWS]
        contiguous = self.slots.device.type == "cpu"
        self.groups = [
            _Group([segments[i] for i in group], [first_rows[i] for i in group], contiguous)
            for group in ([small] if small else []) + large
        ]


def tree_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    batch: Batch,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Write this layer's keys and values to their slots, then attend over pages.

    Args:
        module: the attention layer; only its `layer_idx` is read.
        query: `[1, heads, N, head_dim]`.
        key: `[1, kv_heads, N, head_dim]`; `value` likewise.
        attention_mask: ignored.
        batch: what each row sees.
        scaling: factor of the scores.
        sliding_window: positions a row sees behind it, itself included; None for all.
        softcap: bound of the scores by `tanh`.
        s_aux: attention sinks, refused.

    Returns:
        `[1, N, heads, head_dim]` and no weights.
    """
    if s_aux is not None:
        raise WealdError(ErrorCode.UNSUPPORTED_MODEL, "attention sinks are not supported")
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    if layer in batch.written:
        raise WealdError(ErrorCode.UNSUPPORTED_MODEL, f"layer {layer} attends more than once in a step")
    batch.written.add(layer)
    batch.cache.write(layer, batch.slots, key[0].transpose(0, 1), value[0].transpose(0, 1))
    heads, head_dim = query.shape[1], query.shape[3]
    kv_heads = key.shape[1]
    flat = query[0].transpose(0, 1)
    out = torch.empty_like(flat)
    alone = len(batch.groups) == 1 and batch.groups[0].size == 1
    for group in batch.groups:
        keys, values = batch.cache.read(layer, group.slots)
        shape = (group.size, group.length, kv_heads, -1)
        keys, values = keys.view(shape).transpose(1, 2), values.view(shape).transpose(1, 2)
        q = flat if alone else flat.index_select(0, group.gather)
        q = q.view(group.size, group.max_rows, kv_heads, -1, head_dim).permute(0, 2, 3, 1, 4)
        q = q.reshape(group.size, kv_heads, -1, head_dim)
        repeats = heads // kv_heads
        mask = group.mask(sliding_window, repeats, query.dtype)
        if softcap is None:
            o = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=scaling)
        else:
            scores = torch.tanh(q @ keys.mT * (scaling / softcap)) * softcap + mask
            o = scores.softmax(-1) @ values
        o = o.view(group.size, kv_heads, repeats, group.max_rows, head_dim).permute(0, 3, 1, 2, 4)
        o = o.reshape(-1, heads, head_dim)
        if alone:
            return o[None], None
        out.index_copy_(0, group.scatter, o.index_select(0, group.real))
    return out[None], None


def _padded(index: Tensor, length: int) -> Tensor:
    """`index` repeated at its end up to `length`: padding stays within its own session."""
    return torch.cat([index, index[-1:].expand(length - index.numel())])


AttentionInterface.register(ATTENTION, tree_attention)
