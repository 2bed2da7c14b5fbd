"""A second set of weights for an engine: the policy in another dtype, refreshed in place."""

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


def merged_copy(policy: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The policy's weights in another dtype, adapters merged, in evaluation mode and without gradients.

    Buffers keep their dtype: rotary frequencies lose too much in 16 bits.
    """
    model = copy.deepcopy(policy)
    if has_adapters(model):
        model = model.merge_and_unload()  # type: ignore[operator]
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    return model.requires_grad_(False).eval()


@torch.no_grad()
def refresh_(model: nn.Module, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Overwrite the weights, casting to the model's dtype.

    Args:
        model: what `merged_copy` returned.
        named_tensors: every weight by its name; of tied weights one name is enough.

    Raises:
        RuntimeError: a name is no weight of the model, or a weight of the model was not among them.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    targets = dict(model.named_buffers()) | parameters
    written: set[int] = set()
    for name, tensor in named_tensors:
        if name not in targets:
            raise RuntimeError(f"the engine's copy has no weight named {name!r}; was another policy bound?")
        targets[name].copy_(tensor)
        written.add(id(targets[name]))
    missing = [name for name, parameter in parameters.items() if id(parameter) not in written]
    if missing:
        raise RuntimeError(
            f"{len(missing)} weights of the engine's copy were not synced, {missing[0]!r} first."
        )


def has_adapters(policy: nn.Module) -> bool:
    """True for a PeftModel. Told by its methods, so that peft need not be installed."""
    return hasattr(policy, "merge_and_unload") and hasattr(policy, "get_base_model")


def base_of(policy: nn.Module) -> Any:
    """The Hugging Face model itself; adapters inside it stay active."""
    return policy.get_base_model() if has_adapters(policy) else policy  # type: ignore[operator]
