"""FolderCheckpointIO: what each part of a checkpoint means to the trainer."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import CheckpointIO
from safetensors import SafetensorError

from lit_rl.checkpoint.codec import encode_tree, read_tree, write_tree
from lit_rl.checkpoint.folder import FORMAT, atomic_folder, remove_folder, verify, write_manifest
from lit_rl.errors import ConfigError, StorageError

PARTS = ("model", "optimizer", "extra")

Check = Callable[[dict[str, Any], dict[str, Any]], None]

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
                manifest; "extra_files": a function that writes more into the temporary folder it is given;
                "start": a function that is handed the writing, to do it later; the contents are copied first.

        Raises:
            StorageError: the folder cannot be written; nothing of it is left, and others are as they were.
        """
        options = storage_options or {}
        wanted = options.get("contents", self.save_contents)
        contents = [part for part in (*PARTS, "hf_model") if part in wanted]
        trees = _trees(checkpoint, contents)
        entries = {
            "format": FORMAT,
            "step": checkpoint["global_step"],
            "contents": contents,
            **options.get("manifest", {}),
        }
        files = options.get("extra_files", lambda folder: None)
        if "start" not in options:
            pieces = ((name, *encode_tree(tree)) for name, tree in trees.items())
            return _write(Path(path), pieces, files, entries)
        copies = [(name, *encode_tree(tree, copied=True)) for name, tree in trees.items()]
        return options["start"](lambda: _write(Path(path), copies, files, entries))

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
        checkpoint = read_tree(folder, "state")
        if "extra" not in contents:
            checkpoint = {key: value for key, value in checkpoint.items() if key in _ALWAYS}
        checkpoint.setdefault("lr_schedulers", [])
        checkpoint["state_dict"] = read_tree(folder, "model") if "model" in contents else {}
        checkpoint["optimizer_states"] = read_tree(folder, "optimizer") if "optimizer" in contents else []
        if self.check is not None:
            self.check(manifest, checkpoint)
        return checkpoint

    def remove_checkpoint(self, path: str | Path) -> None:
        """Delete a folder."""
        remove_folder(Path(path))


def _trees(checkpoint: dict[str, Any], contents: list[str]) -> dict[str, Any]:
    """What goes into which pair of files."""
    trees: dict[str, Any] = {}
    if "model" in contents:
        trees["model"] = dict(checkpoint["state_dict"])
    if "optimizer" in contents:
        trees["optimizer"] = checkpoint["optimizer_states"]
    trees["state"] = {
        key: value
        for key, value in checkpoint.items()
        if key not in ("state_dict", "optimizer_states") and ("extra" in contents or key in _ALWAYS)
    }
    return trees


def _write(target: Path, pieces: Any, files: Callable[[Path], None], entries: dict[str, Any]) -> None:
    try:
        with atomic_folder(target) as folder:
            for name, structure, tensors in pieces:
                write_tree(folder, name, structure, tensors)
            files(folder)
            write_manifest(folder, entries)
    except (OSError, SafetensorError) as error:
        raise StorageError(
            f"The checkpoint {target} could not be written: {error}. Nothing of it is left and earlier ones "
            "are as they were; make room, or set checkpoint.default_local_dir to another folder, and start "
            "the same command again."
        ) from error
