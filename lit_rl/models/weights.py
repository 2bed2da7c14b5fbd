"""The policy's weights as the base model would hold them, whether adapters lie over them or not.

Knows PEFT models by their shape and never imports peft.
"""

import copy
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lit_rl.errors import ConfigError


class BaseTensor(NamedTuple):
    """One weight of the base model, as the policy uses it now.

    Attributes:
        name: in the base model's own `named_parameters()`; tied weights come under each of their names.
        tensor: detached. Shares memory with the policy, except where adapters had to be added; those sums are
            in float32 or better.
        is_moving: true where training changes it.
    """

    name: str
    tensor: Tensor
    is_moving: bool


def has_adapters(model: nn.Module) -> bool:
    """True for a PEFT model."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def base_of(model: nn.Module) -> Any:
    """The Hugging Face model itself; adapters inside it stay active."""
    return model.get_base_model() if has_adapters(model) else model  # type: ignore[operator]


def is_adapted(layer: nn.Module) -> bool:
    """True for a layer with LoRA matrices."""
    return hasattr(layer, "base_layer") and hasattr(layer, "get_delta_weight")


def has_zero_adapters(model: nn.Module) -> bool:
    """True for a PEFT model whose LoRA adapters change nothing yet."""
    last = ("lora_B.", "lora_embedding_A.")  # the matrices that start at zero
    return has_adapters(model) and not any(
        bool(p.any()) for name, p in model.named_parameters() if any(part in name for part in last)
    )


def effective_weight(layer: nn.Module) -> Tensor:
    """The layer's weight plus `scaling * B A` of its active adapters, in float32 or better; differentiable.

    Args:
        layer: a layer with a `weight`, with LoRA matrices or without; without, the weight as it is.
    """
    if not is_adapted(layer):
        return layer.weight  # type: ignore[return-value]
    layer_: Any = layer
    weight = layer_.base_layer.weight
    for adapter in () if layer_.disable_adapters else layer_.active_adapters:
        if adapter in layer_.scaling:
            delta = layer_.get_delta_weight(adapter)
            weight = weight.to(torch.promote_types(weight.dtype, torch.float32)) + delta
    return weight


@torch.no_grad()
def base_tensors(policy: nn.Module) -> Iterator[BaseTensor]:
    """Every weight of the base model, one at a time, adapters added out of place: the policy stays as it is.

    Args:
        policy: a Hugging Face causal language model, or a PEFT model with LoRA adapters around one.

    Raises:
        ConfigError: the base model is quantized; adding adapters to it would lose precision unseen.
    """
    base = base_of(policy)
    if getattr(base, "is_quantized", False):
        raise ConfigError(
            f"model.path must lead to weights that are not quantized (found {type(base).__name__}, "
            f"quantized by {base.quantization_method}): they cannot be copied, averaged, sent to an engine "
            "or exported; load the model without quantization, in model.dtype."
        )
    inside = None  # prefix of the adapted layer that the walk is in
    for prefix, module in base.named_modules(remove_duplicate=False):
        if inside is not None and prefix.startswith(inside):
            continue
        inside = f"{prefix}." if is_adapted(module) else None
        own = module.base_layer if inside else module
        for name, parameter in own.named_parameters(recurse=False, remove_duplicate=False):
            full_name = f"{prefix}.{name}" if prefix else name
            if inside and name == "weight":
                yield BaseTensor(full_name, effective_weight(module).detach(), True)
            else:
                yield BaseTensor(full_name, parameter.detach(), parameter.requires_grad)


def named_base_tensors(policy: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of every weight under the base model's names, adapters merged out of place.

    For engines and exports. Tied weights come under each of their names, since an engine may keep them apart.
    Each tensor has the dtype of the policy's own weight.

    Raises:
        ConfigError: the base model is quantized.
    """
    dtypes = {name: parameter.dtype for name, parameter in _own_parameters(policy)}
    for name, tensor, _ in base_tensors(policy):
        yield name, tensor.to(dtypes[name])


def dense_copy(policy: nn.Module) -> Any:
    """A Hugging Face model without adapters that computes what the policy computes now.

    Weights that training changes are copied (with adapters: the sums), all others are shared with the policy.
    In eval mode, nothing requires a gradient.

    Raises:
        ConfigError: the base model is quantized.
    """
    if isinstance(base_of(policy), FSDPModule):
        return _rebuilt(policy)
    twin = shared_copy(policy)
    if has_adapters(policy):
        twin = twin.unload()
        dtypes = {name: parameter.dtype for name, parameter in _own_parameters(policy)}
        for name, tensor, is_moving in base_tensors(policy):
            if is_moving:
                parent, _, leaf = name.rpartition(".")
                weight = nn.Parameter(tensor.to(dtypes[name]).clone(), requires_grad=False)
                setattr(twin.get_submodule(parent), leaf, weight)
    return twin.eval()


def _rebuilt(policy: nn.Module) -> Any:
    """`dense_copy` of a model that is cut over processes; to be called inside `gathered`."""
    base = base_of(policy)
    own_class = type(base).__mro__[2]  # the first two are torch's
    twin: Any = own_class(copy.deepcopy(base.config)).to(base.dtype)
    twin.generation_config = copy.deepcopy(base.generation_config)
    parameters = dict(twin.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for name, tensor in named_base_tensors(policy):
            parameters[name].copy_(tensor)
    return twin.requires_grad_(False).eval()


def shared_copy(policy: nn.Module) -> Any:
    """A copy with adapters as they are, in eval mode, that shares every frozen parameter with the policy."""
    frozen = {id(p): p for p in policy.parameters() if not p.requires_grad}
    return copy.deepcopy(policy, frozen).requires_grad_(False).eval()


def _own_parameters(policy: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The base model's parameters under its own names, adapter matrices left out."""
    for name, parameter in base_of(policy).named_parameters(remove_duplicate=False):
        if ".lora_" not in name:
            yield name.replace(".base_layer.", "."), parameter
