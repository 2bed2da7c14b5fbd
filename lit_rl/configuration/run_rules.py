"""Rules of checkpoints, the length of the run and the schedule."""

import importlib.util

import torch

from lit_rl.configuration.build import built
from lit_rl.configuration.settings import Settings
from lit_rl.errors import ConfigError

ANY_LENGTH = 10**9  # steps of a run whose length is not known yet
LOGGER_PACKAGES = ("wandb", "mlflow", "swanlab")
CONTENTS = ("model", "optimizer", "extra")
SWITCHES = ("trainer.limit_val_batches", "trainer.val_check_interval")  # 0 is no validation


def resuming(settings: Settings) -> str | None:
    """Rule 38."""
    mode, path = settings.get("checkpoint.resume_mode", "auto"), settings.get("checkpoint.resume_from_path")
    if (mode == "resume_path") != (path is not None):
        return (
            f"checkpoint.resume_mode=resume_path (found {mode!r}) and checkpoint.resume_from_path "
            f"(found {path!r}) come together."
        )
    saved, loaded = settings.get("checkpoint.save_contents"), settings.get("checkpoint.load_contents")
    surplus = [part for part in loaded or [] if part not in (saved or CONTENTS) or part == "hf_model"]
    if surplus and settings.is_set("checkpoint.load_contents"):
        return (
            f"checkpoint.load_contents (found {loaded}) must lie within checkpoint.save_contents "
            f"(found {saved}) and leave out hf_model; take out {', '.join(surplus)}."
        )
    if mode == "disable":
        needs = f"checkpoint.resume_mode other than disable (found {mode!r})"
        return settings.idle(["checkpoint.use_checkpoint_opt_param_scheduler"], needs)
    return None


def nodes(settings: Settings) -> str | None:
    """One writer per node is for runs on several."""
    if settings["trainer.num_nodes"] > 1:
        return None
    return settings.idle(["checkpoint.save_on_each_node"], "trainer.num_nodes > 1 (found 1)")


def monitoring(settings: Settings) -> str | None:
    """Rule 39."""
    if settings.get("checkpoint.monitor") is None:
        keys = ["checkpoint.mode", "checkpoint.load_best_model_at_end"]
        if (message := settings.idle(keys, "checkpoint.monitor")) is not None:
            return message
    elif settings["trainer.limit_val_batches"] == 0:
        return (
            f"checkpoint.monitor (found {settings['checkpoint.monitor']!r}) needs validation "
            "(found trainer.limit_val_batches 0)."
        )
    if settings.get("checkpoint.default_hdfs_dir") is None:
        return settings.idle(["checkpoint.del_local_ckpt_after_load"], "checkpoint.default_hdfs_dir")
    return None


def rolling_back(settings: Settings) -> str | None:
    """A rollback needs checkpoints to go back to."""
    action = settings.get("callbacks.collapse_alarm.action")
    if action is None:
        return None
    if action != "rollback":
        needs = f"callbacks.collapse_alarm.action=rollback (found {action!r})"
        return settings.idle(["callbacks.collapse_alarm.max_rollbacks"], needs)
    saved, every = settings.get("checkpoint.save_contents"), settings.get("checkpoint.save_freq")
    if settings.get("callbacks.checkpoint") is None or every == -1 or not {"model", "optimizer"} <= {*saved}:
        return (
            f"callbacks.collapse_alarm.action=rollback needs checkpoints with model and optimizer on the way "
            f"(found checkpoint.save_freq {every}, checkpoint.save_contents {saved}, callbacks.checkpoint "
            f"{'off' if settings.get('callbacks.checkpoint') is None else 'on'})."
        )
    return None


def length_of_run(settings: Settings) -> str | None:
    """Rule 40."""
    limit = settings["trainer.max_steps"]
    if limit != -1:
        needs = f"trainer.max_steps=-1 (found {limit}, which sets the length of the run)"
        if (message := settings.idle(["data.total_epochs"], needs)) is not None:
            return message
    off = next((key for key in SWITCHES if settings[key] == 0), None)
    if off is None:
        return None
    idle_keys = [
        *(key for key in SWITCHES if key != off),
        *settings.set_below("rollout.val_kwargs"),
        "val_before_train",
    ]
    return settings.idle(idle_keys, f"validation (found {off} 0)")


def warm_up(settings: Settings) -> str | None:
    """Rule 41."""
    steps = settings.get("schedule.lr_warmup_steps", -1)
    if steps >= 0:
        key = "schedule.lr_warmup_steps_ratio"
        if (message := settings.idle([key], f"schedule.lr_warmup_steps=-1 (found {steps})")) is not None:
            return message
    if settings.get("schedule.min_lr", 0.0) > 0 and settings.get("schedule.min_lr_ratio", 0.0) > 0:
        return (
            f"schedule.min_lr (found {settings['schedule.min_lr']}) and schedule.min_lr_ratio (found "
            f"{settings['schedule.min_lr_ratio']}) are two floors; set one."
        )
    if (steps < 0 and settings.get("schedule.lr_warmup_steps_ratio", 0.0) == 0) or steps == 0:
        return settings.idle(["schedule.lr_warmup_init"], "a warm-up: schedule.lr_warmup_steps or its ratio")
    return None


def packages_of_loggers(settings: Settings) -> str | None:
    """A logger whose package is missing, before anything is built."""
    for name in settings.get("logger") or {}:
        if name in LOGGER_PACKAGES and importlib.util.find_spec(name) is None:
            return f"logger={name} needs the package {name}: pip install 'lit-rl[{name}]' (found none)."
    return None


def optimizer_and_schedule(settings: Settings) -> str | None:
    """Ranges: both are built once, for one number, before there is a model."""
    number, total = torch.zeros(1, requires_grad=True), settings["trainer.max_steps"]
    try:
        optimizer = built(settings["optim"])([number])
        built(settings["schedule"])(optimizer, total_steps=total if total > 0 else ANY_LENGTH)
    except ConfigError as error:
        return str(error)
    except (ValueError, TypeError, RuntimeError) as error:
        return f"optim cannot be built: {error}."
    return None


def shape_of_schedule(settings: Settings) -> str | None:
    """Rule 42."""
    shape, growth = "schedule.lr_scheduler_type", "schedule.weight_decay_incr_style"
    floors = ["schedule.lr_decay_steps", "schedule.min_lr", "schedule.min_lr_ratio"]
    last_phase = ["schedule.lr_wsd_decay_style", "schedule.lr_wsd_decay_steps"]
    groups: list[tuple[str, bool, list[str], str]] = [
        (shape, settings[shape] == "cosine", ["schedule.num_cycles"], "cosine"),
        (shape, settings[shape] != "constant", floors, "other than constant"),
        (shape, settings[shape] == "wsd", last_phase, "wsd"),
        (growth, settings[growth] != "constant", ["schedule.end_weight_decay"], "linear or cosine"),
    ]
    for switch, has_effect, keys, wanted in groups:
        needs = f"{switch} {wanted} (found {settings[switch]!r})"
        if not has_effect and (message := settings.idle(keys, needs)) is not None:
            return message
    return None
