"""Settings: a checked configuration beside what it would be had the user set nothing."""

from collections.abc import Iterable
from typing import Any

from lit_rl.configuration.secrets import masked
from lit_rl.configuration.tree import ABSENT, at, leaves, link


class Settings:
    """A resolved tree, read by dotted key.

    Args:
        tree: the whole configuration; links stand as `${model}`.
        baseline: the tree of the same choices where nothing is set.
        defaults: by dotted key, of the constructor, or of the group file where that is not ours; ABSENT
            where there is none.
        choices: the chosen file of each group.
    """

    def __init__(
        self,
        tree: dict[str, Any],
        baseline: dict[str, Any],
        defaults: dict[str, Any],
        choices: dict[str, str],
    ) -> None:
        self.tree, self.baseline, self.defaults, self.choices = tree, baseline, defaults, choices

    def __contains__(self, key: str) -> bool:
        return at(self.tree, key) is not ABSENT

    def __getitem__(self, key: str) -> Any:
        value = at(self.tree, key)
        if value is ABSENT:
            raise KeyError(key)
        target = link(value)
        return self[target] if target is not None else value

    def get(self, key: str, otherwise: Any = None) -> Any:
        """The value, or another one where the key does not exist in this combination."""
        value = at(self.tree, key)
        return otherwise if value is ABSENT else self[key]

    def is_set(self, key: str) -> bool:
        """Whether the value differs from its class default and from the baseline (its preset)."""
        value = at(self.tree, key)
        if value is ABSENT:
            return False
        same = [
            other for other in (at(self.baseline, key), self.defaults.get(key, ABSENT)) if other is not ABSENT
        ]
        return all(value != other for other in same) and bool(same or value is not None)

    def set_below(self, prefix: str, *, without: tuple[str, ...] = ()) -> list[str]:
        """Keys below a prefix that are set.

        Args:
            prefix: a dotted key.
            without: leaf names that do not count.
        """
        block = at(self.tree, prefix)
        if not isinstance(block, dict):
            return []
        keys = [key for key, _ in leaves(block, prefix)]
        return [key for key in keys if key.rsplit(".", 1)[-1] not in without and self.is_set(key)]

    def shown(self, key: str) -> str:
        """The value for a message; secrets masked."""
        text = repr(masked(key, self[key]))
        return text if len(text) <= 80 else text[:77] + "..."

    def idle(self, keys: Iterable[str], needs: str) -> str | None:
        """The message for keys that are set and change nothing, None when none is set.

        Args:
            keys: dotted keys.
            needs: what would give them an effect.
        """
        found = [f"{key} (found {self.shown(key)})" for key in dict.fromkeys(keys) if self.is_set(key)]
        if not found:
            return None
        have = "has" if len(found) == 1 else "have"
        need = "it needs" if len(found) == 1 else "they need"
        return f"{' and '.join(found)} {have} no effect here; {need} {needs}."
