"""Optimizer states that are no plain tensors, such as torchao's moments of 8 bits, in a checkpoint and back.

A checkpoint holds plain tensors and values only, so such a state goes into it as its parts, under the name of
its class. Only classes of the packages named here are made again.
"""

import importlib
from typing import Any

import torch
from torch import Tensor

from lit_rl.errors import DataError

CLASS, PACKAGES = "class_of_parts", ("torchao.",)


def packed(tree: Any) -> Any:
    """The tree with each tensor of a subclass as a dictionary of its parts.

    Args:
        tree: nested dictionaries and lists, as an optimizer's `state_dict`.
    """
    if isinstance(tree, dict):
        return {key: packed(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [packed(value) for value in tree]
    if not isinstance(tree, Tensor) or not hasattr(tree, "__tensor_flatten__"):
        return tree
    names, context = tree.__tensor_flatten__()
    kind = type(tree)
    return {
        CLASS: f"{kind.__module__}.{kind.__qualname__}",
        "parts": {name: getattr(tree, name) for name in names},
        "context": [_plain(value) for value in context],
        "size": list(tree.shape),
        "stride": list(tree.stride()),
    }


def unpacked(tree: Any) -> Any:
    """What `packed` was given.

    Raises:
        DataError: a class of another package.
    """
    if isinstance(tree, list):
        return [unpacked(value) for value in tree]
    if not isinstance(tree, dict):
        return tree
    if CLASS not in tree:
        return {key: unpacked(value) for key, value in tree.items()}
    path = tree[CLASS]
    if not path.startswith(PACKAGES):
        raise DataError(f"The checkpoint holds optimizer states of {path}, which are not read; start afresh.")
    module, _, name = path.rpartition(".")
    kind = getattr(importlib.import_module(module), name)
    context = [_as_it_was(value) for value in tree["context"]]
    return kind.__tensor_unflatten__(tree["parts"], context, torch.Size(tree["size"]), tuple(tree["stride"]))


def _plain(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    return list(value) if isinstance(value, torch.Size) else value


def _as_it_was(value: Any) -> Any:
    if isinstance(value, dict):
        return getattr(torch, value["dtype"])
    return torch.Size(value) if isinstance(value, list) else value
