"""FaultPoint: makes something go wrong in a chosen step of a run."""

import os
import shutil
import signal
from pathlib import Path

import lightning as L
import psutil
import torch


class FaultPoint(L.Callback):
    """One fault, at the start of one step.

    Args:
        kind: nan_gradient, raising_reward, dead_worker, vanished_remote or sigterm.
        step: the iteration, from 0.
        place: for vanished_remote: the folder that vanishes.
    """

    def __init__(self, kind: str, step: int, place: str | None = None) -> None:
        self.fault = {
            "nan_gradient": self.nan_gradient,
            "raising_reward": self.raising_reward,
            "dead_worker": self.dead_worker,
            "vanished_remote": self.vanished_remote,
            "sigterm": self.sigterm,
        }[kind]
        self.step, self.place = step, place

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if trainer.global_step == self.step:
            self.fault(pl_module)

    def nan_gradient(self, pl_module: L.LightningModule) -> None:
        weight = next(pl_module.policy.parameters())
        weight.register_hook(lambda gradient: torch.full_like(gradient, torch.nan))

    def raising_reward(self, pl_module: L.LightningModule) -> None:
        os.environ["FAULT_POINT_REWARD"] = "raise"

    def dead_worker(self, pl_module: L.LightningModule) -> None:
        for child in psutil.Process().children():
            child.send_signal(signal.SIGKILL)

    def vanished_remote(self, pl_module: L.LightningModule) -> None:
        assert self.place is not None
        shutil.move(self.place, f"{self.place}.gone")
        Path(self.place).write_text("no folder any more")

    def sigterm(self, pl_module: L.LightningModule) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


REWARD = """
import os


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if os.environ.get("FAULT_POINT_REWARD"):
        raise RuntimeError("the sandbox is gone")
    return len(solution_str) / 10
"""
