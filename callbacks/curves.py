"""Curves: one picture of a run."""

from pathlib import Path
from typing import Any

import lightning as L

from lit_rl.hooks import RLCallback

PANELS = (
    ("reward", ("rollout/reward",)),
    ("validation accuracy", ("val/accuracy",)),
    ("loss", ("train/loss",)),
    ("KL to the reference", ("train/kl",)),
    ("completion length", ("rollout/completion_len",)),
    ("entropy", ("train/entropy",)),
)


class Curves(RLCallback):
    """Draws `curves.png` when training ends: reward, validation accuracy, loss, KL, length, entropy by step.

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
            draw(self.history, self.file)

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


def draw(history: dict[str, list[tuple[int, float]]], file: Path) -> None:
    """The panels that have numbers, in one picture.

    Args:
        history: (step, value) by metric name.
        file: the picture to write.
    """
    from matplotlib.figure import Figure  # takes half a second to import, and only the end of a run needs it

    panels = [(title, [n for n in names if n in history]) for title, names in PANELS]
    panels = [(title, names) for title, names in panels if names]
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(4.2 * columns, 2.9 * rows), layout="constrained")
    for index, (title, names) in enumerate(panels):
        axes = figure.add_subplot(rows, columns, index + 1)
        for name in names:
            steps, values = zip(*history[name], strict=True)
            axes.plot(steps, values, marker="." if len(steps) < 30 else None, label=name)
        axes.set_title(title)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)
