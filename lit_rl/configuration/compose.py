"""Compose a configuration with Hydra into plain dictionaries, and what it is when the user sets nothing."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lit_rl.configuration.hydra_errors import as_config_error
from lit_rl.configuration.tree import leaves, link

FOREIGN = ("optim", "trainer")
OVERLAYS = ("debug", "preset", "preset@_global_", "critic")  # set keys, have none of their own


@dataclass(frozen=True)
class Composition:
    """One job's configuration.

    Attributes:
        tree: plain dictionaries, interpolations resolved; a link to a whole node stays `${model}`.
        raw: the same before interpolation.
        baseline: the tree of the same choices, experiment among them, without overrides and debug. Where both
            have the same interpolation, it holds what the tree holds: a value that follows another key is
            not set.
        choices: the chosen file of each group that takes one.
        group_defaults: by dotted key, what the chosen files of FOREIGN say by themselves: the defaults of
            constructors that are not ours.
    """

    tree: dict[str, Any]
    raw: dict[str, Any]
    baseline: dict[str, Any]
    choices: dict[str, str]
    group_defaults: dict[str, Any]


@dataclass(frozen=True)
class Source:
    """Where the yaml files are.

    Attributes:
        folder: absolute path of the folder that holds the groups.
        name: the file to start from, without suffix.
    """

    folder: Path
    name: str = "train"

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Hydra's compose API over this folder; inside a Hydra job the job's own."""
        is_open = GlobalHydra.instance().is_initialized()
        context = nullcontext() if is_open else initialize_config_dir(str(self.folder), version_base="1.3")
        with context:
            yield


def compose(source: Source, overrides: Sequence[str]) -> Composition:
    """Compose one job.

    Args:
        source: the yaml files.
        overrides: as on the command line, without sweeps.

    Raises:
        ConfigError: an override cannot be read, or names a key or choice that does not exist.
    """
    with source.opened():
        try:
            config = _composed(source, overrides)
            chosen: Any = OmegaConf.to_container(config.hydra.runtime.choices)
            choices = {
                str(group): choice
                for group, choice in chosen.items()
                if not str(group).startswith("hydra/") and isinstance(choice, str)
            }
            raw, tree = _plain(config)
            base = _composed(source, _choices_alone(overrides, choices))
            _fill_missing(base, config)
            base_raw, base_tree = _plain(base)
            group_defaults = _group_defaults(choices)
        except (HydraException, OmegaConfBaseException, OSError, ValueError) as error:
            raise as_config_error(error, list(overrides), lambda o: _raw(_composed(source, o))) from error
    return Composition(tree, raw, _followed(base_raw, base_tree, raw, tree), choices, group_defaults)


def sweep_jobs(source: Source, overrides: Sequence[str]) -> list[list[str]]:
    """The overrides of each job of `-m` under Hydra's own sweeper.

    Raises:
        ConfigError: an override cannot be read.
    """
    with source.opened():
        try:
            hydra = GlobalHydra.instance().hydra
            assert hydra is not None
            parsed = OverridesParser.create(config_loader=hydra.config_loader).parse_overrides(
                list(overrides)
            )
            return BasicSweeper.split_arguments(parsed, max_batch_size=None)[0]
        except HydraException as error:
            raise as_config_error(error, list(overrides), lambda o: {}) from error


def _composed(source: Source, overrides: Sequence[str]) -> DictConfig:
    return hydra_compose(source.name, overrides=list(overrides), return_hydra_config=True)


def _group_defaults(choices: dict[str, str]) -> dict[str, Any]:
    defaults: dict[str, Any] = {}
    for group in (name for name in FOREIGN if name in choices):
        alone = hydra_compose(f"{group}/{choices[group]}")
        plain: Any = OmegaConf.to_container(alone, resolve=False)
        defaults.update(leaves(plain))
    return defaults


def _fill_missing(base: DictConfig, config: DictConfig) -> None:
    """What must be given has no default: the baseline takes it from the job."""
    plain: Any = OmegaConf.to_container(base, resolve=False)
    for key, value in leaves(plain):
        if value == "???" and not key.startswith("hydra."):
            OmegaConf.update(base, key, OmegaConf.select(config, key, throw_on_missing=True))


def _plain(config: DictConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """(before, after) interpolation, Hydra's own node left out."""
    raw = _raw(config)
    return raw, _with_links(raw, {name: _resolved(config, name) for name in raw})


def _raw(config: DictConfig) -> dict[str, Any]:
    plain: Any = OmegaConf.to_container(config, resolve=False)
    return {name: value for name, value in plain.items() if name != "hydra"}


def _resolved(config: DictConfig, name: str) -> Any:
    value = config[name] if not OmegaConf.is_missing(config, name) else "???"
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def _with_links(raw: Any, resolved: Any) -> Any:
    if isinstance(raw, dict) and isinstance(resolved, dict):
        return {name: _with_links(raw[name], resolved[name]) for name in raw}
    is_node = isinstance(resolved, dict) and "_target_" in resolved
    return raw if link(raw) is not None and is_node else resolved


def _choices_alone(overrides: Sequence[str], choices: dict[str, str]) -> list[str]:
    """Overrides that make the same choices and set nothing."""
    hydra = GlobalHydra.instance().hydra
    assert hydra is not None
    loader = hydra.config_loader
    kept = [f"{group}={choice}" for group, choice in choices.items() if group not in OVERLAYS]
    for text in overrides:
        override = OverridesParser.create(config_loader=loader).parse_override(text)
        group = override.key_or_group
        is_choice = (
            isinstance(override.value(), list) and "." not in group and loader.get_group_options(group)
        )
        if is_choice or group.startswith("hydra.searchpath"):
            kept.append(text)
    return kept


def _followed(base_raw: Any, base: Any, raw: Any, tree: Any) -> Any:
    if (
        isinstance(base_raw, dict)
        and isinstance(base, dict)
        and isinstance(raw, dict)
        and isinstance(tree, dict)
    ):
        return {
            name: _followed(base_raw[name], base[name], raw.get(name), tree.get(name)) for name in base_raw
        }
    is_same = isinstance(raw, str) and "${" in raw and raw == base_raw
    return tree if is_same else base


def overridden(overrides: Sequence[str], key: str) -> str | None:
    """What the command line gives for a key, as text; None when it does not."""
    for text in reversed(overrides):
        name, equals, value = text.lstrip("+").partition("=")
        if equals and name == key:
            return value
    return None
