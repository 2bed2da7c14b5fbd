"""What a pass over a model takes in memory: its tensors, followed by storage while it runs.

On the meta device a pass makes tensors without numbers in them, so that a model of any size can be followed
through forward and backward in a second, before its weights are read.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class TensorMemory(TorchDispatchMode):
    """Bytes of the tensors that operations inside make, each storage until it is freed.

    What an operation needs for itself and frees before it returns is not seen. What was there before, such as
    weights, does not count.

    Attributes:
        peak: bytes alive at once, at most.
        largest: bytes of the largest storage.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = self.largest = self._alive = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tree_iter((args, kwargs)):
            if isinstance(tensor, Tensor):
                self._follow(tensor, is_new=False)
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, Tensor):
                self._follow(tensor, is_new=True)
        return out

    def _follow(self, tensor: Tensor, *, is_new: bool) -> None:
        # What oneDNN has laid out in its own way has no storage, and no views that share one.
        storage: Any = tensor if tensor.is_mkldnn else tensor.untyped_storage()
        key = id(tensor) if tensor.is_mkldnn else storage._cdata
        size = tensor.numel() * tensor.element_size() if tensor.is_mkldnn else storage.nbytes()
        size = size if is_new else 0
        if key in self._known:
            return
        self._known.add(key)
        self._alive += size
        self.largest, self.peak = max(self.largest, size), max(self.peak, self._alive)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._alive -= size


class MetaPass(TorchFunctionMode):
    """Lets a model run on the meta device.

    Attention is that of fused kernels, which keep no matrix of tokens by tokens. What a model asks about
    values (is there padding, are sequences packed) is answered as it is for rows without padding.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if not args or not isinstance(args[0], Tensor) or args[0].device.type != "meta":
            return func(*args, **kwargs)
        if func is Tensor.__bool__:
            return True
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        kwargs.pop("enable_gqa", None)
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*args, **kwargs)[0]


def peak_of(work: Callable[[], object]) -> int:
    """Bytes of tensors that the work makes, at most at once.

    Args:
        work: runs on models of the meta device.
    """
    with TensorMemory() as memory, MetaPass():
        work()
    return memory.peak


def parameter_bytes(model: nn.Module, *, is_trained: bool = False) -> int:
    """Bytes of the parameters and buffers, shared ones once.

    Args:
        model: any.
        is_trained: only parameters that require a gradient.
    """
    if is_trained:
        return sum(_bytes(parameter) for parameter in model.parameters() if parameter.requires_grad)
    return sum(_bytes(tensor) for tensor in (*model.parameters(), *model.buffers()))


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
