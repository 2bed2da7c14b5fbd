"""Wall-clock time by phase."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Seconds spent in each named phase, in this step and in the whole run.

    The phases of a step are generate, score, teacher, update, validate, save. A phase inside another one is
    taken out of the outer one, so that the parts add up.
    """

    def __init__(self) -> None:
        self.total: dict[str, float] = defaultdict(float)
        self.step: dict[str, float] = defaultdict(float)
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
            if self._inner:
                self._inner[-1] += elapsed

    def lap(self) -> dict[str, float]:
        """Seconds by phase since the last lap."""
        lap, self.step = dict(self.step), defaultdict(float)
        return lap
