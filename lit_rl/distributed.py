"""The few collectives the package needs, each of which is the identity in a single process."""

from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

T = TypeVar("T")


def is_distributed() -> bool:
    """True inside an initialised process group."""
    return dist.is_available() and dist.is_initialized()


def world_size() -> int:
    """Number of data-parallel ranks."""
    return dist.get_world_size() if is_distributed() else 1


def rank() -> int:
    """Index of this process among the data-parallel ranks."""
    return dist.get_rank() if is_distributed() else 0


def all_sum_(tensor: Tensor) -> Tensor:
    """Replace the tensor by its sum over all ranks. Collective."""
    if is_distributed():
        dist.all_reduce(tensor)
    return tensor


def all_max_(tensor: Tensor) -> Tensor:
    """Replace the tensor by its maximum over all ranks. Collective."""
    if is_distributed():
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor


def gather_objects(item: T) -> list[T]:
    """The item of every rank, in rank order. Collective."""
    if not is_distributed():
        return [item]
    items: list = [None] * world_size()
    dist.all_gather_object(items, item)
    return items


def gather_rows(*tensors: Tensor) -> tuple[list[Tensor], slice]:
    """The rows of all ranks one below the other, and which of them are this rank's. Collective.

    Args:
        tensors: (B,) or (B, T), the same B. Ranks may differ in B, and in T: narrower ones are filled with
            zeros on the right.
    """
    if not is_distributed():
        return list(tensors), slice(None)
    parts = gather_objects([tensor.detach().cpu() for tensor in tensors])
    start = sum(len(part[0]) for part in parts[: rank()])
    whole = [_below_each_other(column) for column in zip(*parts, strict=True)]
    own = slice(start, start + len(tensors[0]))
    return [rows.to(tensor.device) for rows, tensor in zip(whole, tensors, strict=True)], own


def _below_each_other(parts: tuple[Tensor, ...]) -> Tensor:
    if parts[0].dim() == 1:
        return torch.cat(parts)
    width = max(part.shape[1] for part in parts)
    return torch.cat([torch.nn.functional.pad(part, (0, width - part.shape[1])) for part in parts])


def sum_gradients_(parameters: list[torch.nn.Parameter]) -> None:
    """Replace each gradient by its sum over all ranks, in one collective per dtype.

    Losses are normalised by the whole optimizer batch over all ranks, so the sum is the exact gradient. A
    parameter that took no part has a gradient of zero, on one rank as on several.
    """
    groups: dict[torch.dtype, list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if isinstance(parameter, DTensor):
            continue  # summed in its backward
        groups.setdefault(parameter.grad.dtype, []).append(parameter.grad)
    if not is_distributed():
        return
    for gradients in groups.values():
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(flat)
        parts = flat.split([gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))
