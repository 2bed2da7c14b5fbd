"""What the sandbox is said to hold, it holds."""

import sys
from pathlib import Path

import pytest

from lit_rl.errors import ConfigError
from lit_rl.rewards.sandbox import Sandbox

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from escapes import TRIES, escaped, forged, surroundings

OUT = {"take 2 GB by ten processes"}  # and why stands in lit_rl/rewards/README.md
FOOLED = {"read the mark of passed tests from its own text", "be equal to everything"}


def test_there_are_at_least_thirty_tries() -> None:
    assert len({attempt.what for attempt in TRIES}) >= 30


@pytest.mark.slow
@pytest.mark.field("sec/4")
def test_no_try_gets_out_but_those_that_the_page_names() -> None:
    sandbox = Sandbox()
    try:
        sandbox.run("pass")
    except ConfigError as error:
        pytest.skip(str(error))
    with surroundings() as facts:
        out = {attempt.what for attempt in TRIES if escaped(sandbox, attempt, facts)[0]}
    assert out <= OUT
    assert {what for _, what, is_out, _ in forged("namespaces") if is_out} <= FOOLED
