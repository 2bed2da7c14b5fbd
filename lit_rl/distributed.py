"""The few collectives the package needs, each of which is the identity in a single process."""

from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

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


def sum_gradients_(parameters: list[torch.nn.Parameter]) -> None:
    """Replace each gradient by its sum over all ranks, in one collective per dtype.

    Losses are normalised by the whole optimizer batch over all ranks, so the sum is the exact gradient. A rank
    without rows has no gradients; it takes part with zeros.
    """
    if not is_distributed():
        return
    groups: dict[torch.dtype, list[torch.nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        groups.setdefault(parameter.grad.dtype, []).append(parameter)
    for members in groups.values():
        flat = torch.cat([p.grad.reshape(-1) for p in members])  # type: ignore[union-attr]
        dist.all_reduce(flat)
        offset = 0
        for p in members:
            p.grad.copy_(flat[offset : offset + p.numel()].view_as(p))  # type: ignore[union-attr]
            offset += p.numel()
