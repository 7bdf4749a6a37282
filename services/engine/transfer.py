"""Features as they travel: tensors to bytes and back."""

import torch
from torch import Tensor

from services.types.messages import FeatureBlock

_DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def to_block(start: int, features: Tensor) -> FeatureBlock:
    """Features `[n, H]` of the positions from `start` on, in their own dtype."""
    rows, width = features.shape
    data = features.contiguous().cpu().view(torch.uint8).numpy().tobytes()
    return FeatureBlock(start, rows, width, _NAMES[features.dtype], data)


def from_block(block: FeatureBlock, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The features `[rows, width]` of a block, in the dtype of the head that reads them."""
    flat = (
        torch.frombuffer(bytearray(block.data), dtype=_DTYPES[block.dtype]) if block.rows else torch.empty(0)
    )
    return flat.view(block.rows, block.width).to(device, dtype)
