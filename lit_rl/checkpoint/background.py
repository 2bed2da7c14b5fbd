"""Background: one job beside training."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class Background:
    """Runs one job at a time in a thread; what it raises is raised by the next call here.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._pool: ThreadPoolExecutor | None = None
        self._job: Future[None] | None = None

    def start(self, job: Callable[[], None]) -> None:
        """Begin a job; waits for the one before it, so that at most one is in flight."""
        self.wait()
        if self._pool is None:
            self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=self._name)
        self._job = self._pool.submit(job)

    @property
    def is_idle(self) -> bool:
        """Nothing is running, and nothing failed that has not been raised yet."""
        return self._job is None

    def check(self) -> None:
        """Raise the error of a job that has ended; does not wait."""
        if self._job is not None and self._job.done():
            self.wait()

    def wait(self) -> None:
        """Wait for the job in flight, and raise its error."""
        job, self._job = self._job, None
        if job is not None:
            job.result()

    def close(self) -> None:
        """Wait, and end the thread. It starts again when needed."""
        try:
            self.wait()
        finally:
            if self._pool is not None:
                self._pool.shutdown()
            self._pool = None
