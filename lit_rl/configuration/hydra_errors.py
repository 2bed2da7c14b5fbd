"""Hydra's own errors in our words: full key, what was found, what is allowed, the nearest legal name."""

import difflib
import re
from collections.abc import Callable
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf.errors import InterpolationKeyError, InterpolationResolutionError, OmegaConfBaseException

from lit_rl.configuration.secrets import masked
from lit_rl.configuration.tree import ABSENT, NODE_KEYS, at, joined, leaves, link
from lit_rl.errors import ConfigError

Compose = Callable[[list[str]], dict[str, Any]]
REFUSED = {
    "trainer=deepspeed": "DeepSpeed would take gradients, their cap and the optimizer steps over, and is not "
    "built; trainer=fsdp shares out the same weights, gradients and optimizer state",
    "trainer=megatron": "Megatron is not supported; use trainer=ddp",
    "trainer=slurm": "a SLURM trainer is not built yet; start trainer=ddp with srun and give run_dir",
}
# Names of other libraries that mean one of our keys.
ELSEWHERE = {
    "learning_rate": "optim.lr",
    "per_device_train_batch_size": "algo.batch.micro_batch_size",
    "num_train_epochs": "data.total_epochs",
    "max_new_tokens": "algo.sampling.max_completion_length",
    "output_dir": "run_dir",
    "save_steps": "checkpoint.save_freq",
    "eval_steps": "trainer.val_check_interval",
    "logging_steps": "trainer.log_every_n_steps",
}


def as_config_error(error: Exception, overrides: list[str], composed: Compose) -> ConfigError:
    """The same error for the user.

    Args:
        error: what Hydra or OmegaConf raised.
        overrides: the command line.
        composed: composes other overrides into the tree before interpolation, to look for legal names.
    """
    text = str(error)
    if match := re.search(r"Could not override '([^']+)'", text):
        return ConfigError(_bad_key(match.group(1), overrides, composed))
    if match := re.search(r"Could not (?:find|load) '([^'/]+)/([^']+?)'", text):
        return ConfigError(_bad_choice(match.group(1), match.group(2)))
    if "Config group override must be" in text:
        return ConfigError("A group cannot be set to null on the command line; leave it out.")
    if match := re.search(r"Missing mandatory value: (\S+)", text):
        return ConfigError(f"{match.group(1)} must be given; it has no default.")
    if isinstance(error, (InterpolationKeyError, InterpolationResolutionError)):
        return ConfigError(f"{error.full_key or 'A key'} cannot be resolved: {text.splitlines()[0]}.")
    if isinstance(error, OmegaConfBaseException):
        key = getattr(error, "full_key", None)
        return ConfigError(f"{key or 'The configuration'} is wrong: {text.splitlines()[0]}.")
    return ConfigError(_unreadable(text, overrides))


def _unreadable(text: str, overrides: list[str]) -> str:
    first = text.strip().splitlines()[0].rstrip(".")
    culprit = next((o for o in overrides if o in text or o.split("=")[-1] in first), None)
    shown = f" ({_masked_override(culprit)!r})" if culprit else ""
    hint = " Values with commas, brackets, braces, colons or spaces need quotes: 'key=\"a, b\"'."
    return f"The command line cannot be read{shown}: {first}.{hint if 'input' in text else ''}"


def _masked_override(override: str) -> str:
    key, equals, value = override.partition("=")
    return f"{key}{equals}{masked(key, value)}" if equals else override


def _options(group: str) -> list[str]:
    hydra = GlobalHydra.instance().hydra
    assert hydra is not None
    return hydra.config_loader.get_group_options(group)


def _bad_choice(group: str, choice: str) -> str:
    reason = REFUSED.get(f"{group}={choice}")
    options = _options(group)
    listed = f"Choices of {group}: {', '.join(options)}." if options else f"The group {group} has no choices."
    if reason is not None:
        return f"{group}={choice} is refused: {reason}. {listed}"
    near = difflib.get_close_matches(choice, options, n=1, cutoff=0.5)
    hint = f" Did you mean {group}={near[0]}?" if near else ""
    return f"{group}={choice} is not a choice.{hint} {listed}"


