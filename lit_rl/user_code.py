"""Python files that a user brings: reward functions, datasets, networks, callbacks."""

import importlib.util
from pathlib import Path
from types import ModuleType

from lit_rl.errors import ConfigError


def module_of(path: str, key: str) -> ModuleType:
    """Run a Python file and return it as a module, under a name of its own.

    Args:
        path: of the file; ~ is the home folder.
        key: dotted key of the path, for messages.

    Raises:
        ConfigError: no such file, or running it raises.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError(f"{key} must be a Python file (found {path!r}, which does not exist).")
    spec = importlib.util.spec_from_file_location(f"lit_rl_user_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{key} must be a Python file (found {path!r}).")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"{key}: running {file} raised {type(error).__name__}: {error}") from error
    return module
