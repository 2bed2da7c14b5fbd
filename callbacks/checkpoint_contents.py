"""CheckpointContents: when a checkpoint is written, what it holds, what is kept, where a run starts from."""

import math
import time
from pathlib import Path
from typing import Any

import lightning as L
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.trainer.states import TrainerFn

from lit_rl.callbacks import checkpoint_checks as checks
from lit_rl.callbacks.checkpoint_resume import forget_fetched, named, newest, say
from lit_rl.callbacks.checkpoint_signals import StopSignals
from lit_rl.callbacks.checkpoint_state import (
    extra_files,
    is_validation_next,
    set_mid_run,
    validate_now,
    without_settings,
)
from lit_rl.callbacks.checkpoint_writer import BEST, CheckpointWriter, Saving
from lit_rl.checkpoint import PARTS, FolderCheckpointIO, remove_folder, step_folder, verify
from lit_rl.checkpoint.lock import FolderLock
from lit_rl.checkpoint.remote import RemoteFolder
from lit_rl.errors import ConfigError
from lit_rl.hooks import emit


class CheckpointContents(L.Callback):
    """Saves every `save_freq` steps and at the end of a run, in folders that are whole or not there.

    It moves behind every other callback, so that what they count in a step is in the file, and brings its own
    `FolderCheckpointIO`: `trainer.save_checkpoint(folder)` and `fit(ckpt_path=folder)` use it too. What is
    written beside training ends before the run does, at most one checkpoint is on its way at a time, and an
    error there ends the run at the next step. Metrics: `time/save` (seconds for which training stood still),
    `time/save_complete` (seconds until the checkpoint was complete), `checkpoint/bytes`.
    Sources: verl `actor.checkpoint`, `trainer.save_freq`, `trainer.resume_mode`, `trainer.default_hdfs_dir`;
    Transformers `save_total_limit`, `metric_for_best_model`, `load_best_model_at_end`,
    `enable_jit_checkpoint`; Megatron-LM `use_checkpoint_opt_param_scheduler`.

    Args:
        default_local_dir: the checkpoints lie here, as `step_00000008`; the best one as `best`.
        default_hdfs_dir: copies go there, in the background; any fsspec URL.
        save_contents: what is written: model, optimizer, extra (schedule, counters, data position,
            callbacks), hf_model (a folder for `from_pretrained`).
        load_contents: what is read when resuming; None, or the same list, = save_contents without hf_model.
        save_freq: steps between two checkpoints; -1 = only at the end.
        save_every_minutes: also when the last one is so old, at the end of a step.
        max_to_keep: newest ones kept, older ones are removed after a new one is complete; None = all.
        monitor: a validation metric; the model with its best value is kept as `best`, without "extra".
        mode: "max" or "min", which value is best.
        load_best_model_at_end: take the weights of `best` when the last step is done and saved.
        resume_mode: "auto" the newest complete one in `default_local_dir`, or in `default_hdfs_dir` if that
            is set; "disable" never; "resume_path" the one in `resume_from_path`.
        resume_from_path: a checkpoint, or a folder of them; a path or URL.
        del_local_ckpt_after_load: remove the local copy of the checkpoint once it is read, if the remote
            folder has it.
        use_checkpoint_opt_param_scheduler: the schedule's settings (shape, length, peak rate, weight decay)
            come from the checkpoint; false = those of this run, at the step reached.
        save_on_signal: at SIGTERM, and at SIGUSR1 in a SLURM job, finish the step, save, and end the run
            (`stopped_by_signal` is then true); after SIGUSR1 the job is requeued. A second signal ends at
            once.
        save_on_each_node: the first process of every node writes; needed where nodes share no folder.
        async_save: write beside training, from a copy of the contents made at the call.

    Raises:
        ConfigError: a value is out of range, or two contradict each other.
    """

    def __init__(
        self,
        default_local_dir: str,
        *,
        default_hdfs_dir: str | None = None,
        save_contents: list[str] = ["model", "optimizer", "extra"],  # noqa: B006 (never changed)
        load_contents: list[str] | None = None,
        save_freq: int = 500,
        save_every_minutes: float | None = None,
        max_to_keep: int | None = None,
        monitor: str | None = None,
        mode: str = "max",
        load_best_model_at_end: bool = False,
        resume_mode: str = "auto",
        resume_from_path: str | None = None,
        del_local_ckpt_after_load: bool = False,
        use_checkpoint_opt_param_scheduler: bool = True,
        save_on_signal: bool = True,
        save_on_each_node: bool = False,
        async_save: bool = False,
    ) -> None:
        checks.check_saving(save_freq, save_every_minutes, max_to_keep)
        checks.check_best(monitor, mode, load_best_model_at_end)
        checks.check_resuming(resume_mode, resume_from_path)
        checks.check_remote(default_hdfs_dir, del_local_ckpt_after_load)
        self.folder = Path(default_local_dir)
        self.remote = None if default_hdfs_dir is None else RemoteFolder(default_hdfs_dir)
        self.save_contents = checks.contents("save_contents", save_contents, (*PARTS, "hf_model"))
        readable = [part for part in self.save_contents if part != "hf_model"]
        if load_contents is None or list(load_contents) == list(self.save_contents):
            load_contents = readable
        self.load_contents = checks.contents("load_contents", load_contents, readable)
        self.save_freq, self.save_every_minutes = save_freq, save_every_minutes
        self.monitor, self.mode, self.load_best_model_at_end = monitor, mode, load_best_model_at_end
        self.resume_mode, self.resume_from_path = resume_mode, resume_from_path
        self.del_local_ckpt_after_load = del_local_ckpt_after_load
        self.use_checkpoint_opt_param_scheduler = use_checkpoint_opt_param_scheduler
        self.save_on_signal, self.save_on_each_node = save_on_signal, save_on_each_node
        self.async_save = async_save
        self.best: float | None = None
        self.ended_with_best = False
        self.stopped_by_signal = self.owes_validation = False
        self._saves_after_validation = False
        self._signals = StopSignals()
        self._lock = FolderLock(self.folder)
        self._writer = CheckpointWriter(self.folder, self.remote, max_to_keep, async_save)
        self._start: Path | None = None
        self._saved_step, self._saved_at = -1, 0.0
        self._dumped: dict[str, Any] = {}

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
            StorageError: the remote folder cannot be read.
        """
        if self.resume_mode == "disable":
            say("Fresh start (checkpoint.resume_mode=disable).")
            return None
        if self.resume_from_path is not None:
            path: Path | None = named(self.resume_from_path, self.folder)
        else:
            path = newest(self.folder, self.remote)
        if path is None:
            elsewhere = "" if self.remote is None else f" or {self.remote.url}"
            say(f"Fresh start: no complete checkpoint in {self.folder}{elsewhere}.")
            return None
        self._start = path
        step = verify(path)["step"]
        of = "" if total_steps is None else f" of {total_steps}"
        epoch = "" if steps_per_data_epoch is None else f", data epoch {step / steps_per_data_epoch:.2f}"
        say(f"Resuming from {path} (step {step}{of}{epoch}).")
        if total_steps is not None and step >= total_steps:
            say(
                "This run is finished: no step is left. Raise trainer.max_steps or data.total_epochs to go "
                "on, or take another run_dir."
            )
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
        current.check = lambda manifest, checkpoint: checks.check_fit(
            manifest, checkpoint, pl_module, checks.identity(pl_module, trainer)
        )
        if "model" not in self.load_contents:
            pl_module.strict_loading = False  # the weights are this run's own
        if stage == TrainerFn.FITTING:
            checks.check_same_start(trainer, self._start)
            if self._is_writer(trainer):
                self._lock.acquire()

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if not self.use_checkpoint_opt_param_scheduler:
            checkpoint["lr_schedulers"] = [without_settings(state) for state in checkpoint["lr_schedulers"]]
        else:
            checks.check_length_of_schedule(checkpoint["lr_schedulers"], trainer)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        checks.check_registered(pl_module)
        self._saved_step, self._saved_at = trainer.global_step, time.monotonic()
        self.stopped_by_signal = self.ended_with_best = False
        if self.save_on_signal:
            self._signals.install()
        if self._is_writer(trainer):
            forget_fetched(self.folder)
            if self.del_local_ckpt_after_load and self._start is not None:
                self._free_local(self._start)
        if self.owes_validation:
            self.owes_validation = False
            validate_now(trainer)

    def _free_local(self, folder: Path) -> None:
        assert self.remote is not None
        if folder.parent == self.folder and self.remote.manifest(folder.name) is not None:
            remove_folder(folder)
            say(f"Removed {folder}; {self.remote.url} has it.")

    # ---------------------------------------------------------------------------------------- save

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        self._writer.check()
        self._announce(trainer, pl_module)
        validates = is_validation_next(trainer)
        received = self._signals.received is not None
        if self.save_on_signal and trainer.strategy.reduce_boolean_decision(received, all=False):
            self.stopped_by_signal = trainer.should_stop = True
            trainer.limit_val_batches = 0  # time is short: what is owed is made up for after the resume
            self.owes_validation, validates = validates, False
            say(f"{self._signals.name if received else 'A signal'}: saving step {step} and ending the run.")
        is_due = self.save_freq != -1 and step % self.save_freq == 0
        is_last = trainer.should_stop or trainer.is_last_batch or step == trainer.max_steps
        self._saves_after_validation = False
        if is_due or is_last or self._is_time(trainer):
            if validates:  # its numbers belong to the step, or a resumed run would not have them
                self._saves_after_validation = True
            else:
                self.save(trainer, pl_module)

    def _is_time(self, trainer: L.Trainer) -> bool:
        """Whether minutes have passed; rank 0's clock decides for all."""
        if self.save_every_minutes is None:
            return False
        age = time.monotonic() - self._saved_at
        return bool(trainer.strategy.broadcast(age >= 60 * self.save_every_minutes))

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._saved_step != trainer.global_step:
            self.save(trainer, pl_module)
        with pl_module.clock("save"):  # type: ignore[operator]
            self._writer.wait()
        self._announce(trainer, pl_module)
        trainer.strategy.barrier("checkpoints are complete")
        if self.stopped_by_signal:
            if trainer.is_global_zero:
                self._signals.requeue()
        elif self.load_best_model_at_end:
            self._load_best(trainer, pl_module)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking:
            return
        if self.monitor is not None:
            self._save_best(trainer, pl_module)
        if self._saves_after_validation:
            self._saves_after_validation = False
            self.save(trainer, pl_module)

    def _save_best(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert self.monitor is not None
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
            self._write(trainer, pl_module, self.folder / BEST, contents, {"monitor": {self.monitor: value}})

    def save(self, trainer: L.Trainer, pl_module: L.LightningModule) -> Path:
        """Write the checkpoint of the present step, then remove old ones. On every rank.

        Raises:
            StorageError: this one, or the one before it that was still on its way, could not be written.
        """
        path = step_folder(self.folder, trainer.global_step)
        self._write(trainer, pl_module, path, list(self.save_contents), {})
        self._saved_step, self._saved_at = trainer.global_step, time.monotonic()
        return path

    def _write(
        self, trainer: L.Trainer, pl_module: Any, path: Path, contents: list[str], entries: dict[str, Any]
    ) -> None:
        checks.check_registered(pl_module)
        with pl_module.clock("save"):
            saving = Saving(path, trainer.global_step)
            self._writer.wait()
            self._announce(trainer, pl_module)
            options = {
                "contents": contents,
                "manifest": {**checks.facts(pl_module, trainer, contents), **entries},
                "extra_files": extra_files(pl_module, trainer, contents, copied=self.async_save),
            }
            self._writer.write(
                saving,
                lambda more: self._hand_over(trainer, path, {**options, **more}),
                is_writer=self._is_writer(trainer),
                uploads=trainer.is_global_zero,
            )
        saving.held = time.perf_counter() - saving.begin
        self._announce(trainer, pl_module)

    def _hand_over(self, trainer: L.Trainer, path: Path, options: dict[str, Any]) -> None:
        """Collect the contents on every rank and write them on those that write."""
        trainer.save_checkpoint(path, storage_options=options)
        if self._is_writer(trainer) and not trainer.is_global_zero:
            trainer.strategy.checkpoint_io.save_checkpoint(self._dumped, path, storage_options=options)
        self._dumped = {}

    def _announce(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log and tell about the checkpoint that has become complete, on the ranks that wrote it."""
        saving = self._writer.finished()
        if saving is None:
            return
        metrics = {
            "time/save": saving.held,
            "time/save_complete": saving.complete,
            "checkpoint/bytes": float(saving.bytes),
        }
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=max(trainer.global_step - 1, 0))
        emit(pl_module, "on_checkpoint_saved", folder=saving.folder, step=saving.step)

    def _load_best(self, trainer: L.Trainer, pl_module: Any) -> None:
        if self.best is None:
            say("checkpoint.load_best_model_at_end: nothing was validated; the last weights stay.")
            return
        checkpoint = FolderCheckpointIO(load_contents=("model",)).load_checkpoint(self.folder / BEST)
        seconds = dict(pl_module.clock.total)
        pl_module.on_load_checkpoint(checkpoint)
        trainer.strategy.load_model_state_dict(checkpoint, strict=True)
        pl_module.clock.total.update(seconds)
        self.ended_with_best = True
        say(
            f"Ending with the best weights: step {checkpoint['global_step']}, {self.monitor} {self.best:.4g}."
        )

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        set_mid_run(checkpoint["loops"]["fit_loop"])
        self._dumped = checkpoint

    def _is_writer(self, trainer: L.Trainer) -> bool:
        return trainer.is_global_zero or (self.save_on_each_node and trainer.local_rank == 0)

    # ---------------------------------------------------------------------------------------- end

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        self._close(exception)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._close(None)

    def _close(self, exception: BaseException | None) -> None:
        """End everything that outlives a step; an error on the way must not hide the one that came first."""
        try:
            self._writer.close()
        except Exception as error:
            if exception is None:
                raise
            say(f"Also: {error}")
        finally:
            self._signals.restore()
            self._lock.release()

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "owes_validation": self.owes_validation}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best, self.owes_validation = state_dict["best"], state_dict["owes_validation"]
