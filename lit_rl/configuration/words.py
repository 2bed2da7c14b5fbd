"""From trees and files to the words of a command line, so that every way in ends in the same check."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from lit_rl.configuration.class_paths import from_class_paths
from lit_rl.configuration.compose import Source, compose
from lit_rl.configuration.job import quoted
from lit_rl.configuration.tree import ABSENT, at, leaves, link
from lit_rl.errors import ConfigError

HEADER = "# lit-rl: "
"""Starts the line of a printed configuration that names its choices, since a LightningCLI file cannot."""
GROUPS = ("algo", "data", "model", "reward", "optim", "rollout", "trainer")
LISTS = ("callbacks", "logger")


def literal(value: Any) -> str:
    """A plain value as Hydra's grammar writes it."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{literal(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(literal(item) for item in value) + "]"
    return quoted(value) if isinstance(value, str) else repr(value)


def file_words(file: str, source: Source, before: list[str]) -> list[str]:
    """The words that say what a yaml file says.

    Args:
        file: a path, or the path of a shipped file below `conf`, e.g. `algo/grpo.yaml`. A file of choices
            below `conf`, an experiment, a run's `config.yaml`, or LightningCLI's form with `class_path`.
        source: the shipped files.
        before: words that come before it.

    Raises:
        ConfigError: there is no such file, or it is no map.
    """
    path = Path(file) if Path(file).is_file() else source.folder / file
    if not path.is_file():
        raise ConfigError(f"--config must be a yaml file, or one below {source.folder} (found {file!r}).")
    if path.resolve().is_relative_to(source.folder):
        group = path.resolve().parent.relative_to(source.folder).as_posix()
        return _choice_words(group, path.stem, before)
    text = path.read_text()
    document = yaml.safe_load(text) or {}
    if not isinstance(document, dict):
        raise ConfigError(f"--config must hold a map of keys (found a {type(document).__name__} in {file}).")
    said = [
        word for line in text.splitlines() if line.startswith(HEADER) for word in yaml.safe_load(line[10:])
    ]
    chosen = [*said, *_defaults_words(document.pop("defaults", []), file)]
    is_theirs = "class_path" in text or "seed_everything" in document
    tree = from_class_paths(document) if is_theirs else document
    return tree_words(tree, source, [*before, *chosen])[len(before) :]


def _choice_words(group: str, choice: str, before: list[str]) -> list[str]:
    if group not in LISTS:
        return [f"{group}={choice}"]
    earlier = [word.partition("=")[2].strip("[]") for word in before if word.startswith(f"{group}=")]
    listed = [*(earlier[-1].split(",") if earlier else ["default"]), choice]
    return [f"{group}=[{','.join(dict.fromkeys(listed))}]"]


def _defaults_words(defaults: Iterable[Any], file: str) -> list[str]:
    """The choices of an experiment's defaults list."""
    words = []
    for entry in defaults:
        if entry == "_self_":
            continue
        if not isinstance(entry, dict):
            raise ConfigError(
                f"--config {file}: defaults may only choose, as in 'override /algo: grpo' (found {entry!r})."
            )
        for group, choice in entry.items():
            words.append(f"{group.removeprefix('override ').lstrip('/')}={literal_choice(choice)}")
    return words


def literal_choice(choice: Any) -> str:
    """A choice, or a list of them, as a word."""
    return f"[{','.join(choice)}]" if isinstance(choice, list) else str(choice)


def tree_words(tree: dict[str, Any], source: Source, chosen: list[str]) -> list[str]:
    """The words that make a tree of what the choices make: further choices by target, then what differs.

    Args:
        tree: any part of a configuration; nodes may name their `_target_`.
        source: the shipped files.
        chosen: words so far.
    """
    words = _with_choices(tree, source, chosen)
    composed = compose(source, _complete(words, tree)).tree
    tree = _with_our_names(tree, composed)
    for key, value in leaves(tree):
        here = at(composed, key)
        if link(value) is not None or (here is not ABSENT and here == value):
            continue
        words.append(f"{'+' if _is_new_entry(key, composed) else ''}{key}={literal(value)}")
    return _entries_joined(words, tree, composed)


def _with_choices(tree: dict[str, Any], source: Source, chosen: list[str]) -> list[str]:
    """The words so far, and a choice for each node whose class or source they do not make."""
    words = list(chosen)
    made = compose(source, _complete(words, tree)).tree
    for group in GROUPS:
        target = at(tree, f"{group}._target_")
        if target not in (ABSENT, at(made, f"{group}._target_")):
            choice = choice_of(group, target, source)
            words += [f"{group}={choice}"] if choice else []
    for group, key in (("model", "path"), ("data", "train_files")):
        is_given = at(tree, f"{group}.{key}") not in (ABSENT, None, "embedded")
        if is_given and at(made, f"{group}.{key}") == "embedded":
            words.append(f"{group}={'hf' if group == 'model' else 'parquet'}")
    return words


def choice_of(group: str, target: str, source: Source) -> str | None:
    """The shipped choice whose class is the target: the one named after it, else the first."""
    name = target.rpartition(".")[2].lower()
    files = sorted((source.folder / group).glob("*.yaml"), key=lambda file: (file.stem != name, file.stem))
    for file in files:
        if f"_target_: {target}\n" in file.read_text():
            return file.stem
    return None


def _complete(words: list[str], tree: dict[str, Any]) -> list[str]:
    """The words so far and what cannot be left out."""
    needed = ["model.path"] if "model=hf" in words else []
    return [*words, *(f"{key}={literal(at(tree, key))}" for key in needed if at(tree, key) is not ABSENT)]


def _with_our_names(tree: dict[str, Any], composed: dict[str, Any]) -> dict[str, Any]:
    """Callbacks and loggers under the names that the composed tree has for their classes."""
    tree = dict(tree)
    for group in LISTS:
        given = tree.pop(group, None)
        if given is None:
            continue
        names = {at(composed, f"{group}.{name}._target_"): name for name in composed[group] or {}}
        places = {
            composed["rollout"]["_target_"]: "rollout",
            composed["checkpoint"]["_target_"]: "checkpoint",
        }
        own: dict[str, Any] = {}
        for name, node in given.items():
            target = node.get("_target_") if isinstance(node, dict) else None
            if link(node) is not None:
                continue
            if group == "callbacks" and target in places:
                tree[places[target]] = node
            else:
                own[names.get(target, name) if target else name] = node
        tree[group] = own
    return tree


def _is_new_entry(key: str, composed: dict[str, Any]) -> bool:
    """Whether the key adds to a map that is open; a misspelt key elsewhere must stay an error."""
    if at(composed, key) is not ABSENT:
        return False
    place = key.rpartition(".")[0]
    while place and at(composed, place) is ABSENT:
        place = place.rpartition(".")[0]
    return place in LISTS or at(composed, place) == {}


def _entries_joined(words: list[str], tree: dict[str, Any], composed: dict[str, Any]) -> list[str]:
    """New callbacks and loggers as one word each, with their `_target_`."""
    out = list(words)
    for group in LISTS:
        for name, node in (tree.get(group) or {}).items():
            if isinstance(node, dict) and "_target_" in node and name not in (composed[group] or {}):
                out = [word for word in out if not word.startswith(f"+{group}.{name}.")]
                out.append(f"+{group}.{name}={literal(node)}")
    return out
