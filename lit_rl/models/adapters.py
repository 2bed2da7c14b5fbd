"""What only PEFT models have: a base model under adapters, and weights that exist as a sum. Never imports peft."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lit_rl.errors import ConfigError


def has_adapters(model: nn.Module) -> bool:
    """True for a PEFT model."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def base_of(model: nn.Module) -> Any:
    """The Hugging Face model itself; adapters inside it stay where they are."""
    return model.get_base_model() if has_adapters(model) else model  # type: ignore[operator]


class BaseTensor(NamedTuple):
    """One weight of the base model, as the policy uses it now.

    Attributes:
        name: as in the base model's own `named_parameters()`, tied weights under each of their names.
        tensor: detached; shares memory with the policy unless adapters had to be added.
        is_moving: true where training changes it.
    """

    name: str
    tensor: Tensor
    is_moving: bool


@torch.no_grad()
def base_tensors(policy: nn.Module) -> Iterator[BaseTensor]:
    """Every weight of the base model, one at a time, with active adapters added out of place.

    Args:
        policy: a Hugging Face causal language model, or a PEFT model around one.

    Raises:
        ConfigError: a weight is quantized, or an adapter is of a kind that is no sum of two weights.
    """
    for prefix, module in base_of(policy).named_modules(remove_duplicate=False):
        path = prefix.split(".") if prefix else []
        if _is_inside_adapter(path):
            continue
        if _is_adapted(module):
            yield from _adapted_tensors(prefix, module)
            continue
        if isinstance(inner := _saved_module(module), nn.Module):
            for name, parameter in inner.named_parameters(remove_duplicate=False):
                yield BaseTensor(f"{prefix}.{name}", _dense(parameter), parameter.requires_grad)
            continue
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            yield BaseTensor(".".join([*path, name]), _dense(parameter), parameter.requires_grad)


def effective_weight(layer: nn.Module) -> Tensor:
    """Weight of a linear layer with its active adapters added; differentiable in the adapters.

    Args:
        layer: a plain layer, a LoRA layer, or a layer that PEFT trains as a copy (`modules_to_save`).
    """
    saved = _saved_module(layer)
    if saved is not None:
        return saved.weight
    if not _is_adapted(layer):
        return layer.weight  # type: ignore[return-value]
    weight: Tensor = layer.base_layer.weight  # type: ignore[union-attr, assignment]
    if layer.disable_adapters:
        return weight
    for adapter in layer.active_adapters:  # type: ignore[union-attr]
        if adapter in layer.scaling:  # type: ignore[operator]
            weight = weight + layer.get_delta_weight(adapter).to(weight.dtype)  # type: ignore[operator]
    return weight
