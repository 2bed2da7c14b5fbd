"""Counts of the recorded cases, printed after the run."""

import pytest

COUNTS = pytest.StashKey[dict[str, tuple[int, int]]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[COUNTS] = {}


@pytest.fixture(scope="session")
def counts(pytestconfig: pytest.Config) -> dict[str, tuple[int, int]]:
    """(passed, left out) by kind."""
    return pytestconfig.stash[COUNTS]


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    table = config.stash[COUNTS]
    if not table:
        return
    terminalreporter.section("recorded cases")
    for kind, (passed, left_out) in sorted(table.items()):
        terminalreporter.write_line(f"{kind:32} {passed:5} passed {left_out:5} left out")
    totals = (sum(column) for column in zip(*table.values(), strict=True))
    terminalreporter.write_line("{:32} {:5} passed {:5} left out".format("all", *totals))
