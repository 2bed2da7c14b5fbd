"""Where a run starts from: the newest checkpoint here or in the remote folder, a named one, or nothing."""

import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lit_rl.checkpoint import list_checkpoints, newest_complete, verify
from lit_rl.checkpoint.folder import MANIFEST, read_manifest
from lit_rl.checkpoint.lock import FolderLock
from lit_rl.checkpoint.remote import RemoteFolder
from lit_rl.errors import ConfigError, DataError

FETCHED = ".resumed"
"""Beside the checkpoints of a run: the one of another run that it starts from, until it has been read."""


@rank_zero_only
def say(text: str) -> None:
    """Print a line, on rank 0."""
    print(text, flush=True)


def newest(folder: Path, remote: RemoteFolder | None) -> Path | None:
    """The checkpoint written last, out of a folder and its remote copies; brought here if it is not.

    Args:
        folder: of the run; need not exist.
        remote: None looks nowhere else.
    """
    local = newest_complete(folder, _passed_over)
    if remote is None:
        return local
    with _one_rank_at_a_time(folder):
        local = newest_complete(folder)  # another rank may have brought it
        for name in reversed(remote.names()):
            if _written(remote.manifest(name)) <= _written(None if local is None else read_manifest(local)):
                break
            try:
                return _fetched(remote, name, folder)
            except DataError as error:
                _passed_over(str(error))
    return local


def named(path: str, folder: Path) -> Path:
    """The checkpoint at a path or URL, or the newest one in it.

    Args:
        path: as the user gave it.
        folder: of the run; what comes from a URL is kept in `FETCHED` below it.

    Raises:
        ConfigError: there is nothing, or no complete checkpoint.
        DataError: the checkpoint that it names is damaged.
    """
    if "://" in path:
        return _named_remote(path, folder / FETCHED)
    place = Path(path)
    if not place.exists():
        raise ConfigError(f"checkpoint.resume_from_path does not exist (found {path!r}).")
    if not list_checkpoints(place):
        verify(place)
        return place
    found = newest_complete(place, _passed_over)
    if found is None:
        raise ConfigError(f"checkpoint.resume_from_path holds no complete checkpoint (found {path!r}).")
    return found


def forget_fetched(folder: Path) -> None:
    """Remove what `named` brought here."""
    shutil.rmtree(folder / FETCHED, ignore_errors=True)


def _named_remote(url: str, parent: Path) -> Path:
    above, _, name = url.rstrip("/").rpartition("/")
    with _one_rank_at_a_time(parent):
        itself = RemoteFolder(above, key="checkpoint.resume_from_path")
        if itself.manifest(name) is not None:
            return _fetched(itself, name, parent)
        remote = RemoteFolder(url, key="checkpoint.resume_from_path")
        for candidate in reversed(remote.names()):
            try:
                return _fetched(remote, candidate, parent)
            except DataError as error:
                _passed_over(str(error))
    raise ConfigError(
        f"checkpoint.resume_from_path holds no complete checkpoint (found {url!r}, without a {MANIFEST})."
    )


def _fetched(remote: RemoteFolder, name: str, parent: Path) -> Path:
    """The remote checkpoint here; brought only if it is not here already."""
    here = parent / name
    if here.exists() and _written(read_manifest(here)) == _written(remote.manifest(name)):
        try:
            verify(here)
            return here
        except DataError:
            pass  # damaged here: bring it again
    say(f"Fetching {remote.url}/{name} to {parent}.")
    return remote.fetch(name, parent)


@contextmanager
def _one_rank_at_a_time(folder: Path) -> Iterator[None]:
    lock = FolderLock(folder, name=".fetching")
    lock.acquire(wait=True)
    try:
        yield
    finally:
        lock.release()


def _written(manifest: dict | None) -> float:
    return -math.inf if manifest is None else manifest.get("written", -math.inf)


def _passed_over(why: str) -> None:
    say(f"Passed over: {why}")
