"""Values that linear layers do not keep for the backward pass: what they are made of is kept in their place.

A norm's value is a function of its input, and what is behind attention of the kernel's results, which that
keeps anyway. Such a value knows its origin; a linear layer that reads it computes it once more when the
gradient of the weight is due.
"""

from collections.abc import Callable
from types import MethodType

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

_ORIGIN = "_lit_rl_origin"  # attribute of a value: (_Again, its sources)


def with_origin(value: Tensor, function: Callable[..., Tensor], *sources: Tensor) -> Tensor:
    """The value itself, with what linear layers may keep in its place.

    Args:
        value: `function(*sources)`, contiguous.
        function: cheap, without random numbers.
        sources: tensors that the backward pass needs anyway.
    """
    if value.requires_grad and torch.is_grad_enabled():
        setattr(value, _ORIGIN, (_Again(function), sources))
    return value


def keep_origins_(model: nn.Module) -> None:
    """Let linear layers that read a value of known origin keep that instead.

    Args:
        model: any.
    """
    for layer in model.modules():
        if isinstance(layer, nn.Linear) and "forward" not in layer.__dict__:
            layer.forward = MethodType(_linear, layer)  # type: ignore[method-assign]


def _linear(self: nn.Linear, hidden: Tensor) -> Tensor:
    forward = MethodType(type(self).forward, self)
    whole = hidden if hidden._base is None else hidden._base
    origin = getattr(whole, _ORIGIN, None)
    keeps_input = torch.is_grad_enabled() and self.weight.requires_grad
    if origin is None or not keeps_input or hidden.numel() != whole.numel() or not hidden.is_contiguous():
        return forward(hidden)
    again, sources = origin
    again.readers += 1
    value, shape = [hidden], hidden.shape  # the forward pass takes it: nothing keeps it for the backward

    def product(*sources: Tensor) -> Tensor:
        return forward(value.pop() if value else again(*sources).view(shape))

    return checkpoint(product, *sources, use_reentrant=False, preserve_rng_state=False)


_linear.is_plain_without_gradient = True  # type: ignore[attr-defined]  # rollout.prepacked may replace it


class _Again:
    """A value that its readers do not keep. The first to need it in a backward computes it, for all of them.

    Args:
        function: what the value is of its sources.

    Attributes:
        readers: how many will ask, each with the same sources.
    """

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self.readers = self._waiting = 0
        self._function = function
        self._value: Tensor | None = None

    def __call__(self, *sources: Tensor) -> Tensor:
        """The value, as a leaf that requires a gradient."""
        value = self._value
        if value is None:
            with torch.no_grad():
                value = self._function(*sources)
            self._waiting = self.readers
        self._waiting -= 1
        self._value = value if self._waiting else None
        return value.detach().requires_grad_()
