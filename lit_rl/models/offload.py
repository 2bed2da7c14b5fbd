"""Activations that rest in CPU memory between the forward and the backward pass."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lit_rl.models.weights import base_of

_SMALL = 1 << 16  # bytes below which a copy costs more than the room it gives


class Offloading(saved_tensors_hooks):
    """Inside, what is saved for a backward goes to the CPU and comes back when it is used; weights stay."""

    def __init__(self) -> None:
        super().__init__(_packed, _unpacked)


def offload_activations_(model: nn.Module) -> None:
    """Run the decoder of the model, without its head, inside `Offloading`.

    Args:
        model: a Hugging Face causal language model, or a PEFT model around one.
    """
    base = base_of(model)
    body = getattr(base, base.base_model_prefix)
    entered: list[Offloading] = []

    def enter(*_: Any) -> None:
        entered.append(Offloading())
        entered[-1].__enter__()

    def leave(*_: Any) -> None:
        entered.pop().__exit__()

    body.register_forward_pre_hook(enter)
    body.register_forward_hook(leave, always_call=True)


def _packed(tensor: Tensor) -> Any:
    """Where the tensor was, and a copy in CPU memory; or the tensor itself."""
    is_weight = isinstance(tensor if tensor._base is None else tensor._base, nn.Parameter)
    if is_weight or tensor.device.type == "cpu" or tensor.nbytes < _SMALL:
        return tensor
    kept = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return tensor.device, kept.copy_(tensor, non_blocking=True)


def _unpacked(packed: Any) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    device, kept = packed
    return kept.to(device, non_blocking=True)
