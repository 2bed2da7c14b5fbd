"""KillPoint: stops a run at a chosen moment of a chosen phase, so that it can be killed there for certain."""

import json
import os
import sys
import time
from collections import Counter
from contextlib import contextmanager

import lightning as L

from lit_rl.timing import Clock


class KillPoint(L.Callback):
    """Announces one moment of a run on a pipe and waits there for its end.

    Moments are counted in calls of functions, Python's and C's, so that any place in a phase can be hit: in
    the middle of a file that is written, between two of them, before a rename. Without a place to stop at it
    counts how many there are.

    Args:
        pipe: number of an open descriptor to write to.
        phase: of the step: generate, score, update, save, validate. None counts.
        step: the iteration, from 0.
        call: which call in that phase and step.
    """

    def __init__(self, pipe: int, phase: str | None = None, step: int = 0, call: int = 0) -> None:
        self.pipe, self.phase, self.step, self.call = pipe, phase, step, call
        self.calls: Counter[str] = Counter()

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if not isinstance(pl_module.clock, WatchedClock):
            pl_module.clock = WatchedClock(self, trainer)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "fit" and self.phase is None:
            os.write(self.pipe, json.dumps(self.calls).encode() + b"\n")

    def watch(self, phase: str, step: int):
        """Count the calls of a phase; at the chosen one announce it and wait for the end."""
        name = f"{phase} {step}"

        def count(frame, event, argument) -> None:
            self.calls[name] += 1
            if self.phase == phase and self.step == step and self.calls[name] == self.call:
                sys.setprofile(None)
                place = f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"
                line = {"phase": phase, "step": step, "call": self.call, "place": place, "pid": os.getpid()}
                os.write(self.pipe, json.dumps(line).encode() + b"\n")
                time.sleep(3600)

        return count


class WatchedClock(Clock):
    """A clock that also watches what runs in its phases; in nested ones the inner one counts."""

    def __init__(self, point: KillPoint, trainer: L.Trainer) -> None:
        super().__init__()
        self.point, self.trainer = point, trainer

    @contextmanager
    def __call__(self, phase: str):
        before = sys.getprofile()
        with super().__call__(phase):
            sys.setprofile(self.point.watch(phase, self.trainer.global_step))
            try:
                yield
            finally:
                sys.setprofile(before)