def _bad_key(key: str, overrides: list[str], composed: Compose) -> str:
    """The message for a key that no composed file has."""
    given = next((o for o in overrides if o.split("=")[0].lstrip("+~") == key), key)
    value = given.partition("=")[2]
    found = f" (found {masked(key, value)})" if value else ""
    tree = composed([o for o in overrides if _is_choice(o)])
    parts = key.split(".")
    if isinstance(at(tree, key), dict):
        return f"{key} is a map{found}: write +{key}=... to add entries, or set one by its name."
    for depth in range(1, len(parts)):
        place = ".".join(parts[:depth])
        here = at(tree, place)
        target = link(here)
        if target is not None:
            return (
                f"{place} follows {target}: set {target}.{'.'.join(parts[depth:])} instead of {key}{found}."
            )
        if here is None and place.split(".")[0] in ("callbacks", "logger"):
            return f"{place} is off here, so {key} has no effect{found}."
        if here is not ABSENT and not isinstance(here, dict):
            return f"{place} is a value, not a block, so {key} is not a key{found}."
    return f"{key} is not a key{found}. {_where(key, overrides, tree, composed)}"


def _is_choice(override: str) -> bool:
    group = override.split("=")[0].lstrip("+~")
    return "." not in group and bool(_options(group)) and "=" in override


def _where(key: str, overrides: list[str], tree: dict[str, Any], composed: Compose) -> str:
    parts = key.split(".")
    group = parts[0]
    if group in ("callbacks", "logger") and len(parts) > 1:
        name = parts[1]
        if at(tree, f"{group}.{name}") is ABSENT and name in _options(group):
            return f"{name} is not on: add it with {group}=[default,{name}]."
    for option in _options(group) if group not in ("callbacks", "logger", "experiment", "debug") else []:
        if at(_alternative(composed, f"{group}={option}"), key) is not ABSENT:
            return f"It belongs to {group}={option}."
    prefix = key.rpartition(".")[0]
    while prefix and at(tree, prefix) is ABSENT:
        prefix = prefix.rpartition(".")[0]
    siblings = _names(at(tree, prefix) if prefix else tree)
    names = [joined(prefix, name) for name in siblings] if siblings else []
    everything = [*names, *(name for name, _ in leaves(tree)), *tree]
    near = difflib.get_close_matches(key, names, n=1, cutoff=0.75) or _same_leaf(key, everything)
    near = near or difflib.get_close_matches(key, everything, n=1, cutoff=0.7)
    near = [ELSEWHERE[parts[-1]]] if parts[-1] in ELSEWHERE else near
    hint = f"Did you mean {near[0]}?" if near else ""
    if isinstance(at(tree, prefix), dict) and prefix and "_target_" not in at(tree, prefix):
        return f"{hint} {prefix} is open: write +{key}=... to add an entry.".strip()
    listed = f"Keys of {prefix}: {', '.join(siblings)}." if siblings and prefix else ""
    if not prefix:
        listed = f"Keys and groups: {', '.join(sorted(tree))}."
    return f"{hint} {listed}".strip()


def _alternative(composed: Compose, choice: str) -> dict[str, Any]:
    """The tree under another choice; empty where this entry point does not offer the group."""
    try:
        return composed([choice])
    except HydraException:
        return {}


def _names(node: Any) -> list[str]:
    return sorted(name for name in node if name not in NODE_KEYS) if isinstance(node, dict) else []


def _same_leaf(key: str, names: list[str]) -> list[str]:
    """A key of the same last name elsewhere: `beta` leads to `algo.kl.beta`."""
    leaf = key.rsplit(".", 1)[-1]
    return [name for name in names if name.rsplit(".", 1)[-1] == leaf][:1]
