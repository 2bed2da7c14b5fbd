"""Reads what people have: JSON, YAML, a command line (.sh), or a Python call of a Config class (.py)."""

import ast
import json
import re
import shlex
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from lit_rl.errors import ConfigError

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)[eE][+-]?\d+")


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
            case ".py" | ".txt":
                found, name = _call(text)
            case ".sh":
                found, name = _command(text)
            case _:
                found, name = _documents(text), ""
    except (OSError, ValueError, SyntaxError, yaml.YAMLError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{file} must hold a map of keys (found a {type(found).__name__}).")
    return found, name


def _documents(text: str) -> Any:
    """The documents of a yaml file over one another, with `${...}` resolved."""
    parts = [OmegaConf.create(part or {}) for part in yaml.safe_load_all(text)]
    return _with_numbers(OmegaConf.to_container(OmegaConf.merge(*parts), resolve=True))


def _with_numbers(value: Any) -> Any:
    """Numbers such as 1e-6, which yaml takes for strings."""
    if isinstance(value, dict):
        return {name: _with_numbers(below) for name, below in value.items()}
    if isinstance(value, list):
        return [_with_numbers(item) for item in value]
    return float(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else value


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
    if text in ("no", "off", "yes", "on"):
        return text  # which yaml takes for a truth value
    return _with_numbers(yaml.safe_load(text))


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
