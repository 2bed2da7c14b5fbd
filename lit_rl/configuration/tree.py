"""Plain nested dictionaries, addressed by dotted keys."""

import copy
import re
from collections.abc import Iterator
from typing import Any

NODE_KEYS = ("_target_", "_partial_")
ABSENT: Any = type("Absent", (), {"__repr__": lambda self: "absent", "__bool__": lambda self: False})()
_LINK = re.compile(r"\$\{([\w.]+)\}")


def joined(prefix: str, name: str) -> str:
    """The dotted key of a name below a prefix."""
    return f"{prefix}.{name}" if prefix else name


def at(tree: Any, key: str) -> Any:
    """The value at a dotted key, or ABSENT."""
    for part in key.split("."):
        if not isinstance(tree, dict) or part not in tree:
            return ABSENT
        tree = tree[part]
    return tree


def leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every (dotted key, value) that is not a dictionary with something in it; node keys left out."""
    for name, value in tree.items():
        if name in NODE_KEYS:
            continue
        if isinstance(value, dict) and value:
            yield from leaves(value, joined(prefix, name))
        else:
            yield joined(prefix, name), value


def link(value: Any) -> str | None:
    """The key that a whole-node link such as `${model}` leads to; None for any other value."""
    match = _LINK.fullmatch(value) if isinstance(value, str) else None
    return match.group(1) if match else None


def expanded(tree: dict[str, Any]) -> dict[str, Any]:
    """A copy in which every link is replaced by the node it leads to."""

    def expand(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: expand(below) for name, below in value.items()}
        target = link(value)
        return expand(at(tree, target)) if target is not None else copy.deepcopy(value)

    return expand(tree)
