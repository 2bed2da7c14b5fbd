"""The page of documented parameters is complete, and says what is true."""

import re

import coverage

from lit_rl.migrate.rows import rows

LINES = [line for line in coverage.PAGE.read_text().splitlines() if line.startswith("| `")]


def test_the_page_has_every_documented_parameter_in_order() -> None:
    names = [re.match(r"\| `([^`]*)`", line).group(1) for line in LINES]  # type: ignore[union-attr]
    assert names == [row.name for source in coverage.TITLES for row in rows() if row.source == source]


def test_every_key_that_exists_has_a_test() -> None:
    there = [line for line in LINES if "**not yet**" not in line and "| none |" not in line]
    assert [line for line in there if line.split("|")[-2].strip() == ""] == []


def test_the_page_is_up_to_date() -> None:
    """Write it anew with `python tests/conf/coverage.py`."""
    assert coverage.PAGE.read_text() == coverage.text()
