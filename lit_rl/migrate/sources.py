"""Reads what people have: JSON, YAML, a command line (.sh), or a Python call of a Config class (.py)."""

import ast
import json
import shlex
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from lit_rl.errors import ConfigError


def read(file: Path) -> tuple[dict[str, Any], str]:
    """What a file says, and the name of the class or script it was for, as far as it tells.

    Raises:
        ConfigError: it cannot be read, or holds no map.
    """
    try:
        text = file.read_text()
        match file.suffix:
            case ".json":
                found, name = json.loads(text), ""
            case ".py":
                found, name = _call(text)
            case ".sh" | ".txt":
                found, name = _command(text)
            case _:
                loaded: Any = OmegaConf.to_container(
                    OmegaConf.create(yaml.safe_load(text) or {}), resolve=True
                )
                found, name = loaded, ""
    except (OSError, ValueError, SyntaxError, yaml.YAMLError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{file} must hold a map of keys (found a {type(found).__name__}).")
    return found, name


def _call(text: str) -> tuple[dict[str, Any], str]:
    """The keyword arguments of the first call of a class that ends in Config."""
    for node in ast.walk(ast.parse(text)):
        name = ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""
        if isinstance(node, ast.Call) and name.endswith("Config"):
            return {k.arg: ast.literal_eval(k.value) for k in node.keywords if k.arg}, name
    raise ConfigError("The Python file calls no class whose name ends in Config.")


def _command(text: str) -> tuple[dict[str, Any], str]:
    """The options of the first command: `--key value`, several values as a list, none as true; key=value."""
    words = shlex.split(text.replace("\\\n", " "), comments=True)
    found: dict[str, Any] = {}
    name, key = "", ""
    for word in words:
        if word.startswith("--"):
            key, equals, value = word[2:].partition("=")
            found[key] = _value(value) if equals else True
        elif key and "=" not in word:
            before = found[key]
            found[key] = _value(word) if before is True else [*_as_list(before), _value(word)]
        elif "=" in word and not name.endswith("="):
            place, _, value = word.lstrip("+").partition("=")
            found[place] = _value(value)
        else:
            name = word
    return found, name


def _value(text: str) -> Any:
    value = yaml.safe_load(text)
    try:
        return float(value) if isinstance(value, str) else value  # yaml takes 5e-5 for a string
    except ValueError:
        return value


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
