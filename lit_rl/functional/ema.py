"""In-place move of one list of parameters toward another: EMA teachers and TR-DPO references."""

from collections.abc import Iterable

import torch
from torch import Tensor


@torch.no_grad()
def lerp_(averages: Iterable[Tensor], sources: Iterable[Tensor], rate: float) -> None:
    """`average = (1 - rate) * average + rate * source`, for each pair, in place.

    Computed in float32 or better. Keep the averages themselves in float32: near its aim a step is below half
    the spacing of bfloat16 numbers, so an average stored in bfloat16 never arrives.
    Sources: mean teacher, arXiv 1703.01780; TR-DPO, arXiv 2404.09656.

    Args:
        averages: tensors that are written.
        sources: tensors of the same shapes, any float dtype and device.
        rate: in [0, 1]; 0 leaves the averages as they are, 1 copies.
    """
    for average, source in zip(averages, sources, strict=True):
        dtype = torch.promote_types(average.dtype, torch.float32)
        moved = torch.lerp(average.to(dtype), source.to(device=average.device, dtype=dtype), rate)
        average.copy_(moved)
