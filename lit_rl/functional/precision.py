"""The working precision of every function here: float32 or better."""

import torch
from torch import Tensor


def promoted(values: Tensor) -> Tensor:
    """bfloat16 and float16 as float32, integers and booleans likewise; float32 and float64 as they are."""
    return values if values.dtype in (torch.float32, torch.float64) else values.float()
