"""From checked nodes to objects."""

from typing import Any

from hydra.utils import instantiate


def built(node: dict[str, Any], **parts: Any) -> Any:
    """The object a node describes, with plain Python lists and dictionaries inside.

    Args:
        node: a dictionary with `_target_`.
        parts: arguments that exist already; each takes the place of the node's own.
    """
    return instantiate(node, _convert_="all", **parts)


def built_all(nodes: dict[str, Any]) -> list[Any]:
    """The object of each node in a map, in order; null nodes are left out."""
    return [built(node) for node in nodes.values() if node is not None]


def built_trainer(node: dict[str, Any], **parts: Any) -> Any:
    """The trainer, with `val_check_interval: 0` (no validation) in the words that Lightning has for it."""
    if node["val_check_interval"] == 0:
        node = {**node, "val_check_interval": None, "limit_val_batches": 0}
    return built(node, **parts)
