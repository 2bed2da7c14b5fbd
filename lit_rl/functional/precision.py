"""The working precision of every function here: float32 or better."""

import torch
from torch import Tensor


def promoted(values: Tensor) -> Tensor:
    """bfloat16 and float16 as float32, integers and booleans likewise; float32 and float64 as they are."""
    return values if values.dtype in (torch.float32, torch.float64) else values.float()


def product_dtype(dtype: torch.dtype, device_type: str) -> torch.dtype:
    """What matrix products of tensors of this dtype are computed in: autocast's, where it is on."""
    is_cast = torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)
    return torch.get_autocast_dtype(device_type) if is_cast else dtype
