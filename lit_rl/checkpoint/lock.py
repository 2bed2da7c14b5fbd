"""FolderLock: one process writes to a folder of checkpoints."""

import errno
import fcntl
import os
import socket
from pathlib import Path

from lit_rl.errors import ConfigError, StorageError


class FolderLock:
    """An exclusive lock on a folder, held by this process until it is released or the process ends.

    It is a record lock: unlike one on an open file it is not inherited by forked loader workers, which may
    outlive a killed run for a while.

    Args:
        folder: made when missing.
        name: of the lock's file.
    """

    def __init__(self, folder: Path, name: str = ".lock") -> None:
        self.folder = folder
        self._file = folder / name
        self._descriptor: int | None = None

    def acquire(self, *, wait: bool = False) -> None:
        """Take the lock; holding it already is fine.

        Args:
            wait: until its holder releases it, instead of raising.

        Raises:
            ConfigError: another process holds it.
            StorageError: the folder cannot be written to.
        """
        while self._descriptor is None:
            descriptor = self._opened()
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except OSError as error:
                holder = os.pread(descriptor, 200, 0).decode(errors="replace") or "another process"
                os.close(descriptor)
                if error.errno not in (errno.EACCES, errno.EAGAIN):
                    raise StorageError(f"{self.folder} cannot be locked: {error}.") from error
                raise ConfigError(
                    f"checkpoint.default_local_dir must be a folder of its own (found {str(self.folder)!r}, "
                    f"to which {holder} is writing); wait for it to end, or take another run_dir."
                ) from error
            if self._is_current(descriptor):
                self._descriptor = descriptor
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
            else:  # its holder has just removed it
                os.close(descriptor)

    def release(self) -> None:
        """Give the lock back and remove its file."""
        if self._descriptor is not None:
            self._file.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = None

    def _opened(self) -> int:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            return os.open(self._file, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise StorageError(
                f"checkpoint.default_local_dir cannot be written to (found {str(self.folder)!r}): "
                f"{error.strerror}; set it, or run_dir, to a folder that can."
            ) from error

    def _is_current(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), os.stat(self._file))
        except FileNotFoundError:
            return False
