"""Calling a reward function, and bringing what it returned into one shape or one clear error.

A score is None, a bool, an int, a float, or anything of one element that has `.item()` (numpy, torch on
any device). A function may return such scores, or mappings with `score` and, if it likes, `feedback` and
further numbers.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from lit_rl.errors import ConfigError, DataError
from lit_rl.rewards.manager import Call, OutOfTime
from lit_rl.rewards.reward import RewardResult, Sample

ON_ERROR = ("error", "zero", "drop")

_log = logging.getLogger(__name__)


def as_result(value: Any, where: str) -> RewardResult:
    """One returned value as a RewardResult, NaN as None.

    Args:
        value: what a function returned for one sample.
        where: the function and row, for the error.

    Raises:
        DataError: it is neither a score nor a mapping with one.
    """
    if isinstance(value, RewardResult):
        return RewardResult(_score(value.score, where), value.feedback, value.metrics)
    if not isinstance(value, Mapping):
        return RewardResult(_score(value, where))
    if "score" not in value:
        raise DataError(f"{where} returned a mapping without 'score' (found the keys {sorted(value)}).")
    feedback = value.get("feedback")
    if feedback is not None and not isinstance(feedback, str):
        raise DataError(f"{where} returned feedback that is no text (found {type(feedback).__name__}).")
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
        DataError: not a sequence of that length, or an element is no score.
    """
    if hasattr(values, "tolist"):
        values = values.tolist()
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise DataError(f"{where} must return {count} scores, one per sample (found {_described(values)}).")
    if len(values) != count:
        raise DataError(f"{where} must return {count} scores, one per sample (found {len(values)}).")
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
        DataError: a failure under "error", naming function and row; a result of the wrong shape under any
            setting.
    """
    where = f"Reward function {name!r}"
    try:
        return _finite(as_results(function(samples), len(samples), where), where), set()
    except (ConfigError, DataError):
        raise
    except Exception as error:
        if on_error == "error" and len(samples) == 1:
            raise DataError(_failure(where, 0, samples[0], error)) from error
    results, failed = [], set()
    for row, sample in enumerate(samples):
        try:
            results += _finite(as_results(function([sample]), 1, where), where)
        except (ConfigError, DataError):
            raise
        except Exception as error:
            message = _failure(where, row, sample, error)
            if on_error == "error":
                raise DataError(message) from error
            _log.warning("%s", message)
            failed.add(row)
            results.append(RewardResult(0.0 if on_error == "zero" else None))
    return results, failed


class _NotFinite(Exception):
    """A score is infinite."""


def _finite(results: list[RewardResult], where: str) -> list[RewardResult]:
    for result in results:
        if result.score is not None and math.isinf(result.score):
            raise _NotFinite(f"{where} returned {result.score}")
    return results


def _failure(where: str, row: int, sample: Sample, error: Exception) -> str:
    is_told = isinstance(error, (_NotFinite, OutOfTime))
    reason = str(error) if is_told else f"raised {type(error).__name__}: {error}"
    return (
        f"{where} failed on sample {row} of the batch ({reason}); the completion starts with "
        f"{sample.completion[:80]!r}. Mend the function, or set reward.on_error to zero or drop."
    )


def _score(value: Any, where: str) -> float | None:
    if hasattr(value, "item") and getattr(value, "size", None) is not None:
        try:
            value = value.item()
        except (ValueError, RuntimeError):
            raise DataError(f"{where} must return one number (found {_described(value)}).") from None
    if value is None:
        return None
    if not isinstance(value, Real):
        raise DataError(f"{where} must return a number or None (found {_described(value)}).")
    number = float(value)
    return None if math.isnan(number) else number


def _described(value: Any) -> str:
    return f"{type(value).__name__} {str(value)[:60]!r}"
