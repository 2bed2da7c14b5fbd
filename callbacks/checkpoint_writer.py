"""CheckpointWriter: one checkpoint at a time becomes complete, here and in the remote folder."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lit_rl.checkpoint import list_checkpoints, remove_folder
from lit_rl.checkpoint.background import Background
from lit_rl.checkpoint.folder import size
from lit_rl.checkpoint.remote import RemoteFolder

BEST = "best"


@dataclass
class Saving:
    """One checkpoint on its way."""

    folder: Path
    step: int
    begin: float = field(default_factory=time.perf_counter)
    held: float = 0.0
    """Seconds for which training stood still."""
    complete: float = 0.0
    """Seconds until the checkpoint was complete here."""
    bytes: int = 0


class CheckpointWriter:
    """Writes at once or beside training, then removes old checkpoints, then uploads beside training.

    Args:
        folder: of the checkpoints.
        remote: where copies go; None = nowhere.
        max_to_keep: newest ones kept, here and there; None = all.
        is_async: write beside training.
    """

    def __init__(
        self, folder: Path, remote: RemoteFolder | None, max_to_keep: int | None, is_async: bool
    ) -> None:
        self.folder, self.remote = folder, remote
        self.max_to_keep, self.is_async = max_to_keep, is_async
        self._background = Background("checkpoint")
        self._saving: Saving | None = None

    def write(
        self,
        saving: Saving,
        save: Callable[[dict[str, Any]], None],
        *,
        is_writer: bool,
        uploads: bool,
    ) -> None:
        """Save one checkpoint.

        Args:
            saving: filled in as it gets on.
            save: hands the contents to the trainer, with further storage options; on every rank.
            is_writer: this rank writes.
            uploads: and copies to the remote folder.

        Raises:
            StorageError: the one before it, or this one if it is written at once, could not be written.
        """
        uploads = uploads and self.remote is not None
        if self.is_async:
            finish = self._finish
            save({"start": lambda write: self._background.start(lambda: finish(saving, uploads, write))})
        else:
            save({})
        if not is_writer:
            return
        self._saving = saving
        if not self.is_async:
            self._finish(saving, False)
            if uploads:
                self._background.start(lambda: self._upload(saving.folder))

    def check(self) -> None:
        """Raise the error of what was written beside training; does not wait."""
        self._background.check()

    def wait(self) -> None:
        """Wait for what is written beside training, and raise its error."""
        self._background.wait()

    def close(self) -> None:
        """Wait, and end the thread."""
        self._background.close()

    def finished(self) -> Saving | None:
        """The checkpoint that has become complete since the last call."""
        if self._saving is None or not self._background.is_idle:
            return None
        saving, self._saving = self._saving, None
        return saving

    def _finish(self, saving: Saving, uploads: bool, write: Callable[[], None] | None = None) -> None:
        if write is not None:
            write()
        saving.bytes = size(saving.folder)
        saving.complete = time.perf_counter() - saving.begin
        if self.max_to_keep is not None and saving.folder.name != BEST:
            for old in list_checkpoints(self.folder)[: -self.max_to_keep]:
                remove_folder(old)
        if uploads:
            self._upload(saving.folder)

    def _upload(self, folder: Path) -> None:
        assert self.remote is not None
        self.remote.upload(folder)
        if self.max_to_keep is not None and folder.name != BEST:
            for old in self.remote.names()[: -self.max_to_keep]:
                self.remote.remove(old)
