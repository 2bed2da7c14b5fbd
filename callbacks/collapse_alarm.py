"""CollapseAlarm: notices that a policy is lost while its loss still looks well, and acts."""

from pathlib import Path
from typing import Any, Literal

import lightning as L
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_rl.callbacks.checkpoint_contents import CheckpointContents
from lit_rl.checkpoint import FolderCheckpointIO, list_checkpoints, verify
from lit_rl.errors import ConfigError, DataError
from lit_rl.hooks import RLCallback

SERIES = {
    "reward": "rollout/reward",
    "length": "rollout/completion_len",
    "entropy": "train/entropy",
    "loss": "train/loss",
}
ACTIONS = ("warn", "stop", "rollback")


class CollapseAlarm(RLCallback):
    """Compares the last steps with those of the best reward, and warns, stops or rolls back.

    Means are over `window` steps; the reference is the window with the best mean reward so far. The alarm is
    given when the mean reward, and the mean length or entropy, have fallen below (1 - drop) of their values
    there while the mean loss has fallen too: the objective is met by a policy that no longer answers. Self-
    distillation does this when student and teacher degrade together (SRPO, Li et al. 2026, arXiv 2604.02288).

    `warn` says so and takes the present window as the new reference. `stop` ends the run after the step, with
    its last checkpoint. `rollback` brings back policy, optimizer, teacher and the other moving parts from the
    newest checkpoint that is not younger than the reference; steps, schedule and place in the data go on, so
    that the next steps see other prompts and other noise. Without such a checkpoint, or after
    `max_rollbacks`, it stops. A run that is killed before its next checkpoint resumes from a collapsed one,
    gives the alarm and rolls back again.

    Args:
        action: "warn", "stop" or "rollback".
        window: steps that are averaged.
        drop: relative fall that counts, in (0, 1).
        max_rollbacks: rollbacks of one run.

    Raises:
        ConfigError: a value is out of range; when training starts, a rollback without checkpoints.
    """

    def __init__(
        self,
        action: Literal["warn", "stop", "rollback"] = "warn",
        window: int = 20,
        drop: float = 0.3,
        max_rollbacks: int = 3,
    ) -> None:
        checks = [
            ("action", action, action in ACTIONS, f"must be one of {', '.join(ACTIONS)}"),
            ("window", window, window >= 1, "must be >= 1"),
            ("drop", drop, 0 < drop < 1, "must lie between 0 and 1"),
            ("max_rollbacks", max_rollbacks, max_rollbacks >= 1, "must be >= 1"),
        ]
        for name, value, is_legal, rule in checks:
            if not is_legal:
                raise ConfigError(f"callbacks.collapse_alarm.{name} {rule} (found {value!r}).")
        self.action, self.window, self.drop, self.max_rollbacks = action, window, drop, max_rollbacks
        self.recent: dict[str, list[float]] = {name: [] for name in SERIES}
        self.best: dict[str, float] = {}
        self.best_step = 0
        self.rollbacks = 0
        self._is_given = False

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.action == "rollback":
            self._checkpoints(trainer)

    def on_update_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        *,
        step: int,
        metrics: dict[str, float],
        **payload: Any,
    ) -> None:
        for name, metric in SERIES.items():
            if metric in metrics:
                self.recent[name] = [*self.recent[name], metrics[metric]][-self.window :]
        if len(self.recent["reward"]) < self.window:
            return
        now = {name: sum(values) / len(values) for name, values in self.recent.items() if values}
        if not self.best or now["reward"] >= self.best["reward"]:
            self.best, self.best_step = now, step
        elif self._has_collapsed(now):
            self._is_given = True
            rank_zero_warn(f"Step {step}: {self._words(now)}")
            if self.action == "warn":
                self.best, self.best_step = now, step

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self._is_given:
            return
        self._is_given = False
        if self.action == "stop":
            trainer.should_stop = True
        elif self.action == "rollback":
            self._roll_back(trainer, pl_module)

    def _has_collapsed(self, now: dict[str, float]) -> bool:
        has_shrunk = any(self._has_fallen(now, name) for name in ("length", "entropy") if name in now)
        return self._has_fallen(now, "reward") and has_shrunk and now["loss"] < self.best["loss"]

    def _has_fallen(self, now: dict[str, float], name: str) -> bool:
        fall = self.best[name] - now[name]
        return fall > 0 and fall >= self.drop * abs(self.best[name])

    def _words(self, now: dict[str, float]) -> str:
        changes = ", ".join(f"{name} {self.best[name]:.4g} -> {now[name]:.4g}" for name in now)
        return (
            f"the policy seems to collapse: over {self.window} steps since step {self.best_step}, {changes}. "
            f"(callbacks.collapse_alarm.action={self.action})"
        )

    def _roll_back(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Bring back the last good state, or stop when there is none or it has been done often enough."""
        good = self._good_checkpoint(self._checkpoints(trainer))
        if good is None or self.rollbacks == self.max_rollbacks:
            why = "no checkpoint is old enough" if good is None else f"{self.rollbacks} rollbacks were made"
            rank_zero_warn(f"callbacks.collapse_alarm ends the run: {why}.")
            trainer.should_stop = True
            return
        self.rollbacks += 1
        self.recent = {name: [] for name in SERIES}
        restore(trainer, pl_module, good)
        rank_zero_warn(f"Rolled back to {good}.")

    def _good_checkpoint(self, folder: Path) -> Path | None:
        found = []
        for path in list_checkpoints(folder):
            try:
                manifest = verify(path)
            except DataError:
                continue  # damaged: another one has to do
            if manifest["step"] <= self.best_step and {"model", "optimizer"} <= {*manifest["contents"]}:
                found.append((manifest["step"], path))
        return max(found)[1] if found else None

    def _checkpoints(self, trainer: L.Trainer) -> Path:
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, CheckpointContents):
                return callback.folder
        raise ConfigError(
            "callbacks.collapse_alarm.action=rollback needs the callback that writes checkpoints, "
            "callbacks.checkpoint."
        )

    def state_dict(self) -> dict[str, Any]:
        return {
            "recent": {name: list(values) for name, values in self.recent.items()},
            "best": dict(self.best),
            "best_step": self.best_step,
            "rollbacks": self.rollbacks,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.recent, self.best = state_dict["recent"], state_dict["best"]
        self.best_step, self.rollbacks = state_dict["best_step"], state_dict["rollbacks"]


def restore(trainer: L.Trainer, pl_module: Any, folder: Path) -> None:
    """Put policy, optimizer and moving parts back to a checkpoint; rates, steps and clocks stay as they are.

    Args:
        trainer: running.
        pl_module: an RLModule.
        folder: a checkpoint with "model" and "optimizer".
    """
    checkpoint = FolderCheckpointIO().load_checkpoint(folder)
    seconds = dict(pl_module.clock.total)
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    names = ("lr", "weight_decay")
    scheduled = [{name: value for name, value in group.items() if name in names} for group in groups]
    pl_module.on_load_checkpoint(checkpoint)
    trainer.strategy.load_model_state_dict(checkpoint, strict=pl_module.strict_loading)
    trainer.strategy.load_optimizer_state_dict(checkpoint)
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    for group, values in zip(groups, scheduled, strict=True):
        group.update(values)
    pl_module.clock.total.update(seconds)
