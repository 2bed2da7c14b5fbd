"""CheckpointContents: when a checkpoint is written, what it holds, what is kept, where a run starts from."""

import math
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lit_rl.callbacks.checkpoint_checks import check_fit, check_registered, identity, left_out
from lit_rl.checkpoint import (
    PARTS,
    FolderCheckpointIO,
    list_checkpoints,
    newest_complete,
    step_folder,
    verify,
)
from lit_rl.errors import ConfigError

RESUME_MODES = ("auto", "disable", "resume_path")


class CheckpointContents(L.Callback):
    """Saves every `save_freq` steps and at the end of a run, in folders that are whole or not there.

    It moves behind every other callback, so that what they count in a step is in the file, and brings its own
    `FolderCheckpointIO`: `trainer.save_checkpoint(folder)` and `fit(ckpt_path=folder)` use it too.
    Sources: verl `actor.checkpoint`, `trainer.save_freq`, `trainer.resume_mode`; Transformers
    `save_total_limit`, `metric_for_best_model`, `enable_jit_checkpoint`.

    Args:
        default_local_dir: the checkpoints lie here, as `step_00000008`; the best one as `best`.
        save_contents: what is written: model, optimizer, extra (schedule, counters, data position,
            callbacks), hf_model (a folder for `from_pretrained`).
        load_contents: what is read when resuming; None, or the same list, = save_contents without hf_model.
        save_freq: steps between two checkpoints; -1 = only at the end.
        max_to_keep: newest ones kept, older ones are removed after a new one is complete; None = all.
        monitor: a validation metric; the model with its best value is kept as `best`, without "extra".
        mode: "max" or "min", which value is best.
        resume_mode: "auto" the newest complete one in `default_local_dir` if any, "disable" never,
            "resume_path" the one in `resume_from_path`.
        resume_from_path: a checkpoint, or a folder of them.
        save_on_signal: at SIGTERM, finish the step, save, and end the run (`stopped_by_signal` is then true);
            a second SIGTERM ends at once.

    Raises:
        ConfigError: a value is out of range, or two contradict each other.
    """

    def __init__(
        self,
        default_local_dir: str,
        *,
        save_contents: list[str] = ["model", "optimizer", "extra"],  # noqa: B006 (never changed)
        load_contents: list[str] | None = None,
        save_freq: int = 500,
        max_to_keep: int | None = None,
        monitor: str | None = None,
        mode: str = "max",
        resume_mode: str = "auto",
        resume_from_path: str | None = None,
        save_on_signal: bool = True,
    ) -> None:
        _check_saving(save_freq, max_to_keep, monitor, mode)
        _check_resuming(resume_mode, resume_from_path)
        self.folder = Path(default_local_dir)
        self.save_contents = _contents("save_contents", save_contents, (*PARTS, "hf_model"))
        readable = [part for part in self.save_contents if part != "hf_model"]
        if load_contents is None or list(load_contents) == list(self.save_contents):
            load_contents = readable
        self.load_contents = _contents("load_contents", load_contents, readable)
        self.save_freq, self.max_to_keep = save_freq, max_to_keep
        self.monitor, self.mode = monitor, mode
        self.resume_mode, self.resume_from_path = resume_mode, resume_from_path
        self.save_on_signal = save_on_signal
        self.best: float | None = None
        self._saved_step = -1
        self.stopped_by_signal = False
        self._handler_before: Any = None

    # ---------------------------------------------------------------------------------------- resume

    def resume_path(
        self, total_steps: int | None = None, steps_per_data_epoch: float | None = None
    ) -> Path | None:
        """What `fit(ckpt_path=...)` should start from; None is a fresh start. Prints which, on rank 0.

        Args:
            total_steps: steps of the whole run, to tell a finished one.
            steps_per_data_epoch: to print how often the data have been seen.

        Raises:
            ConfigError: `resume_from_path` does not exist or holds no checkpoint.
            DataError: the checkpoint it names is incomplete or damaged.
        """
        path = self._resume_path()
        if path is None:
            return None
        step = verify(path)["step"]
        of = "" if total_steps is None else f" of {total_steps}"
        epoch = "" if steps_per_data_epoch is None else f", data epoch {step / steps_per_data_epoch:.2f}"
        _say(f"Resuming from {path} (step {step}{of}{epoch}).")
        if total_steps is not None and step >= total_steps:
            _say(
                "This run is finished: no step is left. Raise trainer.max_steps or data.total_epochs to go "
                "on, or take another run_dir."
            )
        return path

    def _resume_path(self) -> Path | None:
        if self.resume_mode == "disable":
            _say("Fresh start (checkpoint.resume_mode=disable).")
            return None
        folder = self.folder
        if self.resume_from_path is not None:
            folder = Path(self.resume_from_path)
            if not folder.exists():
                raise ConfigError(f"checkpoint.resume_from_path does not exist (found {str(folder)!r}).")
            if not list_checkpoints(folder):
                return folder  # a checkpoint itself, or nothing that `verify` will accept
        path = newest_complete(folder, lambda why: _say(f"Passed over: {why}"))
        if path is None and self.resume_from_path is not None:
            raise ConfigError(
                f"checkpoint.resume_from_path holds no complete checkpoint (found {str(folder)!r})."
            )
        if path is None:
            _say(f"Fresh start: no complete checkpoint in {folder}.")
        return path

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Put the folder reader and writer in place, before anything is restored."""
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        trainer.callbacks = [*(c for c in callbacks if c is not self), self]  # type: ignore[attr-defined]
        current = trainer.strategy.checkpoint_io
        if type(current) is TorchCheckpointIO:
            trainer.strategy.checkpoint_io = current = FolderCheckpointIO()
        if not isinstance(current, FolderCheckpointIO):
            raise ConfigError(
                f"CheckpointContents writes through FolderCheckpointIO; take {type(current).__name__} out of "
                f"trainer.plugins."
            )
        current.save_contents, current.load_contents = self.save_contents, self.load_contents
        current.check = lambda manifest, checkpoint: check_fit(manifest, checkpoint, pl_module)
        if "model" not in self.load_contents:
            pl_module.strict_loading = False  # the weights are this run's own

    # ---------------------------------------------------------------------------------------- save

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        check_registered(pl_module)
        self._saved_step = trainer.global_step
        self.stopped_by_signal = False
        if self.save_on_signal and threading.current_thread() is threading.main_thread():
            self._handler_before = signal.signal(signal.SIGTERM, self._on_sigterm)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if self.save_on_signal and trainer.strategy.reduce_boolean_decision(
            self.stopped_by_signal, all=False
        ):
            _say(f"SIGTERM: saving step {step} and ending the run.")
            trainer.should_stop = True
        is_due = self.save_freq != -1 and step % self.save_freq == 0
        is_last = trainer.should_stop or trainer.is_last_batch or step == trainer.max_steps
        if is_due or is_last:
            self.save(trainer, pl_module)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._saved_step != trainer.global_step:
            self.save(trainer, pl_module)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.monitor is None or trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking:
            return
        if self.monitor not in trainer.callback_metrics:
            raise ConfigError(
                f"checkpoint.monitor must be a validation metric (found {self.monitor!r}); "
                f"there are {sorted(trainer.callback_metrics)}."
            )
        value = float(trainer.callback_metrics[self.monitor])
        sign = 1 if self.mode == "max" else -1
        if math.isfinite(value) and (self.best is None or sign * value > sign * self.best):
            self.best = value
            contents = [part for part in self.save_contents if part != "extra"]
            entries = {"monitor": {self.monitor: value}}
            self._write(trainer, pl_module, self.folder / "best", contents, entries)

    def save(self, trainer: L.Trainer, pl_module: L.LightningModule) -> Path:
        """Write the checkpoint of the present step, then remove old ones. On every rank."""
        path = step_folder(self.folder, trainer.global_step)
        self._write(trainer, pl_module, path, list(self.save_contents), {})
        self._saved_step = trainer.global_step
        if self.max_to_keep is not None and trainer.is_global_zero:
            for old in list_checkpoints(self.folder)[: -self.max_to_keep]:
                trainer.strategy.remove_checkpoint(old)
        return path

    def _write(
        self, trainer: L.Trainer, pl_module: Any, path: Path, contents: list[str], entries: dict[str, Any]
    ) -> None:
        check_registered(pl_module)
        total = trainer.max_steps if trainer.max_steps != -1 else trainer.num_training_batches
        absent = tuple(part for part in PARTS if part not in contents)
        manifest = {
            **identity(pl_module),
            "total_steps": int(total) if math.isfinite(total) else None,
            "left_out": left_out(pl_module, absent),
            **entries,
        }
        options: dict[str, Any] = {"contents": contents, "manifest": manifest}
        if "hf_model" in contents:
            options["extra_files"] = lambda folder: write_hf(pl_module, folder / "hf")
        with pl_module.clock("save"):
            trainer.save_checkpoint(path, storage_options=options)

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        set_mid_run(checkpoint["loops"]["fit_loop"])

    def _on_sigterm(self, signum: int, frame: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self.stopped_by_signal = True

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if self._handler_before is not None and signal.getsignal(signal.SIGTERM) == self._on_sigterm:
            signal.signal(signal.SIGTERM, self._handler_before)
        self._handler_before = None

    def state_dict(self) -> dict[str, Any]:
        return {} if self.best is None else {"best": self.best}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best = state_dict["best"]


def set_mid_run(fit_loop: dict[str, Any]) -> None:
    """Make a saved loop state that of a step's end in the middle of a run, whenever it was saved.

    A run is one Lightning epoch. Saved in its last step or after its end, Lightning would take a run for
    ended even when it was stopped early or is given more steps. A run without steps left trains nothing.

    Args:
        fit_loop: `checkpoint["loops"]["fit_loop"]`, changed in place.
    """
    batches, epochs = fit_loop["epoch_loop.batch_progress"], fit_loop["epoch_progress"]
    batches["is_last_batch"] = False
    for scope in ("total", "current"):
        batches[scope]["completed"] = batches[scope]["processed"] - 1
        epochs[scope]["processed"] = epochs[scope]["completed"] = 0
    fit_loop["epoch_loop.state_dict"]["_batches_that_stepped"] = batches["total"]["ready"] - 1


def write_hf(pl_module: Any, folder: Path) -> None:
    """The policy and its tokenizer as `from_pretrained` reads them."""
    from lit_rl.models.roles import save_hf  # brings transformers and peft, and is seldom asked for

    save_hf(pl_module.policy, pl_module.chat.tokenizer, folder)


def _contents(key: str, parts: Sequence[str], allowed: Sequence[str]) -> tuple[str, ...]:
    """The parts, checked against what is allowed."""
    if isinstance(parts, str) or any(part not in allowed for part in parts):
        raise ConfigError(f"checkpoint.{key} must be a list out of {list(allowed)} (found {parts!r}).")
    return tuple(parts)


def _check_saving(save_freq: int, max_to_keep: int | None, monitor: str | None, mode: str) -> None:
    """Ranges and combinations of what is written."""
    if save_freq != -1 and save_freq < 1:
        raise ConfigError(
            f"checkpoint.save_freq must be >= 1, or -1 for only at the end (found {save_freq!r})."
        )
    if max_to_keep is not None and max_to_keep < 1:
        raise ConfigError(f"checkpoint.max_to_keep must be null or >= 1 (found {max_to_keep!r}).")
    if mode not in ("max", "min"):
        raise ConfigError(f"checkpoint.mode must be 'max' or 'min' (found {mode!r}).")
    if mode != "max" and monitor is None:
        raise ConfigError(f"checkpoint.mode={mode} has no effect without checkpoint.monitor; set it.")


def _check_resuming(resume_mode: str, resume_from_path: str | None) -> None:
    """Values and combinations of where a run starts from."""
    if resume_mode not in RESUME_MODES:
        raise ConfigError(f"checkpoint.resume_mode must be one of {RESUME_MODES} (found {resume_mode!r}).")
    if (resume_mode == "resume_path") != (resume_from_path is not None):
        raise ConfigError(
            f"checkpoint.resume_mode=resume_path and checkpoint.resume_from_path come together "
            f"(found {resume_mode!r} and {resume_from_path!r})."
        )


@rank_zero_only
def _say(text: str) -> None:
    print(text, flush=True)
