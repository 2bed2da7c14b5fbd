"""Linear layers for products of few rows on a CPU: weights laid out as oneDNN's kernels read them.

A product of 8 or 16 rows takes half to two thirds of the time that it takes with the weights as they lie. The
prepacked copies live while completions are written, when there are no gradients, and are made anew each time.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

_LEAST_WEIGHTS = 100_000
"""Of a layer. Below, calling the product costs more than it saves."""

_ROWS = 16
"""That the layout is chosen for; it serves any number of rows."""


@contextmanager
def prepacked(model: nn.Module) -> Iterator[None]:
    """The linear layers of a model compute with prepacked weights inside, where that is faster; no gradients.

    The weights must not change meanwhile. Results differ from the layers' own by rounding.
    """
    layers = [layer for layer in _large(model) if layer.weight.is_cpu and _serves(layer.weight.dtype)]
    own = [layer.__dict__.get("forward") for layer in layers]
    try:
        for layer in layers:
            weight = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), _ROWS)
            layer.forward = partial(_product, weight, layer.bias)  # type: ignore[method-assign]
        yield
    finally:
        for layer, forward in zip(layers, own, strict=True):
            layer.__dict__.pop("forward", None)
            if forward is not None:
                layer.forward = forward  # type: ignore[method-assign]


def prepacked_bytes(model: nn.Module, dtype: torch.dtype) -> int:
    """What the copies of a model's weights take on a CPU when it decodes in this dtype."""
    return sum(layer.weight.numel() for layer in _large(model)) * dtype.itemsize if _serves(dtype) else 0


def _large(model: nn.Module) -> list[nn.Linear]:
    """The plain layers, whole on this process, with enough weights."""
    return [
        layer
        for layer in model.modules()
        if type(layer) is nn.Linear
        and ("forward" not in layer.__dict__ or hasattr(layer.forward, "is_plain_without_gradient"))
        and type(layer.weight.data) is Tensor
        and layer.weight.numel() >= _LEAST_WEIGHTS
    ]


def _product(weight: Tensor, bias: Tensor | None, hidden: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(hidden, weight, bias, "none", [], "")


def _serves(dtype: torch.dtype) -> bool:
    """Whether this build and this processor have the products."""
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled):
        return False
    if dtype is torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype is torch.float32
