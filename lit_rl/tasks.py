"""What a run does with its parts, in order: validate, fit, validate."""

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from transformers.utils import logging as transformers_logging

from lit_rl.algorithms.base import RLModule
from lit_rl.allocator import keep_freed_memory
from lit_rl.batch import RolloutBatch
from lit_rl.distributed import gather_objects

FLOOR = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def prepare_process(
    *, seed: int, log_level: str, float32_matmul_precision: str | None, rank: int = 0
) -> None:
    """Seed everything, say how much is printed, set torch's TF32 switch; on a CPU keep freed memory.

    The bar of a model that loads is for a terminal only.

    Args:
        seed: of the run.
        log_level: of rank 0; other ranks print warnings.
        float32_matmul_precision: None leaves torch's.
        rank: of this process.
    """
    if not torch.accelerator.is_available():
        keep_freed_memory()
    L.seed_everything(seed, verbose=False)
    level = FLOOR[log_level] if rank == 0 else max(FLOOR[log_level], logging.WARNING)
    logging.basicConfig(format="%(message)s")
    for name in ("lit_rl", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(level)
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
    # Lightning 2.6 calls a name that torch 2.13 deprecates; nothing that a user could mend.
    warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\)")
    if float32_matmul_precision is not None:
        torch.set_float32_matmul_precision(float32_matmul_precision)


def run(
    task: str,
    trainer: L.Trainer,
    module: L.LightningModule,
    datamodule: L.LightningDataModule,
    **run_length: Any,
) -> dict[str, float]:
    """Do a task by its name; see `fit` and `answer`.

    Args:
        run_length: the keyword arguments of `fit`.
    """
    if task == "fit":
        return fit(trainer, module, datamodule, **run_length)
    return answer(trainer, module, datamodule, is_scored=task != "generate")


def fit(
    trainer: L.Trainer,
    module: L.LightningModule,
    datamodule: L.LightningDataModule,
    *,
    total_steps: int,
    steps_per_data_epoch: float,
    val_before_train: bool,
) -> dict[str, float]:
    """Train, from the checkpoint that the checkpoint callback finds or from the start.

    Args:
        total_steps: steps of the whole run.
        steps_per_data_epoch: steps in one pass over the training rows.
        val_before_train: validate before the first step, unless the run is resumed.

    Returns:
        The metrics logged last, by name.
    """
    path = resume_path(trainer, total_steps, steps_per_data_epoch)
    done = _Done()
    trainer.callbacks.append(done)  # type: ignore[attr-defined]
    can_validate = trainer.limit_val_batches != 0 and getattr(datamodule, "val_files", None) is not None
    if can_validate and val_before_train and path is None:
        trainer.validate(module, datamodule=datamodule, verbose=False)
    trainer.fit(module, datamodule=datamodule, ckpt_path=path)
    metrics = _numbers(trainer.logged_metrics)
    is_stopped = trainer.interrupted or any(
        getattr(callback, "stopped_by_signal", False)
        for callback in trainer.callbacks  # type: ignore[attr-defined]
    )
    has_other_weights = any(
        getattr(callback, "ended_with_best", False)
        for callback in trainer.callbacks  # type: ignore[attr-defined]
    )
    if can_validate and (done.trained > done.validated or has_other_weights) and not is_stopped:
        trainer.validate(module, datamodule=datamodule, verbose=False)
    return {**metrics, **_numbers(trainer.logged_metrics)}


def answer(
    trainer: L.Trainer, module: L.LightningModule, datamodule: L.LightningDataModule, *, is_scored: bool
) -> dict[str, float]:
    """Answer the validation rows with the weights of the checkpoint that is found, else the model's.

    Where rows have prompts, the responses go to `responses.parquet` in the run's folder, as
    `python -m lit_rl.evaluate` reads them: a row is a prompt with its columns, `responses` (a list of texts)
    and, where scored, `rewards` (one each).

    Args:
        is_scored: call the reward, write what it gives, and print the metrics.

    Returns:
        Validation metrics by name; none where nothing is scored.
    """
    responses = _Responses()
    trainer.callbacks.append(responses)  # type: ignore[attr-defined]
    if isinstance(module, RLModule):
        module.validation.is_scored = is_scored
    path = resume_path(trainer, None, None)
    trainer.validate(module, datamodule=datamodule, ckpt_path=path, verbose=False)
    metrics = _numbers(trainer.logged_metrics) if is_scored else {}
    if trainer.is_global_zero:
        print(*(f"{name:<40} {value:.4f}" for name, value in sorted(metrics.items())), sep="\n")
        if responses.rows:
            file = Path(trainer.default_root_dir) / "responses.parquet"
            _write(responses.rows, file)
            print(f"{len(responses.rows)} prompts with their responses: {file}")
    return metrics


def resume_path(
    trainer: L.Trainer, total_steps: int | None, steps_per_data_epoch: float | None
) -> Path | None:
    """The checkpoint to start from, as the callback that writes them says; None without one."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if callable(find := getattr(callback, "resume_path", None)):
            return find(total_steps, steps_per_data_epoch)
    return None


class _Done(L.Callback):
    """Which step was trained last, and after which one validation ran."""

    trained = validated = -1

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.trained = trainer.global_step

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.validated = trainer.global_step


class _Responses(L.Callback):
    """Collects the validation rows of all ranks, in the order of the file."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        own = [
            row for rollout in pl_module.validation.rollouts for row in self._rows(rollout, pl_module.chat)
        ]
        placed = sorted((row for rows in gather_objects(own) for row in rows), key=lambda row: row[0])
        self.rows = [row for _, row in placed]

    def _rows(self, rollout: RolloutBatch, chat: Any) -> Iterator[tuple[int, dict[str, Any]]]:
        assert rollout.completion_ids is not None and rollout.completion_len is not None
        lengths, size = rollout.completion_len.tolist(), rollout.num_generations
        texts = [
            chat.decode(ids[:n].tolist()) for ids, n in zip(rollout.completion_ids, lengths, strict=True)
        ]
        for start in range(0, len(rollout), size):
            row = {name: values[start] for name, values in rollout.columns.items()}
            row["responses"] = texts[start : start + size]
            if rollout.rewards is not None:
                row["rewards"] = rollout.rewards[start : start + size].tolist()
            yield int(rollout.prompt_row[start]), row


def _write(rows: list[dict[str, Any]], file: Path) -> None:
    """Write rows to a parquet file, whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(file.name + ".tmp")
    pq.write_table(pa.Table.from_pylist(rows), temporary)
    os.replace(temporary, file)


def _numbers(metrics: Any) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}
