"""One check of a whole configuration, for Hydra and LightningCLI alike: names, types, ranges, rules.

A tree is plain nested dictionaries. A node is a dictionary with `_target_`; a link is a string `${model}`
that stands for another node. Nothing is built here but the small settings blocks, so no model is loaded.
"""

import dataclasses
import difflib
import inspect
import typing
from typing import Any

from lit_rl.configuration.root import Run
from lit_rl.configuration.rules import RULES
from lit_rl.configuration.secrets import masked
from lit_rl.configuration.settings import Settings
from lit_rl.configuration.signature import (
    Misfit,
    Signature,
    described,
    field_defaults,
    fitted,
    resolved,
    signature,
)
from lit_rl.configuration.tree import ABSENT, NODE_KEYS, at, joined, link
from lit_rl.errors import ConfigError

NODES = ("algo", "data", "model", "reward", "optim", "schedule", "rollout", "checkpoint", "trainer")
NODE_MAPS = ("callbacks", "logger")


def validate(
    cfg_tree: dict[str, Any], baseline: dict[str, Any], choices: dict[str, str] | None = None
) -> Settings:
    """Check a resolved tree.

    Args:
        cfg_tree: the whole configuration as plain dictionaries.
        baseline: the tree of the same choices where the user has set nothing; a key that differs from it and
            from the class default counts as set.
        choices: the chosen file of each group, as far as there are groups.

    Returns:
        The settings with number-like strings turned into numbers.

    Raises:
        ConfigError: everything that is wrong, one line each: full key, what was found, what is allowed.
    """
    walk = _Walk(cfg_tree)
    tree = walk.root()
    _raise(walk.problems)
    _raise(list(_block_problems(tree)))
    settings = Settings(tree, baseline, walk.defaults, choices or {})
    _raise([message for rule in RULES if (message := rule(settings)) is not None])
    return settings


def unknown_key(key: str, value: Any, legal: list[str]) -> str:
    """The message for a name that does not exist.

    Args:
        key: its full dotted key.
        value: what was given for it.
        legal: names that exist in its place.
    """
    prefix, _, name = key.rpartition(".")
    near = difflib.get_close_matches(name, legal, n=1, cutoff=0.5)
    hint = f" Did you mean {joined(prefix, near[0])}?" if near else ""
    place = f"Keys of {prefix}" if prefix else "Keys and groups"
    return f"{key} is not a key (found {_shown(key, value)}).{hint} {place}: {', '.join(sorted(legal))}."


def _raise(problems: list[str]) -> None:
    if problems:
        raise ConfigError("\n".join(problems))


def _shown(key: str, value: Any) -> str:
    value = masked(key, value)
    if isinstance(value, dict) and "_target_" in value:
        return f"a block with _target_ {value['_target_']}"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


