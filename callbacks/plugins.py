"""Callbacks from outside: a Python file of yours. Installed packages bring theirs by entry point."""

import importlib.util
from pathlib import Path
from typing import Any

import lightning as L

from lit_rl.errors import ConfigError


def from_file(path: str, name: str, arguments: dict[str, Any] | None = None) -> L.Callback:
    """The callback that a class in a Python file makes.

    A package that is installed needs no file: by config, `+callbacks.mine._target_=package.Class`; or without
    a word of configuration, by an entry point of the group `lightning.pytorch.callbacks_factory`, which
    Lightning calls for every Trainer.

    Args:
        path: of the file.
        name: of the class in it.
        arguments: of its constructor.

    Raises:
        ConfigError: no such file or class, or the file or the constructor fails.
    """
    key, file = "callbacks.from_file", Path(path).expanduser()
    if not file.is_file():
        raise ConfigError(f"{key}.path must be a Python file (found {path!r}, which does not exist).")
    spec = importlib.util.spec_from_file_location(f"lit_rl_callback_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{key}.path must be a Python file (found {path!r}).")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        made = getattr(module, name)(**(arguments or {}))
    except Exception as error:
        raise ConfigError(f"{key}: {name} of {path} raised {type(error).__name__}: {error}") from error
    if not isinstance(made, L.Callback):
        raise ConfigError(f"{key}.name must be a callback (found {name!r}, a {type(made).__name__}).")
    return made
