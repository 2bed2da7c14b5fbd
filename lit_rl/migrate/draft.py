"""Draft: the experiment under way, and what became of each of their keys."""

from dataclasses import dataclass, field
from typing import Any

import yaml

from lit_rl.configuration.compose import Source, compose
from lit_rl.configuration.tree import ABSENT, at, joined, leaves
from lit_rl.migrate.rows import Row

TAKEN, DIFFERS, WITHOUT, NOT_YET, UNKNOWN = "taken as", "differs", "no meaning", "not yet", "unknown"
OFF: tuple[Any, ...] = (None, False, 0, -1, 1, "", [], {})
"""Values that switch something off where they are also the documented default."""
PLACEHOLDERS = {"model.path": "model", "data.train_files": "rows.parquet"}
DEFAULT_CHOICES = {"model": "tiny", "data": "arithmetic", "rollout": "hf", "trainer": "cpu", "optim": "adamw"}
LISTS = ("callbacks", "logger")


@dataclass(frozen=True)
class Line:
    """What became of a key: theirs, what was found, the verdict, and the rest of the sentence."""

    key: str
    found: Any
    verdict: str
    text: str

    def __str__(self) -> str:
        return f"{self.key} ({self.found!r}): {self.verdict} {self.text}".rstrip()


@dataclass
class Value:
    """A value for a key of ours, with where it comes from."""

    theirs: str
    found: Any
    value: Any
    note: str = ""
    default: str = ""

    @property
    def is_off(self) -> bool:
        """Whether it asks for nothing: the documented default, and one that switches off."""
        is_switch = any(self.found == off and (off is False) == (self.found is False) for off in OFF)
        if not is_switch and not self.theirs.endswith("_key"):
            return False
        return self.default.startswith("${") or self.default.lower() in (
            str(self.found).lower(),
            "null" if self.found is None else "",
        )


@dataclass
class Draft:
    """Choices and values for our keys, and the report.

    Attributes:
        choices: by group, with their key that asks for it.
        lists: entries beside the default ones of callbacks; loggers.
        values: by our key.
        lines: the report so far.
        entry: the file that its keys are of, train or evaluate.
    """

    choices: dict[str, tuple[str, str, Any]] = field(default_factory=dict)
    lists: dict[str, list[str]] = field(default_factory=dict)
    values: dict[str, Value] = field(default_factory=dict)
    lines: list[Line] = field(default_factory=list)
    entry: str = "train"

    def say(self, theirs: str, found: Any, verdict: str, text: str) -> None:
        """Add a line to the report."""
        self.lines.append(Line(theirs, found, verdict, text))

    def take(self, theirs: str, found: Any, key: str, value: Any, row: Row | None = None) -> None:
        """Set a key of ours; the last one wins."""
        before = self.values.get(key)
        if before is not None and before.theirs != theirs:
            self.say(before.theirs, before.found, TAKEN, f"{key}, together with {theirs}.")
        note, default = (row.note, row.default) if row else ("", "")
        self.values[key] = Value(theirs, found, value, note, default)

    def choose(self, theirs: str, found: Any, group: str, choice: str) -> None:
        """Choose a file of a group; the last one wins."""
        self.choices[group] = (choice, theirs, found)

    def add(self, theirs: str, found: Any, group: str, names: list[str]) -> None:
        """List callbacks or loggers."""
        self.say(theirs, found, TAKEN, f"{group}=[{','.join(names)}].")
        self.lists[group] = list(dict.fromkeys([*self.lists.get(group, []), *names]))

    def finish(self, source: Source) -> dict[str, Any]:
        """Check against what exists, and report.

        Returns:
            The experiment: `defaults`, and a tree of what differs from the choices' own values.
        """
        self._drop_missing_choices(source)
        tree = compose(Source(source.folder, self.entry), self._words()).tree
        out: dict[str, Any] = {}
        for key, value in self.values.items():
            here = at(tree, key)
            if here is ABSENT and not self._is_entry(key, tree):
                self._missing(key, value, source)
            elif here == value.value:
                self.say(value.theirs, value.found, TAKEN, f"{key}={_shown(here)}, the default. {value.note}")
            else:
                _put(out, key, value.value)
                self.say(value.theirs, value.found, TAKEN, f"{key}={_shown(value.value)}. {value.note}")
        if self.entry == "evaluate":
            return out
        defaults: list[dict[str, Any]] = [
            {f"override /{g}": c} for g, (c, *_) in self.choices.items() if c != DEFAULT_CHOICES.get(g)
        ]
        defaults += [{f"override /{group}": names} for group, names in self.lists.items()]
        return {"defaults": [*defaults, "_self_"], **out}

    @property
    def is_complete(self) -> bool:
        """Whether every key has an answer."""
        return not any(line.verdict in (NOT_YET, UNKNOWN) for line in self.lines)

    def _drop_missing_choices(self, source: Source) -> None:
        for group, (choice, theirs, found) in list(self.choices.items()):
            if (source.folder / group / f"{choice}.yaml").is_file():
                self.say(theirs, found, TAKEN, f"{group}={choice}.")
            else:
                del self.choices[group]
                self.say(theirs, found, NOT_YET, f"{group}={choice} does not exist.")
        for group, names in list(self.lists.items()):
            existing = [name for name in names if (source.folder / group / f"{name}.yaml").is_file()]
            for name in sorted(set(names) - set(existing)):
                self.say(group, name, NOT_YET, f"{group}={name} does not exist.")
            self.lists[group] = existing
            if not existing:
                del self.lists[group]

    def _words(self) -> list[str]:
        if self.entry == "evaluate":
            return []
        chosen = {"model": "hf", "data": "parquet", **{g: c for g, (c, *_) in self.choices.items()}}
        if chosen.get("algo") == "sft" and chosen["data"] == "parquet":
            chosen["data"] = "chat_sft"
        words = [f"{group}={choice}" for group, choice in chosen.items()]
        words += [f"{group}=[{','.join(names)}]" for group, names in self.lists.items()]
        return [*words, *(f"{key}={value}" for key, value in PLACEHOLDERS.items())]

    def _is_entry(self, key: str, tree: dict[str, Any]) -> bool:
        """Whether the key is an entry of a free-form map, or of an optimizer's or schedule's arguments."""
        place = key.rpartition(".")[0]
        return at(tree, place) == {} or place in ("optim", "schedule")

    def _missing(self, key: str, value: Value, source: Source) -> None:
        if value.is_off:
            self.say(value.theirs, value.found, TAKEN, f"nothing: {key} would be off.")
        elif _exists_elsewhere(key, source):
            self.say(value.theirs, value.found, DIFFERS, f"{key} has no effect with these choices; left out.")
        else:
            self.say(value.theirs, value.found, NOT_YET, f"{key} does not exist.")


