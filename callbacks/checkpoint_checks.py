"""What is checked around a checkpoint: saving loses nothing that moves, and what is resumed fits the run."""

import hashlib
import math
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lit_rl.checkpoint import PARTS
from lit_rl.configuration.secrets import masked
from lit_rl.errors import ConfigError, DataError
from lit_rl.models.sharding import gathered

SHOWN = 4
SAMPLED = 64
RESUME_MODES = ("auto", "disable", "resume_path")
RESULTS_DEPEND_ON = {
    "seed": "the completions are drawn with other noise",
    "num_processes": "sums run in another order",
    "threads": "sums run in another order; OMP_NUM_THREADS sets it",
    "torch": "kernels may differ",
}

# ---------------------------------------------------------------------------------------- what wrote it


def identity(pl_module: Any, trainer: L.Trainer) -> dict[str, Any]:
    """What a checkpoint says about the run that wrote it.

    Args:
        pl_module: an RLModule.
        trainer: of the run.
    """
    config = getattr(pl_module.policy, "config", None)
    return {
        "algorithm": type(pl_module).__name__,
        "policy": type(pl_module.policy).__name__.removeprefix("FSDP"),
        "model": str(getattr(config, "name_or_path", "")),
        "weights_left_out": weights_left_out(pl_module),
        "seed": pl_module.seed,
        "num_processes": trainer.world_size,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def facts(pl_module: Any, trainer: L.Trainer, contents: list[str]) -> dict[str, Any]:
    """The manifest's entries, besides files.

    Args:
        pl_module: an RLModule.
        trainer: of the run.
        contents: parts that are written.
    """
    total = trainer.max_steps if trainer.max_steps != -1 else trainer.num_training_batches
    absent = tuple(part for part in PARTS if part not in contents)
    return {
        **identity(pl_module, trainer),
        "total_steps": int(total) if math.isfinite(total) else None,
        "left_out": left_out(pl_module, absent),
        "command": command_line(),
    }


def command_line() -> str:
    """How this process was started, secrets masked."""
    words = []
    for word in sys.argv:
        key, equals, value = word.partition("=")
        words.append(f"{key}={masked(key.lstrip('+'), value)}" if equals else word)
    return shlex.join(["python", *words])


def left_out(pl_module: Any, parts: tuple[str, ...]) -> list[str]:
    """Parts not written, and roles that are not written because they never move.

    Args:
        pl_module: an RLModule.
        parts: names of contents that could have been written.
    """
    still = [name for name, part in vars(pl_module).items() if getattr(part, "is_moving", True) is False]
    return [*parts, *still]


def weights_left_out(pl_module: Any) -> dict[str, str]:
    """A short hash of each set of weights that no file holds, since `model.path` brings it back.

    Args:
        pl_module: an RLModule.
    """
    policy = pl_module.policy
    with gathered(policy):
        hashes = {"frozen": _hash([p for p in policy.parameters() if not p.requires_grad])}
    for name in ("ref", "teacher"):
        role = getattr(pl_module, name, None)
        if role is not None and not role.is_moving and callable(getattr(role, "model", None)):
            with role.model() as model:
                if model is not policy:
                    hashes[name] = _hash(list(model.parameters()))
    return {name: found for name, found in hashes.items() if found}


def _hash(tensors: list[Tensor]) -> str:
    """Of shapes and of some values of each tensor; empty for none."""
    if not tensors:
        return ""
    digest = hashlib.sha256()
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        some = flat[:: max(1, flat.numel() // SAMPLED)]
        digest.update(f"{tuple(tensor.shape)}".encode() + some.double().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


# ---------------------------------------------------------------------------------------- does it fit


def check_fit(manifest: dict[str, Any], checkpoint: dict[str, Any], pl_module: Any, own: dict) -> None:
    """Refuse a checkpoint of another algorithm or model, naming the first differences.

    Args:
        manifest: of the folder.
        checkpoint: Lightning's dictionary, as read.
        pl_module: an RLModule, built but with its initial weights.
        own: `identity` of this run.

    Raises:
        DataError: algorithm, class of the policy, names or shapes of weights, or weights that the file leaves
            out differ.
    """
    there = {name: manifest.get(name, own[name]) for name in own}
    differences = [
        f"{name} {there[name]!r} there, {own[name]!r} here"
        for name in ("algorithm", "policy")
        if there[name] != own[name]
    ]
    shapes = {name: tuple(tensor.shape) for name, tensor in pl_module.state_dict().items()}
    for name, tensor in checkpoint["state_dict"].items():
        here = shapes.get(name, "no such weight")
        if tuple(tensor.shape) != here:
            differences.append(f"{name} {tuple(tensor.shape)} there, {here} here")
    if not differences and checkpoint["state_dict"]:
        differences += [
            f"{name} weights, which come from model.path: {there['model']!r} there, {own['model']!r} here"
            for name, value in there["weights_left_out"].items()
            if value != own["weights_left_out"].get(name, value)
        ]
    if differences:
        more = f" and {len(differences) - SHOWN} more" if len(differences) > SHOWN else ""
        raise DataError(
            f"The checkpoint of step {manifest['step']} is of another run: "
            f"{'; '.join(differences[:SHOWN])}{more}. Resume with the settings it was written with, "
            f"or start fresh with checkpoint.resume_mode=disable."
        )
    if Path(there["model"]).name != Path(own["model"]).name:
        rank_zero_warn(
            f"The checkpoint was written for model.path {there['model']!r}, this run has {own['model']!r}; "
            f"its weights are in the checkpoint."
        )
    if "loops" not in checkpoint:
        rank_zero_warn("Without 'extra' in checkpoint.load_contents, training starts at step 0.")
        return
    for name, why in RESULTS_DEPEND_ON.items():
        if there[name] != own[name]:
            rank_zero_warn(
                f"The checkpoint was written with {name} {there[name]!r}, this run has {own[name]!r}: {why}, "
                f"so that the run goes on, but not bit for bit as it would have."
            )


def check_length_of_schedule(schedules: list[dict[str, Any]], trainer: L.Trainer) -> None:
    """Warn when the schedule in the checkpoint ends before this run does.

    Args:
        schedules: states in the checkpoint.
        trainer: of this run.
    """
    for schedule in schedules:
        settings = schedule.get("settings", {})
        end = settings.get("total_steps", math.inf)
        if trainer.max_steps > end and settings["lr_scheduler_type"] != "constant":
            rank_zero_warn(
                f"The schedule in the checkpoint ends at step {end} and this run at {trainer.max_steps}: the "
                f"steps between run at its last rate. checkpoint.use_checkpoint_opt_param_scheduler=false "
                f"takes the schedule of this run instead."
            )


def check_same_start(trainer: L.Trainer, start: Path | None) -> None:
    """Refuse to go on when ranks found different checkpoints.

    Args:
        trainer: of the run.
        start: what this rank resumes from.

    Raises:
        ConfigError: rank 0 has another one.
    """
    own = None if start is None else start.name
    first = trainer.strategy.broadcast(own)
    if first != own:
        raise ConfigError(
            f"checkpoint.default_local_dir must hold the same checkpoints for every rank (found {first!r} on "
            f"rank 0, {own!r} on rank {trainer.global_rank}); share the folder between nodes, or set "
            f"checkpoint.save_on_each_node=true."
        )


def check_registered(pl_module: Any) -> None:
    """Refuse to save while a part of the module has a moving state that no checkpoint would hold.

    Args:
        pl_module: an RLModule.

    Raises:
        ConfigError: an attribute has state_dict and load_state_dict, and is neither a submodule nor in
            `stateful`.
    """
    registered = {id(part) for part in pl_module.stateful.values()}
    lost = [
        name
        for name, part in vars(pl_module).items()
        if id(part) not in registered
        and callable(getattr(part, "state_dict", None))
        and callable(getattr(part, "load_state_dict", None))
        and getattr(part, "is_moving", True)
    ]
    if lost:
        raise ConfigError(
            f"{type(pl_module).__name__} has state that a checkpoint would lose: {lost}; "
            f"add it to the module's `stateful`."
        )


# ---------------------------------------------------------------------------------------- settings


def contents(key: str, parts: Sequence[str], allowed: Sequence[str]) -> tuple[str, ...]:
    """The parts, checked against what is allowed."""
    if isinstance(parts, str) or any(part not in allowed for part in parts):
        raise ConfigError(f"checkpoint.{key} must be a list out of {list(allowed)} (found {parts!r}).")
    return tuple(parts)


def check_saving(save_freq: int, save_every_minutes: float | None, max_to_keep: int | None) -> None:
    """Ranges of what is written."""
    if save_freq != -1 and save_freq < 1:
        raise ConfigError(
            f"checkpoint.save_freq must be >= 1, or -1 for only at the end (found {save_freq!r})."
        )
    if save_every_minutes is not None and save_every_minutes <= 0:
        raise ConfigError(
            f"checkpoint.save_every_minutes must be null or > 0 (found {save_every_minutes!r})."
        )
    if max_to_keep is not None and max_to_keep < 1:
        raise ConfigError(f"checkpoint.max_to_keep must be null or >= 1 (found {max_to_keep!r}).")


def check_best(monitor: str | None, mode: str, load_best_model_at_end: bool) -> None:
    """Values and combinations of what is best."""
    if mode not in ("max", "min"):
        raise ConfigError(f"checkpoint.mode must be 'max' or 'min' (found {mode!r}).")
    if mode != "max" and monitor is None:
        raise ConfigError(f"checkpoint.mode={mode} has no effect without checkpoint.monitor; set it.")
    if load_best_model_at_end and monitor is None:
        raise ConfigError("checkpoint.load_best_model_at_end needs checkpoint.monitor (found None); set it.")


def check_resuming(resume_mode: str, resume_from_path: str | None) -> None:
    """Values and combinations of where a run starts from."""
    if resume_mode not in RESUME_MODES:
        raise ConfigError(f"checkpoint.resume_mode must be one of {RESUME_MODES} (found {resume_mode!r}).")
    if (resume_mode == "resume_path") != (resume_from_path is not None):
        raise ConfigError(
            f"checkpoint.resume_mode=resume_path and checkpoint.resume_from_path come together "
            f"(found {resume_mode!r} and {resume_from_path!r})."
        )


def check_remote(default_hdfs_dir: str | None, del_local_ckpt_after_load: bool) -> None:
    """A local copy is only removed when there is another one."""
    if del_local_ckpt_after_load and default_hdfs_dir is None:
        raise ConfigError(
            "checkpoint.del_local_ckpt_after_load needs checkpoint.default_hdfs_dir (found None), or the "
            "only copy would be lost; set it."
        )
