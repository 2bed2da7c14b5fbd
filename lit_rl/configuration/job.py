"""One job: its checked configuration, and what is done around it."""

import copy
import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from lit_rl.configuration.compose import Composition, Source, compose, overridden
from lit_rl.configuration.launched import handing_over, is_started_from_outside, process_rank
from lit_rl.configuration.secrets import is_secret, masked
from lit_rl.configuration.settings import Settings
from lit_rl.configuration.tree import at, expanded, leaves
from lit_rl.errors import ConfigError

CONFIG_FILE = "config.yaml"
NOT_IN_FINGERPRINT = (
    "run_dir",
    "project_name",
    "experiment_name",
    "log_level",
    "plan",
    "full_trace",
    "checkpoint.default_local_dir",
)


@dataclass
class Job:
    """A configuration that passed every check.

    Attributes:
        arguments: the command line that makes it again.
        composition: before the check.
        settings: after it.
        tree: what constructors get: links replaced by the nodes they lead to, numbers as numbers.
    """

    arguments: list[str]
    composition: Composition
    settings: Settings
    tree: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.tree = expanded(self.settings.tree)

    @property
    def folder(self) -> Path:
        """Where the run writes."""
        return Path(self.tree["run_dir"])

    def fingerprint(self, *without: str) -> str:
        """A hash of everything that can change a result.

        Args:
            without: dotted keys that do not count, beside names, folder and how much is printed.
        """
        left_out = {*without, *NOT_IN_FINGERPRINT}
        kept = [(key, value) for key, value in leaves(self.settings.tree) if key not in left_out]
        return hashlib.sha256(repr(sorted(kept, key=lambda item: item[0])).encode()).hexdigest()[:16]

    @contextmanager
    def started(self) -> Iterator[None]:
        """Make the folder, save the configuration, and tell further ranks what to run."""
        run_dir = os.path.abspath(self.folder)
        arguments = [a for a in self.arguments if not a.lstrip("+").startswith("run_dir=")]
        with handing_over([*arguments, f"run_dir={quoted(run_dir)}"]):
            if process_rank() == 0:
                self.folder.mkdir(parents=True, exist_ok=True)
                (self.folder / CONFIG_FILE).write_text(saved_text(self.composition.raw, self.settings.tree))
            yield


def checked(source: Source, overrides: Sequence[str], flags: Sequence[str] = ()) -> Job:
    """Compose and check one job. Loads no model and writes nothing.

    Args:
        source: the yaml files.
        overrides: as on the command line, without sweeps.
        flags: Hydra's own flags that the composition depends on.

    Raises:
        ConfigError: everything that is wrong.
    """
    composition = compose(source, overrides)
    if is_started_from_outside() and overridden(overrides, "run_dir") is None:
        raise ConfigError(
            "run_dir must be given when torchrun or SLURM starts the ranks: each would take its own."
        )
    from lit_rl.configuration.validate import validate  # brings torch: misspelt keys are found without it

    settings = validate(composition.tree, composition.baseline, composition.choices)
    settings.defaults.update(composition.group_defaults)
    settings.defaults.update(_followed(composition))
    return Job([*flags, *overrides], composition, settings)


def _followed(composition: Composition) -> dict[str, Any]:
    """What keys that follow another one follow it to: that is their default."""
    return {
        key: at(composition.tree, key)
        for key, value in leaves(composition.raw)
        if isinstance(value, str)
        and "${" in value
        and at(composition.baseline, key) == at(composition.tree, key)
    }


def saved_text(raw: dict[str, Any], tree: dict[str, Any]) -> str:
    """The configuration as yaml: values as they are used, secrets masked, environment variables by name.

    Args:
        raw: before interpolation.
        tree: after it.
    """
    out = copy.deepcopy(tree)
    for key, value in leaves(raw):
        if isinstance(value, str) and "oc.env" in value:
            _put(out, key, value)
    for key, value in leaves(tree):
        if is_secret(key) or isinstance(value, (dict, list)):
            _put(out, key, masked(key, value))
    return yaml.safe_dump(out, sort_keys=False, allow_unicode=True)


def _put(tree: dict[str, Any], key: str, value: Any) -> None:
    place, _, name = key.rpartition(".")
    parent = at(tree, place) if place else tree
    if isinstance(parent, dict):
        parent[name] = value


def quoted(value: str) -> str:
    """A string that Hydra's grammar reads as itself."""
    escaped = re.sub(r"(\\*)'", r"\1\1\\'", value)  # a backslash is one only before a quote
    return "'" + re.sub(r"(\\+)$", r"\1\1", escaped) + "'"
