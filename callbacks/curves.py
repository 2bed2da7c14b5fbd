"""Curves: one picture of a run."""

from pathlib import Path
from typing import Any

import lightning as L

from lit_rl.callbacks.trackers import log_figure
from lit_rl.curves import PANELS, draw
from lit_rl.hooks import RLCallback


class Curves(RLCallback):
    """Draws `curves.png` when training ends and shows it in the loggers.

    Panels: reward, validation accuracy, loss, KL, length, entropy by step.

    Panels without numbers are left out. The numbers are kept in memory and in checkpoints, so that a resumed
    run draws all of it.

    Args:
        run_dir: where the picture goes.
    """

    def __init__(self, run_dir: str) -> None:
        self.file = Path(run_dir) / "curves.png"
        self.history: dict[str, list[tuple[int, float]]] = {}

    def on_update_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        *,
        step: int,
        metrics: dict[str, float],
        **payload: Any,
    ) -> None:
        self._add(step, metrics)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.sanity_checking:
            metrics = trainer.callback_metrics
            self._add(trainer.global_step, {n: float(v) for n, v in metrics.items() if n.startswith("val/")})

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        has_trained = any(name.startswith(("train/", "rollout/")) for name in self.history)
        if has_trained and trainer.is_global_zero:
            figure = draw(self.history, self.file)
            for logger in trainer.loggers:
                log_figure(logger, "curves", figure, self.file, trainer.global_step)

    def _add(self, step: int, metrics: dict[str, float]) -> None:
        for _, names in PANELS:
            for name in names:
                if name in metrics:
                    points = self.history.setdefault(name, [])
                    if points and points[-1][0] == step:
                        points.pop()  # the same step, validated again
                    points.append((step, float(metrics[name])))

    def state_dict(self) -> dict[str, Any]:
        return {"history": {name: list(points) for name, points in self.history.items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.history = state_dict["history"]
