"""Shared memory that a killed vLLM leaves behind, and that the next engine in process would stumble over."""

import os
from collections.abc import Iterator
from pathlib import Path

PATTERN = "*-cpushm_*"
"""What vLLM's tensor parallel workers on a CPU call it."""


def remove_leftovers(folder: Path = Path("/dev/shm"), processes: Path = Path("/proc")) -> list[str]:
    """Remove this user's segments that no process holds any more.

    Args:
        folder: where shared memory has its files.
        processes: where the system lists its processes.

    Returns:
        The names removed.
    """
    found = {str(path): path for path in folder.glob(PATTERN) if _is_own(path)}
    held = set(_held(processes)) if found else set()
    gone = [path for name, path in found.items() if name not in held]
    for path in gone:
        path.unlink(missing_ok=True)
    return [path.name for path in gone]


def _is_own(path: Path) -> bool:
    """Whether it is this user's; what another engine removes meanwhile is nobody's."""
    try:
        return path.stat().st_uid == os.geteuid()
    except FileNotFoundError:
        return False


def _held(processes: Path) -> Iterator[str]:
    """Files that a process has open or mapped; one that ends meanwhile holds none."""
    for process in processes.glob("[0-9]*"):
        try:
            for line in (process / "maps").read_text().splitlines():
                yield line.split(maxsplit=5)[-1]
            for link in (process / "fd").iterdir():
                yield os.readlink(link)
        except OSError:
            continue
