"""How reward functions are called: one after another, or in processes; each call within a time limit."""

import multiprocessing
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from lit_rl.errors import ConfigError
from lit_rl.rewards.reward import Reward, Sample
from lit_rl.time_limit import OutOfTime, limited, time_limit

MANAGERS = ("naive", "prime")
GRACE = 5.0
"""Seconds beyond the limit after which a worker that does not react is killed."""

Call = Callable[[list[Sample]], Any]


class RewardManager(ABC):
    """Calls reward functions.

    Args:
        functions: by name.
        timeout: seconds per call.
    """

    def __init__(self, functions: dict[str, Reward], timeout: float) -> None:
        self.functions, self.timeout = functions, timeout

    @abstractmethod
    def call(self, name: str) -> Call:
        """The function of that name, as something to call with samples that raises OutOfTime."""

    @abstractmethod
    def close(self) -> None:
        """End what runs beside this process."""


class Naive(RewardManager):
    """One function after another, in this process."""

    def call(self, name: str) -> Call:
        function, timeout = self.functions[name], self.timeout

        return lambda samples: limited(lambda: function(samples), timeout)

    def close(self) -> None:
        """Nothing runs beside this process."""


class Prime(RewardManager):
    """The rows of a batch in shares, one per worker process (source: verl's reward manager `prime`).

    Workers are forked from this process, so that functions of any kind work in them. One that hangs where no
    signal reaches is killed.

    Args:
        functions: by name.
        timeout: seconds per call.
        num_workers: processes.
    """

    def __init__(self, functions: dict[str, Reward], timeout: float, num_workers: int) -> None:
        super().__init__(functions, timeout)
        self.num_workers = num_workers
        self._pool: Any = None

    def call(self, name: str) -> Call:
        def shared(samples: list[Sample]) -> list[Any]:
            size = max(-(-len(samples) // self.num_workers), 1)
            shares = [samples[start : start + size] for start in range(0, len(samples), size)]
            pool = self._workers()
            pending = [pool.apply_async(_in_worker, (name, share, self.timeout)) for share in shares]
            try:
                return [value for share in pending for value in share.get(self.timeout + GRACE)]
            except multiprocessing.TimeoutError:
                self.close()
                raise OutOfTime(
                    f"took longer than reward.timeout, {self.timeout:g} s, and was killed"
                ) from None

        return shared

    def close(self) -> None:
        """End the workers."""
        if self._pool is not None:
            self._pool.terminate()
            self._pool.join()
            self._pool = None

    def _workers(self) -> Any:
        if self._pool is None:
            context = multiprocessing.get_context("fork")
            # Until a worker has put its handlers in order, a SIGTERM of `close` has to wait: one of the
            # parent's handlers would take it, and `close` would wait for ever.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
            try:
                self._pool = context.Pool(self.num_workers, _remember, (self.functions,))
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return self._pool


def manager_of(
    reward_manager: str, functions: dict[str, Reward], *, num_workers: int, timeout: float
) -> RewardManager:
    """The manager of that name.

    Raises:
        ConfigError: an unknown name, or a number out of range.
    """
    if reward_manager not in MANAGERS:
        raise ConfigError(
            f"reward.reward_manager must be one of {', '.join(MANAGERS)} (found {reward_manager!r})."
        )
    if num_workers < 1 or timeout <= 0:
        raise ConfigError(
            f"reward.num_workers must be >= 1 (found {num_workers!r}) and reward.timeout > 0 "
            f"(found {timeout!r})."
        )
    if reward_manager == "prime":
        return Prime(functions, timeout, num_workers)
    return Naive(functions, timeout)


_FUNCTIONS: dict[str, Reward] = {}


def _remember(functions: dict[str, Reward]) -> None:
    """In a worker: keep what it was forked with; leave interrupts to the parent.

    A handler of SIGTERM that the parent has (to save at the end, say) is not the worker's: it would outlive
    the run.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    _FUNCTIONS.update(functions)


def _in_worker(name: str, samples: list[Sample], timeout: float) -> list[Any]:
    with time_limit(timeout):
        values = _FUNCTIONS[name](samples)
    return values if isinstance(values, list) else list(values)
