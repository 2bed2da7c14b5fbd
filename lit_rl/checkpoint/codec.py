"""A tree of plain values and tensors as a .json and a .safetensors; nothing in either can run code."""

import json
import math
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor


def encode_tree(tree: Any, *, copied: bool = False) -> tuple[Any, dict[str, Tensor]]:
    """A tree of values and tensors as JSON-able structure and named tensors; the inverse of `decode_tree`.

    Args:
        tree: dict with str or int keys, list, tuple, tensor, int, float, bool, str and None, nested.
            Tensors that are one and the same memory are kept once.
        copied: no tensor shares memory with the tree, so that the tree may change afterwards.

    Returns:
        The structure, and CPU tensors by the name it calls them.

    Raises:
        TypeError: anything else, with its place in the tree.
    """
    encoder = _Encoder(copied)
    return encoder.encode(tree, ()), encoder.tensors


class _Encoder:
    """Walks a tree once; collects its tensors under the path that leads to them."""

    def __init__(self, copied: bool) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._copied = copied
        self._names: dict[tuple, str] = {}
        self._storages: set[int] = set()

    def encode(self, node: Any, path: tuple) -> Any:
        if node is None or type(node) in (bool, int, str):
            return node
        if type(node) is float:
            return node if math.isfinite(node) else {"$float": repr(node)}
        if isinstance(node, Tensor):
            return {"$tensor": self._name(node, path)}
        if type(node) is list:
            return [self.encode(item, (*path, i)) for i, item in enumerate(node)]
        if type(node) is tuple:
            return {"$tuple": [self.encode(item, (*path, i)) for i, item in enumerate(node)]}
        if type(node) in (dict, OrderedDict):
            return self._encode_dict(node, path)
        raise TypeError(
            f"A checkpoint holds plain values and tensors only; {_place(path)} is a {type(node).__name__}: "
            f"{node!r:.80}"
        )

    def _encode_dict(self, node: dict, path: tuple) -> Any:
        for key in node:
            if type(key) not in (str, int):
                raise TypeError(f"Keys in a checkpoint are str or int; {_place(path)} has {key!r}.")
        items = {key: self.encode(value, (*path, key)) for key, value in node.items()}
        if all(isinstance(key, str) and not key.startswith("$") for key in items):
            return items
        return {"$dict": [[key, value] for key, value in items.items()]}

    def _name(self, tensor: Tensor, path: tuple) -> str:
        """The name under which the tensor is kept."""
        if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
            raise TypeError(
                f"Only plain dense tensors can be kept; {_place(path)} is a {type(tensor).__name__}."
            )
        same = (tensor.data_ptr(), tensor.device, tensor.dtype, tuple(tensor.shape), tensor.stride())
        if tensor.numel() and same in self._names:
            return self._names[same]
        name = "/".join(str(part) for part in path) or "tensor"
        while name in self.tensors:
            name += "'"
        kept = tensor.detach().cpu().contiguous()
        storage = kept.untyped_storage().data_ptr()
        is_shared = self._copied and kept.data_ptr() == tensor.data_ptr()
        if is_shared or storage in self._storages:  # the latter: a view of memory that is kept already
            kept = kept.clone()
        self._storages.add(storage)
        self.tensors[name] = kept
        self._names[same] = name
        return name


def decode_tree(structure: Any, tensors: dict[str, Tensor]) -> Any:
    """What `encode_tree` was given; parameters come back as tensors, an OrderedDict as dict."""
    if isinstance(structure, list):
        return [decode_tree(item, tensors) for item in structure]
    if not isinstance(structure, dict):
        return structure
    if len(structure) == 1:
        (key, value), *_ = structure.items()
        if key == "$float":
            return float(value)
        if key == "$tensor":
            return tensors[value]
        if key == "$tuple":
            return tuple(decode_tree(item, tensors) for item in value)
        if key == "$dict":
            return {k: decode_tree(v, tensors) for k, v in value}
    return {key: decode_tree(value, tensors) for key, value in structure.items()}


def _place(path: tuple) -> str:
    return "checkpoint" + "".join(f"[{part!r}]" for part in path)


def write_tree(folder: Path, name: str, structure: Any, tensors: dict[str, Tensor]) -> None:
    """Write what `encode_tree` made as `name`.json and `name`.safetensors."""
    (folder / f"{name}.json").write_text(json.dumps(structure, allow_nan=False), "utf-8")
    save_file(tensors, folder / f"{name}.safetensors")


def read_tree(folder: Path, name: str) -> Any:
    """The tree that was written as `name`."""
    # Cloned, so that nothing in training lies in a memory-mapped file (and at its alignment).
    tensors = {key: value.clone() for key, value in load_file(folder / f"{name}.safetensors").items()}
    return decode_tree(json.loads((folder / f"{name}.json").read_text("utf-8")), tensors)
