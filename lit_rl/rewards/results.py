"""Calling a reward function, and bringing what it returned into one shape or one clear error.

A score is None, a bool, an int, a float, or anything of one element that has `.item()` (numpy, torch on
any device). A function may return such scores, or mappings with `score` and, if it likes, `feedback` and
further numbers. Whatever else happens (it raises, takes too long, returns something else, or infinity) is a
failure of rows, and follows `reward.on_error`.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from lit_rl.errors import ConfigError, DataError
from lit_rl.rewards.manager import Call
from lit_rl.rewards.reward import RewardResult, Sample
from lit_rl.time_limit import OutOfTime

ON_ERROR = ("error", "zero", "drop")

FAILURES_TOLD = 5
"""Failed rows of one call that are logged one by one."""

_log = logging.getLogger(__name__)


class NotAScore(DataError):
    """What a function returned for a row is no score."""


class NotScores(NotAScore):
    """What a function returned for a batch is not one score per row."""


def as_result(value: Any, where: str) -> RewardResult:
    """One returned value as a RewardResult, NaN as None.

    Args:
        value: what a function returned for one sample.
        where: the function and row, for the error.

    Raises:
        NotAScore: it is neither a score nor a mapping with one.
    """
    if isinstance(value, RewardResult):
        return RewardResult(_score(value.score, where), value.feedback, value.metrics)
    if not isinstance(value, Mapping):
        return RewardResult(_score(value, where))
    if "score" not in value:
        raise NotAScore(f"{where} returned a mapping without 'score' (found the keys {sorted(value)}).")
    feedback = value.get("feedback")
    if feedback is not None and not isinstance(feedback, str):
        raise NotAScore(f"{where} returned feedback that is no text (found {type(feedback).__name__}).")
    extra = {k: v for k, v in value.items() if k not in ("score", "feedback")}
    numbers = {k: float(v) for k, v in extra.items() if isinstance(v, Real) and math.isfinite(v)}
    return RewardResult(_score(value["score"], where), feedback, numbers)


def as_results(values: Any, count: int, where: str) -> list[RewardResult]:
    """What a function returned for a batch, as one RewardResult per sample.

    Args:
        values: list, tuple, array or tensor of scores or mappings.
        count: samples in the batch.
        where: the function, for the error.

    Raises:
        NotScores: not a sequence of that length.
        NotAScore: an element is no score.
    """
    if hasattr(values, "tolist"):
        values = values.tolist()
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise NotScores(f"{where} must return {count} scores, one per sample (found {_described(values)}).")
    if len(values) != count:
        raise NotScores(f"{where} must return {count} scores, one per sample (found {len(values)}).")
    return [as_result(value, f"{where}, sample {row},") for row, value in enumerate(values)]


def checked_results(
    name: str, function: Call, samples: list[Sample], on_error: str
) -> tuple[list[RewardResult], set[int]]:
    """Results of one function, and the rows it failed on.

    A batch in which something fails is scored again row by row, so that only the rows that fail are affected.

    Args:
        name: of the function.
        function: called with all samples at once.
        samples: B rows.
        on_error: "error" raises; "zero" and "drop" log the failure, and score it 0 or None.

    Raises:
        DataError: a failure under "error", naming function and row; under any setting, data that lacks what a
            function reads.
    """
    where = f"Reward function {name!r}"
    try:
        together = as_results(function(samples), len(samples), where)
    except Exception as error:
        if _is_of_the_setup(error) or (isinstance(error, NotScores) and on_error == "error"):
            raise
        whole = error
    else:
        return settled(name, together, samples, on_error)
    outcomes: list[RewardResult | Exception] = [whole] if len(samples) == 1 else []
    for sample in samples[len(outcomes) :]:
        try:
            outcomes += as_results(function([sample]), 1, where)
        except Exception as error:
            if _is_of_the_setup(error):
                raise
            outcomes.append(error)
            if on_error == "error":
                break
    if isinstance(whole, NotScores) and not any(isinstance(outcome, Exception) for outcome in outcomes):
        outcomes = [whole] * len(samples)  # alone each row has a score, together nobody knows whose they are
    return settled(name, outcomes, samples, on_error)


def settled(
    name: str, outcomes: Sequence[RewardResult | Exception], samples: list[Sample], on_error: str
) -> tuple[list[RewardResult], set[int]]:
    """Results with each failure as `on_error` says, and the rows that failed.

    Args:
        name: of the function.
        outcomes: what came of the first rows; under "error" they may end at a failure.
        samples: B rows.
        on_error: as for `checked_results`.

    Raises:
        DataError: a failure under "error".
    """
    where = f"Reward function {name!r}"
    results: list[RewardResult] = []
    failed: set[int] = set()
    for row, outcome in enumerate(outcomes):
        if isinstance(outcome, RewardResult) and math.isinf(outcome.score or 0.0):
            outcome = _NotFinite(f"returned {outcome.score}")
        if isinstance(outcome, RewardResult):
            results.append(outcome)
            continue
        if _is_of_the_setup(outcome):
            raise outcome
        message = _failure(where, row, samples[row], outcome)
        if on_error == "error":
            raise DataError(message) from outcome
        if len(failed) < FAILURES_TOLD:
            _log.warning("%s", message)
        failed.add(row)
        results.append(RewardResult(0.0 if on_error == "zero" else None))
    if len(failed) > FAILURES_TOLD:
        _log.warning("%s failed on %d of %d samples of the batch.", where, len(failed), len(samples))
    return results, failed


def _is_of_the_setup(error: Exception) -> bool:
    """Not the function's doing: a package or a column is missing."""
    return isinstance(error, (ConfigError, DataError)) and not isinstance(error, NotAScore)


class _NotFinite(Exception):
    """A score is infinite."""


def _failure(where: str, row: int, sample: Sample, error: Exception) -> str:
    is_told = isinstance(error, (_NotFinite, OutOfTime, NotAScore))
    reason = str(error).removesuffix(".") if is_told else f"raised {type(error).__name__}: {error}"
    of_data = "" if sample.row is None else f", row {sample.row} of the data"
    return (
        f"{where} failed on sample {row} of the batch{of_data} ({reason}); the completion starts with "
        f"{sample.completion[:80]!r}. Mend the function, or set reward.on_error to zero or drop."
    )


def _score(value: Any, where: str) -> float | None:
    if hasattr(value, "item") and getattr(value, "size", None) is not None:
        try:
            value = value.item()
        except (ValueError, RuntimeError):
            raise NotAScore(f"{where} must return one number (found {_described(value)}).") from None
    if value is None:
        return None
    if not isinstance(value, Real):
        raise NotAScore(f"{where} must return a number or None (found {_described(value)}).")
    number = float(value)
    return None if math.isnan(number) else number


def _described(value: Any) -> str:
    return f"{type(value).__name__} {str(value)[:60]!r}"
