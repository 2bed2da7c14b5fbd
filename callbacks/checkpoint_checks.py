"""What is checked around a checkpoint: saving loses nothing that moves, and what is resumed fits the run."""

from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_rl.errors import ConfigError, DataError

SHOWN = 4


def identity(pl_module: Any) -> dict[str, Any]:
    """What a checkpoint says about the run that wrote it.

    Args:
        pl_module: an RLModule.
    """
    config = getattr(pl_module.policy, "config", None)
    return {
        "algorithm": type(pl_module).__name__,
        "policy": type(pl_module.policy).__name__,
        "model": str(getattr(config, "name_or_path", "")),
        "seed": pl_module.seed,
    }


def check_fit(manifest: dict[str, Any], checkpoint: dict[str, Any], pl_module: Any) -> None:
    """Refuse a checkpoint of another algorithm or model, naming the first differences.

    Args:
        manifest: of the folder.
        checkpoint: Lightning's dictionary, as read.
        pl_module: an RLModule, built but with its initial weights.

    Raises:
        DataError: algorithm, class of the policy, or names or shapes of weights differ.
    """
    own = identity(pl_module)
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
            f"a reference and frozen weights come from the latter."
        )
    if "loops" not in checkpoint:
        rank_zero_warn("Without 'extra' in checkpoint.load_contents, training starts at step 0.")


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


def left_out(pl_module: Any, parts: tuple[str, ...]) -> list[str]:
    """Parts not written, and roles that are not written because they never move.

    Args:
        pl_module: an RLModule.
        parts: names of contents that could have been written.
    """
    still = [name for name, part in vars(pl_module).items() if getattr(part, "is_moving", True) is False]
    return [*parts, *still]
