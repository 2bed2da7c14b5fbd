"""Lookahead: the next step's completions, written while this step trains."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from lit_rl.batch import RolloutBatch


class Lookahead:
    """One generation under way in a thread beside the trainer's.

    Its engine must be outside this process, and keep its weights until the generation has ended: whoever
    changes them calls `wait` first.
    """

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._pending: tuple[list[int], Future[RolloutBatch]] | None = None

    def start(self, prompts: RolloutBatch, write: Callable[[], RolloutBatch]) -> None:
        """Have completions written.

        Args:
            prompts: P rows of the next step.
            write: returns them with completions.
        """
        assert self._pending is None
        self._thread = self._thread or ThreadPoolExecutor(max_workers=1)
        self._pending = (prompts.prompt_row.tolist(), self._thread.submit(write))

    def wait(self) -> None:
        """Let the generation end; what it wrote stays."""
        if self._pending is not None:
            self._pending[1].exception()

    def take(self, prompts: RolloutBatch) -> RolloutBatch | None:
        """What was written for these prompts, once; None where nothing was.

        Raises:
            Exception: whatever the generation ended with.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        rows, written = pending
        rollout = written.result()
        return rollout if rows == prompts.prompt_row.tolist() else None

    def close(self) -> None:
        """Let the generation end and forget it."""
        self.wait()
        self._pending = None
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
