"""RewardSum: the weighted sum of several reward functions, which is what an algorithm calls."""

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lit_rl.errors import ConfigError
from lit_rl.rewards.custom import from_function, load_function
from lit_rl.rewards.manager import manager_of
from lit_rl.rewards.results import ON_ERROR, checked_results
from lit_rl.rewards.reward import Reward, RewardResult, Sample

__all__ = ["Reward", "RewardResult", "RewardSum", "Sample", "Scores"]


@dataclass
class Scores:
    """Rewards of B rows by R functions.

    Attributes:
        rewards: (B,) float32. Weighted sum over the functions that applied, NaN where none did.
        rewards_per_func: (B, R) float32. NaN where a function did not apply.
        feedback: B texts or None; several functions' texts on lines of their own.
        metrics: `error_frac` (rows on which a function failed), `missing_frac` (rows without a reward), and
            `<function>/<metric>`, the mean over the rows that have it.
    """

    rewards: Tensor
    rewards_per_func: Tensor
    feedback: list[str | None]
    metrics: dict[str, float]


class RewardSum:
    """Scores completions by a weighted sum of reward functions, as TRL does: what does not apply is left out.

    Args:
        reward_funcs: functions by name, in order. A file in `custom_reward_function` takes the place of
            `by_source`.
        reward_weights: one weight per function; null = 1.0 each. A function of weight 0 is only logged: it
            gives no feedback either.
        custom_reward_function: `path` of a Python file and `name` of a function in it, in verl's or TRL's
            signature.
        reward_manager: "naive" calls the functions one after another, "prime" splits the rows over processes.
        num_workers: processes of "prime".
        timeout: seconds per call. A batch that takes longer is scored row by row, a row that does has failed.
        on_error: when a function raises, runs out of time or returns an infinite score: "error" stops and
            names the row, "zero" scores 0, "drop" takes the row out of the loss and the group's statistics.
            NaN and None are no errors.

    Raises:
        ConfigError: no functions, not as many weights as functions, an unknown `on_error` or manager, or a
            number out of range.
    """

    def __init__(
        self,
        reward_funcs: dict[str, Reward] | None = None,
        reward_weights: list[float] | None = None,
        custom_reward_function: dict[str, Any] | None = None,
        reward_manager: str = "naive",
        num_workers: int = 2,
        timeout: float = 30.0,
        on_error: str = "error",
    ) -> None:
        functions = _with_custom(dict(reward_funcs or {}), custom_reward_function)
        if not functions:
            raise ConfigError(
                "reward.reward_funcs must hold at least one function (found none); use reward=by_source, or "
                "set reward.custom_reward_function.path."
            )
        if on_error not in ON_ERROR:
            raise ConfigError(f"reward.on_error must be one of {', '.join(ON_ERROR)} (found {on_error!r}).")
        self.functions = functions
        self.weights = _checked_weights(reward_weights, list(functions))
        self.on_error = on_error
        self.manager = manager_of(reward_manager, functions, num_workers=num_workers, timeout=timeout)
        self._has_warned = False

    @classmethod
    def of(cls, functions: Sequence[Callable[..., Any]], weights: list[float] | None = None) -> "RewardSum":
        """The sum of functions in verl's or TRL's signature, or of `Reward`s, under their own names.

        Args:
            functions: in order; a name that comes again gets a number.
            weights: one per function; None = 1.0 each.
        """
        named: dict[str, Reward] = {}
        for function in functions:
            name = getattr(function, "__name__", type(function).__name__)
            same = sum(other.partition("#")[0] == name for other in named)
            reward = function if isinstance(function, Reward) else from_function(function)
            named[f"{name}#{same + 1}" if same else name] = reward
        return cls(named, weights)

    @property
    def names(self) -> list[str]:
        """Names of the functions, one per column of `rewards_per_func`."""
        return list(self.functions)

    @property
    def verifier(self) -> str | None:
        """The function whose score of 1 makes a completion right; None: the weighted sum decides."""
        return "by_source" if "by_source" in self.functions else None

    def check_columns(self, available: Iterable[str]) -> None:
        """Refuse, before the first rollout, data that lacks what a function needs.

        Args:
            available: column names of the data.

        Raises:
            ConfigError: names the function, what it needs and what there is.
        """
        columns = sorted(available)
        for name, function in self.functions.items():
            lacking = [column for column in function.needed_columns() if column not in columns]
            if lacking:
                raise ConfigError(
                    f"reward.reward_funcs.{name} needs the columns {lacking}, which the data does not have "
                    f"(found {columns}); rename its parameters or give them defaults."
                )

    def __call__(self, samples: list[Sample]) -> Scores:
        """Rewards of the samples.

        Args:
            samples: B rows.

        Raises:
            DataError: a function failed under `on_error=error`, or returned something that is no score.
        """
        columns, failures = [], []
        for name in self.functions:
            results, failed = checked_results(name, self.manager.call(name), samples, self.on_error)
            columns.append(results)
            failures.append(failed)
        dropped = set().union(*failures) if self.on_error == "drop" else set()
        per_func = torch.tensor(
            [[_number(result.score) for result in results] for results in columns], dtype=torch.float32
        ).T.reshape(len(samples), len(columns))  # (B, R)
        rewards = self._totals(per_func, dropped)
        metrics = _means(self.names, columns)
        metrics["error_frac"] = len(set().union(*failures)) / max(len(samples), 1)
        metrics["missing_frac"] = float(rewards.isnan().float().mean()) if samples else 0.0
        return Scores(rewards, per_func, self._feedback(columns), metrics)

    def _totals(self, per_func: Tensor, dropped: set[int]) -> Tensor:
        weighted = per_func * torch.tensor(self.weights)
        totals = torch.where(per_func.isnan().all(1), torch.nan, weighted.nansum(1))
        if dropped:
            totals[sorted(dropped)] = torch.nan
        missing = sorted(set(totals.isnan().nonzero()[:, 0].tolist()) - dropped)
        if missing and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"No reward function applied to the rows {missing} of this batch: they count in no loss and "
                "in no group's statistics. Later batches are only counted, as reward/missing_frac. Return a "
                "number for every row, or silence this with "
                "warnings.filterwarnings('ignore', message='No reward function').",
                stacklevel=3,
            )
        return totals

    def _feedback(self, columns: list[list[RewardResult]]) -> list[str | None]:
        counted = [column for column, weight in zip(columns, self.weights, strict=True) if weight != 0]
        rows = zip(*counted, strict=True)
        texts = ["\n".join(result.feedback for result in row if result.feedback) for row in rows]
        return [text or None for text in texts]


