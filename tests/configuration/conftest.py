"""Checks of whole configurations, without running them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from lit_rl.configuration.compose import Source
from lit_rl.configuration.job import Job, checked
from lit_rl.errors import ConfigError

CONF = Path(__file__).resolve().parents[2] / "conf"


@pytest.fixture
def source() -> Source:
    """The yaml files of this checkout."""
    return Source(CONF)


@pytest.fixture
def job(source: Source) -> Callable[[str], Job]:
    """A function from a command line to the checked job."""
    return lambda line: checked(source, line.split())


@pytest.fixture
def refusal(source: Source) -> Callable[[str], str]:
    """A function from a command line that must be refused to the message."""

    def message(line: str) -> str:
        with pytest.raises(ConfigError) as caught:
            checked(source, line.split())
        return str(caught.value)

    return message
