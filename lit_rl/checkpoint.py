"""Checkpoints as folders of JSON and safetensors: written whole or not at all, read without running code.

```
checkpoints/step_00000008/
  manifest.json                       format, step, who wrote it, what is in it, size and sha256 of every file
  model.json      model.safetensors       the policy
  optimizer.json  optimizer.safetensors   moments and parameter groups
  state.json      state.safetensors       counters, schedule, data position, callbacks, moving copies
  hf/                                 the policy as `from_pretrained` reads it, when asked for
```

A .json holds the structure and every plain value, and names the tensors in the .safetensors beside it. The
folder is written under a temporary name and renamed at the end, so a name that starts with `step_` is a
finished checkpoint. What each part means to the trainer stands in `FolderCheckpointIO`.
"""

import hashlib
import json
import math
import os
import re
import shutil
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from safetensors.torch import load_file, save_file
from torch import Tensor

from lit_rl.errors import ConfigError, DataError

FORMAT = 1
MANIFEST = "manifest.json"
TEMPORARY = ".tmp-"
PARTS = ("model", "optimizer", "extra")

Check = Callable[[dict[str, Any], dict[str, Any]], None]

# ------------------------------------------------------------------------------------------------------ codec


def encode_tree(tree: Any) -> tuple[Any, dict[str, Tensor]]:
    """A tree of values and tensors as JSON-able structure and named tensors; the inverse of `decode_tree`.

    Args:
        tree: dict with str or int keys, list, tuple, tensor, int, float, bool, str and None, nested.
            Tensors that are one and the same memory are kept once.

    Returns:
        The structure, and CPU tensors by the name it calls them.

    Raises:
        TypeError: anything else, with its place in the tree.
    """
    encoder = _Encoder()
    return encoder.encode(tree, ()), encoder.tensors