def _with_custom(functions: dict[str, Reward], custom: dict[str, Any] | None) -> dict[str, Reward]:
    """The functions, with the user's own in the place of `by_source`, or at the end."""
    settings = {"path": None, "name": "compute_score", **(custom or {})}
    if unknown := sorted(set(settings) - {"path", "name"}):
        raise ConfigError(f"reward.custom_reward_function has no key {unknown[0]!r}; it has path and name.")
    path, name = settings["path"], settings["name"]
    if path is None:
        if name != "compute_score":
            raise ConfigError(
                f"reward.custom_reward_function.name (found {name!r}) needs "
                "reward.custom_reward_function.path; set it."
            )
        return functions
    own = load_function(path, name)
    if "by_source" in functions:
        return {
            name if key == "by_source" else key: own if key == "by_source" else f
            for key, f in functions.items()
        }
    return {**functions, name: own}


def _checked_weights(weights: list[float] | None, names: list[str]) -> list[float]:
    if weights is None:
        return [1.0] * len(names)
    if len(weights) != len(names):
        raise ConfigError(
            f"reward.reward_weights must hold one weight per reward function (found {len(weights)} for "
            f"{names}); give as many, or null for 1.0 each."
        )
    if not all(math.isfinite(weight) for weight in weights) or not any(weights):
        raise ConfigError(f"reward.reward_weights must be finite and not all 0 (found {weights}).")
    return [float(weight) for weight in weights]


def _number(score: float | None) -> float:
    return math.nan if score is None else score


def _means(names: list[str], columns: list[list[RewardResult]]) -> dict[str, float]:
    """Mean of every further metric, under `<function>/<metric>`."""
    values: dict[str, list[float]] = {}
    for name, results in zip(names, columns, strict=True):
        for result in results:
            for metric, value in result.metrics.items():
                values.setdefault(f"{name}/{metric}", []).append(value)
    return {key: sum(found) / len(found) for key, found in sorted(values.items())}