def _exists_elsewhere(key: str, source: Source) -> bool:
    """Whether a shipped file that was not chosen has the key."""
    group, _, below = key.partition(".")
    for file in source.folder.rglob("*.yaml"):
        said = yaml.safe_load(file.read_text()) or {}
        if at(said, key) is not ABSENT and file.parent.name != "preset":
            return True
        if file.parent.name == group and at(said, below) is not ABSENT:
            return True
        if (
            file.parent.name == "policy_loss"
            and at(said, key.removeprefix("algo.policy_loss.")) is not ABSENT
        ):
            return True
    return False


def _put(tree: dict[str, Any], key: str, value: Any) -> None:
    *place, name = key.split(".")
    for part in place:
        tree = tree.setdefault(part, {})
    tree[name] = value


def _shown(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("\n...\n").strip()
    return text if len(text) <= 60 else text[:57] + "..."


def written(experiment: dict[str, Any], origin: str) -> str:
    """The experiment as a yaml file; an evaluation as the command that it is."""
    if "defaults" not in experiment:
        return f"python -m lit_rl.evaluate {' '.join(f'{k}={_shown(v)}' for k, v in leaves(experiment))}\n"
    head = f"# @package _global_\n# From {origin} by python -m lit_rl.migrate.\n"
    return head + yaml.safe_dump(experiment, sort_keys=False, allow_unicode=True)


def flat(document: dict[str, Any], names: set[str]) -> dict[str, Any]:
    """Values by dotted name; a map that is a parameter by itself stays one.

    Args:
        document: nested, or with dotted names already.
        names: of parameters that hold a map.
    """
    out: dict[str, Any] = {}

    def walk(value: Any, key: str) -> None:
        if isinstance(value, dict) and value and key not in names:
            for name, below in value.items():
                walk(below, joined(key, str(name)))
        else:
            out[key] = value

    walk(document, "")
    return out