class _Encoder:
    """Walks a tree once; collects its tensors under the path that leads to them."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
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
        if storage in self._storages:  # another view of memory that is kept already
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


def _write_tree(folder: Path, name: str, tree: Any) -> None:
    structure, tensors = encode_tree(tree)
    _write_json(folder / f"{name}.json", structure)
    save_file(tensors, folder / f"{name}.safetensors")


def _read_tree(folder: Path, name: str) -> Any:
    # Cloned, so that nothing in training lies in a memory-mapped file (and at its alignment).
    tensors = {key: value.clone() for key, value in load_file(folder / f"{name}.safetensors").items()}
    return decode_tree(json.loads((folder / f"{name}.json").read_text("utf-8")), tensors)


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, allow_nan=False), "utf-8")


# ----------------------------------------------------------------------------------------------------- folder


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """A temporary folder beside `target` that takes its name when the block ends well, or vanishes.

    A process that is killed inside the block leaves the temporary folder behind; the next call removes it.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(target.parent)
    temporary = target.parent / f"{TEMPORARY}{target.name}"
    temporary.mkdir()
    try:
        yield temporary
        for path in [*temporary.rglob("*"), temporary]:
            _fsync(path)
        replaced = _set_aside(target) if target.exists() else None
        os.rename(temporary, target)
        _fsync(target.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    if replaced is not None:
        shutil.rmtree(replaced)


def remove_leftovers(folder: Path) -> None:
    """Delete what interrupted writers and removals left in a folder of checkpoints."""
    for leftover in folder.glob(f"{TEMPORARY}*"):
        shutil.rmtree(leftover)


def remove_folder(folder: Path) -> None:
    """Delete a checkpoint; at no moment is a part of it there under its name."""
    shutil.rmtree(_set_aside(folder))


def _set_aside(folder: Path) -> Path:
    aside = folder.parent / f"{TEMPORARY}removed-{folder.name}"
    os.rename(folder, aside)
    return aside


def verify(folder: Path) -> dict[str, Any]:
    """The manifest of a whole and undamaged checkpoint.

    Raises:
        DataError: no manifest, another format, or a file that is missing or not as it was written.
    """
    if not folder.is_dir():
        raise DataError(f"{folder} is not a checkpoint folder. (Pickled checkpoint files are never read.)")
    manifest = _manifest(folder)
    if manifest is None:
        raise DataError(f"{folder} is no complete checkpoint: it has no readable {MANIFEST}.")
    if manifest["format"] != FORMAT:
        raise DataError(f"{folder} has format {manifest['format']!r}; this version reads format {FORMAT}.")
    for name, facts in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            raise DataError(f"{folder} is damaged: {name} is missing.")
        if path.stat().st_size != facts["bytes"] or _sha256(path) != facts["sha256"]:
            raise DataError(f"{folder} is damaged: {name} is not what was written.")
    return manifest


def list_checkpoints(folder: Path) -> list[Path]:
    """The `step_*` folders in a folder, in the order in which they were written; unreadable ones come first.

    The order is that of writing, not of steps: after going back to step 4 of a run that had reached 8, step 6
    of the new course is newer than step 8 of the old one.
    """
    found = [path for path in folder.glob("step_*") if re.fullmatch(r"step_\d+", path.name) and path.is_dir()]
    return sorted(found, key=lambda path: ((_manifest(path) or {}).get("written", -math.inf), path.name))


def newest_complete(folder: Path, report: Callable[[str], None] | None = None) -> Path | None:
    """The checkpoint written last that passes `verify`; None when there is none.

    Args:
        folder: holds checkpoints; need not exist.
        report: told about each newer one that was passed over, and why.
    """
    for path in reversed(list_checkpoints(folder)):
        try:
            verify(path)
        except DataError as error:
            if report is not None:
                report(str(error))
            continue
        return path
    return None


def step_folder(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return folder / f"step_{step:08d}"


def _write_manifest(folder: Path, entries: dict[str, Any]) -> None:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    facts = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        for path in files
    }
    content = {**entries, "written": time.time(), "files": facts}
    (folder / MANIFEST).write_text(json.dumps(content, indent=1), "utf-8")


def _manifest(folder: Path) -> dict[str, Any] | None:
    try:
        return json.loads((folder / MANIFEST).read_text("utf-8"))
    except (OSError, ValueError):
        return None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --------------------------------------------------------------------------------------------- trainer's view

_ALWAYS = (
    "epoch",
    "global_step",
    "pytorch-lightning_version",
    "lit_rl",
    "hparams_name",
    "hyper_parameters",
    "datamodule_hparams_name",
    "datamodule_hyper_parameters",
)


class FolderCheckpointIO(CheckpointIO):
    """Lightning's checkpoint dictionary to and from a folder, so that `Trainer` saves and restores as usual.

    "model" is the dictionary's `state_dict`, "optimizer" its `optimizer_states`, "extra" the schedule, loops,
    callbacks and data position. What the module itself adds (`lit_rl`: counters, moving copies, names of
    weights left out) always goes with it. A part that is not there reads as empty, never as missing, since
    Lightning looks for the keys; without "extra" training starts at step 0.

    Args:
        save_contents: parts to write. "hf_model" is only noted: whoever saves writes it as "extra_files".
        load_contents: parts to read; None = all that the folder holds.
        check: called with (manifest, checkpoint) before anything is restored; raises when they do not fit.
    """

    def __init__(
        self,
        save_contents: tuple[str, ...] = PARTS,
        load_contents: tuple[str, ...] | None = None,
        check: Check | None = None,
    ) -> None:
        self.save_contents = save_contents
        self.load_contents = load_contents
        self.check = check

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: dict[str, Any] | None = None
    ) -> None:
        """Write a folder.

        Args:
            checkpoint: as `Trainer` dumps it.
            path: the folder; one that exists is replaced.
            storage_options: "contents": instead of `save_contents`; "manifest": further entries of the
                manifest; "extra_files": a function that writes more into the temporary folder it is given.
        """
        options = storage_options or {}
        wanted = options.get("contents", self.save_contents)
        contents = [part for part in (*PARTS, "hf_model") if part in wanted]
        with atomic_folder(Path(path)) as folder:
            if "model" in contents:
                _write_tree(folder, "model", dict(checkpoint["state_dict"]))
            if "optimizer" in contents:
                _write_tree(folder, "optimizer", checkpoint["optimizer_states"])
            state = {k: v for k, v in checkpoint.items() if k not in ("state_dict", "optimizer_states")}
            if "extra" not in contents:
                state = {key: value for key, value in state.items() if key in _ALWAYS}
            _write_tree(folder, "state", state)
            if "extra_files" in options:
                options["extra_files"](folder)
            entries = {"format": FORMAT, "step": checkpoint["global_step"], "contents": contents}
            _write_manifest(folder, entries | options.get("manifest", {}))

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a folder, after `verify`. Tensors come to the CPU; nothing in a folder can run code.

        Raises:
            DataError: the folder is incomplete or damaged, or `check` refuses it.
            ConfigError: `load_contents` asks for a part that it does not hold.
        """
        folder = Path(path)
        manifest = verify(folder)
        held = [part for part in manifest["contents"] if part in PARTS]
        contents = held if self.load_contents is None else self.load_contents
        if absent := [part for part in contents if part not in held]:
            raise ConfigError(f"checkpoint.load_contents asks for {absent}, but {folder} holds {held}.")
        checkpoint = _read_tree(folder, "state")
        if "extra" not in contents:
            checkpoint = {key: value for key, value in checkpoint.items() if key in _ALWAYS}
        checkpoint.setdefault("lr_schedulers", [])
        checkpoint["state_dict"] = _read_tree(folder, "model") if "model" in contents else {}
        checkpoint["optimizer_states"] = _read_tree(folder, "optimizer") if "optimizer" in contents else []
        if self.check is not None:
            self.check(manifest, checkpoint)
        return checkpoint

    def remove_checkpoint(self, path: str | Path) -> None:
        """Delete a folder."""
        remove_folder(Path(path))
