"""The configuration in LightningCLI's form and back: `_target_` is `class_path`, siblings `init_args`."""

import datetime
import re
from typing import Any

from lit_rl.configuration.tree import NODE_KEYS, expanded, joined

MODULE_PARTS = {"policy": "model", "reward": "reward", "optimizer": "optim", "scheduler": "schedule"}
"""Arguments of the module that are nodes of our tree."""


def to_class_paths(tree: dict[str, Any]) -> dict[str, Any]:
    """A checked tree as LightningCLI reads it: `seed_everything`, `trainer`, `model`, `data`.

    Args:
        tree: links may stand or be replaced.
    """
    tree = expanded(tree)
    trainer = _block(tree["trainer"])["init_args"]
    if trainer["val_check_interval"] == 0:
        trainer |= {"val_check_interval": None, "limit_val_batches": 0}
    for name in ("callbacks", "logger"):
        trainer[name] = [_block(node) for node in tree[name].values() if node is not None]
    trainer["default_root_dir"] = tree["run_dir"]
    return {
        "seed_everything": tree["seed"],
        "trainer": trainer,
        "model": _block(tree["algo"]),
        "data": _block(tree["data"]),
    }


def _block(value: Any) -> Any:
    if isinstance(value, list):
        return [_block(item) for item in value]
    if not isinstance(value, dict):
        return value
    below = {name: _block(item) for name, item in value.items() if name not in NODE_KEYS}
    if "_target_" not in value:
        return below
    if value["_target_"] == "datetime.timedelta":
        return str(datetime.timedelta(**below))
    return {"class_path": value["_target_"], "init_args": below}


def from_class_paths(document: dict[str, Any]) -> dict[str, Any]:
    """The tree that a LightningCLI document stands for; only what it says.

    Args:
        document: with any of `seed_everything`, `trainer`, `model`, `data`; other names stay as they are.
    """
    tree = {n: _node(v) for n, v in document.items() if n not in ("model", "trainer", "seed_everything")}
    algo = _node(document.get("model", {}))
    for argument, node in MODULE_PARTS.items():
        if argument in algo:
            tree[node] = algo.pop(argument)
    trainer = _node(document.get("trainer", {}))
    callbacks, loggers = trainer.pop("callbacks", None), trainer.pop("logger", None)
    run_dir = trainer.pop("default_root_dir", None)
    if trainer:
        tree["trainer"] = trainer
    if algo:
        tree["algo"] = algo
    if callbacks is not None:
        tree["callbacks"] = _named(callbacks)
    if loggers is not None:
        tree["logger"] = _named(loggers or [])
    if run_dir is not None:
        tree["run_dir"] = run_dir
    if isinstance(document.get("seed_everything"), int):
        tree["seed"] = document["seed_everything"]
    return tree


def _node(value: Any) -> Any:
    if isinstance(value, list):
        return [_node(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "class_path" in value:
        return {"_target_": value["class_path"], **_node(value.get("init_args") or {})}
    return {name: _node(item) for name, item in value.items()}


def _named(nodes: Any) -> dict[str, Any]:
    """Callbacks or loggers under the name of their class: `LogCompletions` is `log_completions`."""
    nodes = nodes if isinstance(nodes, list) else [nodes]
    return {_snake(node["_target_"].rpartition(".")[2]): node for node in nodes if isinstance(node, dict)}


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def our_key(key: str) -> str:
    """The key of our tree for a dotted key of LightningCLI, e.g. `model.policy.path` -> `model.path`."""
    parts = [part for part in key.split(".") if part != "init_args"]
    if parts[0] == "model":
        if len(parts) > 1 and parts[1] in MODULE_PARTS:
            return joined(MODULE_PARTS[parts[1]], ".".join(parts[2:])).rstrip(".")
        return ".".join(["algo", *parts[1:]])
    if parts[:2] in (["trainer", "callbacks"], ["trainer", "logger"]):
        return ".".join(parts[1:])
    return {"seed_everything": "seed"}.get(key, ".".join(parts))
