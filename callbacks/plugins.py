"""Callbacks from outside: a Python file of yours. Installed packages bring theirs by entry point."""

from typing import Any

import lightning as L

from lit_rl.errors import ConfigError
from lit_rl.user_code import module_of


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
    key = "callbacks.from_file"
    module = module_of(path, f"{key}.path")
    try:
        made = getattr(module, name)(**(arguments or {}))
    except Exception as error:
        raise ConfigError(f"{key}: {name} of {path} raised {type(error).__name__}: {error}") from error
    if not isinstance(made, L.Callback):
        raise ConfigError(f"{key}.name must be a callback (found {name!r}, a {type(made).__name__}).")
    return made