class _Walk:
    """Goes through a tree once; collects problems, class defaults and the tree with fitted values."""

    def __init__(self, tree: dict[str, Any]) -> None:
        self.tree = tree
        self.problems: list[str] = []
        self.defaults: dict[str, Any] = {}

    def root(self) -> dict[str, Any]:
        run = signature(Run)
        legal = [*run.parameters, *NODES, *NODE_MAPS]
        out = {}
        for name, value in self.tree.items():
            if name in NODES:
                out[name] = self.node(name, value)
            elif name in NODE_MAPS:
                out[name] = self.node_map(name, value)
            elif name in run.parameters:
                out[name] = self.argument(name, value, run, name)
            else:
                self.problems.append(unknown_key(name, value, legal))
        return out

    def node_map(self, key: str, nodes: Any) -> Any:
        """`callbacks` and `logger`: a block per name, null for one that is taken out."""
        if not isinstance(nodes, dict):
            return self.misfit(key, nodes, "a map of blocks; choose with " + key + "=[default]")
        return {
            name: below if below is None or link(below) else self.node(joined(key, name), below)
            for name, below in nodes.items()
        }

    def node(self, key: str, node: Any, implied: Any = None) -> Any:
        """A block: its target resolves, its names exist, its values fit, nothing is missing."""
        if not isinstance(node, dict) or not (implied or "_target_" in node):
            return self.misfit(key, node, "a block with _target_")
        try:
            target = implied if "_target_" not in node else resolved(node["_target_"])
        except ImportError as error:
            self.problems.append(f"{key}._target_ {node['_target_']!r} cannot be imported: {error}.")
            return node
        accepted = signature(target)
        defaults = field_defaults(target)
        for name, parameter in accepted.parameters.items():
            self.defaults[joined(key, name)] = defaults.get(name, parameter.default)
        out = {"_target_": node.get("_target_", f"{target.__module__}.{target.__qualname__}")}
        for name, value in node.items():
            if name in NODE_KEYS or name in ("_convert_", "_recursive_"):
                out[name] = value
            elif name in accepted.parameters or accepted.is_open:
                out[name] = self.argument(joined(key, name), value, accepted, name)
            else:
                self.problems.append(unknown_key(joined(key, name), value, list(accepted.parameters)))
        if not node.get("_partial_"):
            self.check_complete(key, node, accepted, defaults)
        return out

    def check_complete(self, key: str, node: dict, accepted: Signature, defaults: dict[str, Any]) -> None:
        for name, parameter in accepted.parameters.items():
            is_missing = name not in node and name not in defaults and parameter.default is ABSENT
            if is_missing and inspect.isclass(accepted.target):
                self.problems.append(f"{joined(key, name)} must be given; it has no default.")

    def argument(self, key: str, value: Any, accepted: Signature, name: str) -> Any:
        annotation = accepted.parameters[name].annotation if name in accepted.parameters else Any
        if value == "???":
            self.problems.append(f"{key} must be given: {described(annotation)}.")
            return value
        linked = link(value)
        if linked is not None:
            return self.checked_block(key, value, at(self.tree, linked), annotation)
        if isinstance(value, dict):
            block = block_class(annotation)
            if "_target_" in value or block is not None:
                out = self.node(key, value, implied=block)
                return self.checked_block(key, out, out, annotation)
            if any(isinstance(below, dict) and "_target_" in below for below in value.values()):
                return {n: self.inner(joined(key, n), v) for n, v in value.items()}
        try:
            return fitted(value, annotation)
        except Misfit as misfit:
            return self.misfit(key, value, str(misfit))

    def inner(self, key: str, value: Any) -> Any:
        return self.node(key, value) if isinstance(value, dict) and "_target_" in value else value

    def checked_block(self, key: str, value: Any, node: Any, annotation: Any) -> Any:
        """A block in the place of an argument must make what the argument wants."""
        if not isinstance(node, dict) or "_target_" not in node:
            return self.misfit(key, value, described(annotation))
        try:
            result = signature(resolved(node["_target_"])).result
        except ImportError:
            return value  # reported where the block stands
        wanted = [kind for kind in _members(annotation) if isinstance(kind, type) and kind is not type(None)]
        is_callable = not wanted or bool(node.get("_partial_"))
        if not is_callable and isinstance(result, type) and not issubclass(result, tuple(wanted)):
            return self.misfit(key, value if link(value) else node, described(annotation))
        return value

    def misfit(self, key: str, value: Any, allowed: str) -> Any:
        self.problems.append(f"{key} must be {allowed} (found {_shown(key, value)}).")
        return value


def _members(annotation: Any) -> list[Any]:
    """The types of a union, or the type alone, without their arguments."""
    args = typing.get_args(annotation)
    is_union = args and described(annotation) and typing.get_origin(annotation) is not typing.Literal
    origin = typing.get_origin(annotation)
    if is_union and str(origin) in ("typing.Union", "<class 'types.UnionType'>", "<class 'typing.Union'>"):
        return [member for arg in args for member in _members(arg)]
    return [origin or annotation]


def block_class(annotation: Any) -> Any:
    """The settings class of an argument that takes one, so that a block needs no `_target_` of its own."""
    found = [kind for kind in _members(annotation) if dataclasses.is_dataclass(kind)]
    return found[0] if len(found) == 1 else None


def _block_problems(tree: dict[str, Any]) -> list[str]:
    """Ranges: build every settings block, inner ones first, and collect what they refuse."""
    problems: list[str] = []
    root = {name: value for name, value in tree.items() if name not in (*NODES, *NODE_MAPS)}
    _build({"_target_": f"{Run.__module__}.{Run.__qualname__}", **root}, "", problems)
    for name, node in tree.items():
        if name in (*NODES, *NODE_MAPS):
            _build_below(node, name, problems)
    return problems


def _build_below(node: Any, key: str, problems: list[str]) -> Any:
    if not isinstance(node, dict):
        return node
    values = {n: _build_below(v, joined(key, n), problems) for n, v in node.items()}
    if "_target_" not in node or not dataclasses.is_dataclass(resolved(node["_target_"])):
        return values
    return _build(values, key, problems)


def _build(values: dict[str, Any], key: str, problems: list[str]) -> Any:
    target: Any = resolved(values["_target_"])
    try:
        return target(**{n: v for n, v in values.items() if n not in NODE_KEYS})
    except ConfigError as error:
        own, text = getattr(target, "key", key), str(error)
        problems.append(text.replace(f"{own}.", f"{key}.") if own != key else text)
        return values
