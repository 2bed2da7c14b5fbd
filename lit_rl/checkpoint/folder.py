"""Folders that are whole or not there: atomic writing, the manifest, and which one is the newest."""

import hashlib
import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lit_rl.errors import DataError

FORMAT = 1
MANIFEST = "manifest.json"
TEMPORARY = ".tmp-"


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


def size(folder: Path) -> int:
    """Bytes of the files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def verify(folder: Path) -> dict[str, Any]:
    """The manifest of a whole and undamaged checkpoint.

    Raises:
        DataError: no manifest, another format, or a file that is missing or not as it was written.
    """
    if not folder.is_dir():
        raise DataError(f"{folder} is not a checkpoint folder. (Pickled checkpoint files are never read.)")
    manifest = read_manifest(folder)
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
    return sorted(found, key=lambda path: ((read_manifest(path) or {}).get("written", -math.inf), path.name))


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


def write_manifest(folder: Path, entries: dict[str, Any]) -> None:
    """Put the manifest beside all other files of a folder, with their sizes and hashes."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    facts = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        for path in files
    }
    content = {**entries, "written": time.time(), "files": facts}
    (folder / MANIFEST).write_text(json.dumps(content, indent=1), "utf-8")


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest as it stands, unchecked; None where there is no readable one."""
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
