"""Checks of whole configurations, without running them."""

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import yaml

from lit_rl.configuration.compose import Composition, Source, compose
from lit_rl.configuration.settings import Settings
from lit_rl.configuration.validate import validate
from lit_rl.errors import ConfigError

CONF = Path(__file__).resolve().parents[2] / "conf"


@pytest.fixture
def source() -> Source:
    """The yaml files of this checkout."""
    return Source(CONF)


@cache
def _composed(choices: tuple[str, ...]) -> Composition:
    return compose(Source(CONF), choices)


def _checked(line: str) -> Settings:
    """Check a command line: choices go through Hydra, once each; dotted keys are set in the tree."""
    words = line.split()
    choices = tuple(word for word in words if "." not in word.partition("=")[0])
    composition = _composed(choices)
    tree = copy.deepcopy(composition.tree)
    for word in words:
        key, _, value = word.lstrip("+").partition("=")
        if word not in choices:
            *place, leaf = key.split(".")
            node = tree
            for part in place:
                node = node[part]
            node[leaf] = yaml.safe_load(value)
    return validate(tree, composition.baseline, composition.choices)


@pytest.fixture
def accepted() -> Callable[[str], Settings]:
    """A function from a command line to the checked settings."""
    return _checked


@pytest.fixture
def refusal() -> Callable[[str], str]:
    """A function from a command line that must be refused to the message."""

    def message(line: str) -> str:
        with pytest.raises(ConfigError) as caught:
            _checked(line)
        return str(caught.value)

    return message
