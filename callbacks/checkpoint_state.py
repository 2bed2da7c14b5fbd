"""What of a trainer's state is changed on its way into a checkpoint, or out of one."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L

CONFIG_FILE = "config.yaml"


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
    for scope in ("total", "current"):  # Lightning counts a validation again that ended before the save
        counts = fit_loop["epoch_loop.val_loop.batch_progress"][scope]
        counts.update(dict.fromkeys(counts, 0))


def is_validation_next(trainer: L.Trainer) -> bool:
    """Whether Lightning validates at the end of the present step, because of `val_check_interval`."""
    period = trainer.val_check_batch
    return trainer.enable_validation and period is not None and trainer.global_step % period == 0


def validate_now(trainer: L.Trainer) -> None:
    """Run the validation of a step that has been trained, as Lightning does at the end of a step."""
    trainer.validating = True
    trainer.fit_loop.epoch_loop.val_loop.run()
    trainer.training = True


def without_settings(schedule: dict[str, Any]) -> dict[str, Any]:
    """Where a schedule is, without its shape, length and rates, so that those of this run stay.

    Args:
        schedule: the state of a `WarmupDecay`.
    """
    return {"last_epoch": schedule["last_epoch"]}


def extra_files(
    pl_module: Any, trainer: L.Trainer, contents: list[str], *, copied: bool
) -> Callable[[Path], None]:
    """A function that writes what is not the trainer's state into a checkpoint's folder.

    Args:
        pl_module: an RLModule.
        trainer: its folder holds the run's configuration.
        contents: parts that are saved.
        copied: the weights go on moving before the function is called: copy them now.
    """
    config = Path(trainer.default_root_dir) / CONFIG_FILE
    write_model = hf_writer(pl_module, copied=copied) if "hf_model" in contents else None

    def write(folder: Path) -> None:
        if config.is_file():
            shutil.copyfile(config, folder / CONFIG_FILE)
        if write_model is not None:
            write_model(folder / "hf")

    return write


def hf_writer(pl_module: Any, *, copied: bool) -> Callable[[Path], None]:
    """A function that writes the policy and its tokenizer as `from_pretrained` reads them. Collective.

    Args:
        pl_module: an RLModule.
        copied: as in `extra_files`.
    """
    from lit_rl.models.roles import save_hf  # brings transformers and peft, and is seldom asked for
    from lit_rl.models.sharding import gathered, is_sharded
    from lit_rl.models.weights import dense_copy

    with gathered(pl_module.policy):
        is_copied = copied or is_sharded(pl_module.policy)
        policy = dense_copy(pl_module.policy) if is_copied else pl_module.policy
    chat = pl_module.chat
    return lambda folder: save_hf(policy, chat.tokenizer, folder, processor=chat.processor)
