"""Features as they travel: tensors to bytes and back."""

import torch
from torch import Tensor

from services.types.messages import FeatureBlock

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """What a dtype is called in options, on the wire and in a status."""
    return _NAMES[dtype]


def to_block(start: int, features: Tensor) -> FeatureBlock:
    """Features `[n, H]` of the positions from `start` on, in their own dtype."""
    rows, width = features.shape
    data = features.contiguous().cpu().view(torch.uint8).numpy().tobytes()
    return FeatureBlock(start, rows, width, dtype_name(features.dtype), data)


def from_block(block: FeatureBlock, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The features `[rows, width]` of a block, in the dtype of the head that reads them."""
    flat = (
        torch.frombuffer(bytearray(block.data), dtype=DTYPES[block.dtype]) if block.rows else torch.empty(0)
    )
    return flat.view(block.rows, block.width).to(device, dtype)
