"""Norms and gated layers that keep nothing but their inputs for the backward pass.

What a fused kernel would never write to memory (the normalised values, the activated gate, its product) is
computed again when its gradient is due; no matrix product is. Linear layers keep what their input is made of
in its place (`origins`). Any device, with adapters or without.
"""

from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lit_rl.models.origins import keep_origins_, with_origin

_GATED = ("gate_proj", "up_proj", "down_proj", "act_fn")


def fuse_(model: nn.Module) -> int:
    """Switch the layers over that are of a known form, and give what they gave.

    Args:
        model: a Hugging Face causal language model, or a PEFT model around one.

    Returns:
        How many norms and gated layers were switched.
    """
    switched = 0
    for layer, forward in _known(model):
        if _is_same(layer, forward):
            layer.forward = MethodType(forward, layer)
            switched += 1
    if switched:
        keep_origins_(model)
    return switched


def _known(model: nn.Module) -> Iterator[tuple[nn.Module, Callable]]:
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            yield module, _norm
        elif all(hasattr(module, name) for name in _GATED):
            yield module, _gated


def _norm(self: nn.Module, hidden: Tensor) -> Tensor:
    forward = MethodType(type(self).forward, self)
    return with_origin(_recomputed(forward, hidden), forward, hidden)


def _gated(self: Any, hidden: Tensor) -> Tensor:
    def down(gate: Tensor, up: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(gate) * up)

    return _recomputed(down, self.gate_proj(hidden), self.up_proj(hidden))


def _recomputed(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """The function's value; the backward pass runs it again up to the last tensor that it needs.

    The inputs of a last matrix product are such tensors, its result is not: it is not computed again.
    """
    if not torch.is_grad_enabled():
        return function(*inputs)
    return checkpoint(function, *inputs, use_reentrant=False)


@torch.no_grad()
def _is_same(layer: nn.Module, forward: Callable) -> bool:
    """Whether the layer gives the same in its new form. Nothing can be compared on the meta device."""
    weight = next(layer.parameters(), None)
    if weight is None or weight.device.type == "meta":
        return weight is not None
    projection = getattr(layer, "gate_proj", None)
    width = weight.shape[-1] if projection is None else projection.in_features
    hidden = torch.linspace(-1, 1, 2 * width, dtype=weight.dtype, device=weight.device).view(1, 2, width)
    was_training = layer.training
    layer.eval()
    try:
        return torch.equal(layer(hidden), forward(layer, hidden))
    except (TypeError, ValueError, RuntimeError):
        return False
    finally:
        layer.training = was_training
