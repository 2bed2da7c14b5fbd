"""Wall-clock time and memory by phase."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch


class Clock:
    """Seconds spent in each named phase, in this step and in the whole run, and memory at its end.

    The phases of a step are generate, score, teacher, update, validate, save. A phase inside another one is
    taken out of the outer one, so that the parts add up.
    """

    def __init__(self) -> None:
        self.total: dict[str, float] = defaultdict(float)
        self.step: dict[str, float] = defaultdict(float)
        self.memory: dict[str, float] = {}
        self._inner: list[float] = []

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        self._inner.append(0.0)
        try:
            yield
        finally:
            elapsed = time.perf_counter() - start
            own = elapsed - self._inner.pop()
            self.total[phase] += own
            self.step[phase] += own
            self.memory[phase] = used_gb()
            if self._inner:
                self._inner[-1] += elapsed

    def lap(self) -> dict[str, float]:
        """Seconds by phase since the last lap."""
        lap, self.step = dict(self.step), defaultdict(float)
        return lap


def used_gb() -> float:
    """Memory in 1e9 bytes: with CUDA what is allocated on the device, else what is resident."""
    if torch.cuda.is_available():
        return torch.cuda.memory_allocated() / 1e9
    return psutil.Process().memory_info().rss / 1e9
