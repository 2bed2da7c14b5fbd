"""Discovery in numbers: shares within k attempts, what theory expects, and honest sentences."""

from pathlib import Path

import pytest

from lit_rl.discovery import Journal, Series, discovery_at, draw, expected_best_of, markdown, table, verdict
from lit_rl.errors import ConfigError
from lit_rl.functional.evaluation import wilson


def series(
    row: int, sdpo: int | None, best: int | None, *, seed: int = 0, right: int = 1, drawn: int = 8
) -> Series:
    attempts = {"sdpo": sdpo, "best_of_k": best}
    return Series(seed, row, attempts, "42" if sdpo else None, right, drawn)


def test_wilsons_interval_by_hand() -> None:
    """Two of eight: z^2 = 3.8415; centre (1/4 + 0.2401) / 1.4802, half 0.2517 by the formula."""
    share, low, high = wilson(2, 8)
    assert (share, low, high) == pytest.approx((0.25, 0.0715, 0.5907), abs=1e-4)
    assert wilson(0, 8)[:2] == (0.0, 0.0) and wilson(8, 8).high == 1.0
    assert wilson(0, 8).high == pytest.approx(3.8415 / (8 + 3.8415), abs=1e-4)


def test_discovery_counts_series_within_k_attempts() -> None:
    found = [series(0, 3, None), series(1, 5, 8), series(2, None, 1)]
    assert [discovery_at(found, "sdpo", k).mean for k in (2, 3, 5, 8)] == pytest.approx(
        [0, 1 / 3, 2 / 3, 2 / 3]
    )
    assert [row["k"] for row in table(found, 8)] == [1, 2, 4, 8]
    assert [row["k"] for row in table(found, 12)] == [1, 2, 4, 8, 12]


def test_the_expectation_pools_the_samples_of_a_question_and_has_no_bias() -> None:
    """Question 0: 2 of 16, question 1: 0 of 8. For k = 2: 1 - C(14, 2) / C(16, 2) = 29 / 120, and 0."""
    found = [series(0, 1, 1, right=2), series(0, 1, 1, seed=1, right=0), series(1, 1, 1, right=0)]
    expected = expected_best_of(found, 2)
    assert expected.mean == pytest.approx(29 / 240) and expected.low < 29 / 240 < expected.high
    assert expected_best_of(found, 9) is None, "a question has fewer samples"


def test_a_null_result_is_called_one() -> None:
    found = [series(row, 4 if row % 2 else None, 5 if row % 2 else None) for row in range(6)]
    (against, check) = verdict(found, table(found, 8))
    assert "no difference is shown" in against and "null result" in against
    assert "1 - (1 - p)^k" in check


def test_more_and_less_are_told_apart() -> None:
    better = [series(row, 4, None) for row in range(20)]
    worse = [series(row, None, 4) for row in range(20)]
    assert "SDPO finds more" in verdict(better, table(better, 8))[0]
    assert "SDPO finds less" in verdict(worse, table(worse, 8))[0]
    equal = [series(row, 2, 8) for row in range(20)]
    assert "SDPO is there after 2 attempts" in verdict(equal, table(equal, 8))[0]


def test_best_of_k_that_is_not_what_theory_says_is_reported() -> None:
    """All found at the first attempt, although samples succeed one time in eight."""
    found = [series(row, 1, 1) for row in range(20)]
    rows = table(found, 4)
    assert not rows[0]["agrees"] and "not at k = 1, 2, 4" in verdict(found, rows)[1]
    assert "| NO |" in markdown(found, rows, verdict(found, rows))


def test_the_picture_is_written(tmp_path: Path) -> None:
    draw([series(0, 3, None), series(1, None, 8)], 8, tmp_path / "discovery.png")
    assert (tmp_path / "discovery.png").read_bytes().startswith(b"\x89PNG")


def test_the_journal_goes_on_with_the_same_settings_only(tmp_path: Path) -> None:
    journal = Journal(tmp_path, {"fingerprint": "a"})
    journal.add(series(3, 7, None))
    again = Journal(tmp_path, {"fingerprint": "a"})
    assert again.series == journal.series and again.has(0, 3) and not again.has(1, 3)
    assert not list(tmp_path.glob("*.tmp"))
    with pytest.raises(ConfigError, match="other settings"):
        Journal(tmp_path, {"fingerprint": "b"})
