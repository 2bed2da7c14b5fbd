"""Which parameters train, and in which optimizer group."""

import re
from typing import Any

import torch
from torch import nn

from lit_rl.errors import ConfigError

_ROUTER = re.compile(r"(^|\.)(gate|router)(\.|$)")


def trainable_parameters(policy: nn.Module) -> list[nn.Parameter]:
    """Parameters that require a gradient, each once.

    Raises:
        ConfigError: there are none, so nothing would be learnt.
    """
    parameters = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    if not parameters:
        raise ConfigError("model.* leaves no trainable parameter (found 0); unfreeze some or set model.lora.")
    return parameters


def decay_groups(policy: nn.Module) -> list[dict[str, Any]]:
    """Optimizer groups of the trainable parameters: matrices take its decay, norms and biases none.

    Norms and biases are the vectors, and any tensor named bias (the experts of a layer hold theirs together).
    Empty groups are left out.

    Args:
        policy: the model that trains.

    Raises:
        ConfigError: nothing is trainable.
    """
    trainable_parameters(policy)
    named = [(name, p) for name, p in policy.named_parameters() if p.requires_grad]
    plain = [p for name, p in named if p.ndim < 2 or name.endswith("bias")]
    excluded = {id(p) for p in plain}
    decayed = [p for _, p in named if id(p) not in excluded]
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": plain, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def freeze_routers_(policy: nn.Module) -> None:
    """Take the gradient off every mixture-of-experts router, adapters on it included.

    Raises:
        ConfigError: the model has no router.
    """
    routers = [p for name, p in policy.named_parameters() if _ROUTER.search(name)]
    if not routers:
        raise ConfigError(
            f"model.freeze_moe_router needs a mixture of experts (found {type(policy).__name__}, without "
            "a router); set it to false."
        )
    for parameter in routers:
        parameter.requires_grad_(False)


def logps_dtype(model: nn.Module) -> torch.dtype:
    """Of the log-probabilities that a model gives: float32, or float64 where its parameters are."""
    return torch.promote_types(next(model.parameters()).dtype, torch.float32)
