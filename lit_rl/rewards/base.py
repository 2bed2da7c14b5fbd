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
from lit_rl.rewards.model import NAME as MODEL
from lit_rl.rewards.model import ModelReward, RewardModel
from lit_rl.rewards.results import ON_ERROR, checked_results, settled
from lit_rl.rewards.reward import Reward, RewardResult, Sample
from lit_rl.rewards.waiting import WaitingReward, awaited
from lit_rl.time_limit import OutOfTime, limited

__all__ = ["Reward", "RewardResult", "RewardSum", "Sample", "Scores", "metric_sums"]


RIGHT = 1.0 - 1e-6
"""A score that makes a completion right."""


@dataclass
class Scores:
    """Rewards of B rows by R functions.

    Attributes:
        rewards: (B,) float32. Weighted sum over the functions that applied, NaN where none did.
        rewards_per_func: (B, R) float32. NaN where a function did not apply.
        feedback: B texts or None; several functions' texts on lines of their own.
        row_metrics: B times numbers by name: `error_frac` (1 where a function failed), `missing_frac` (1
            without a reward), and `<function>/<metric>` as the functions gave them.
    """

    rewards: Tensor
    rewards_per_func: Tensor
    feedback: list[str | None]
    row_metrics: list[dict[str, float]]

    @property
    def sums(self) -> dict[str, tuple[float, int]]:
        """Sum of each metric, and the number of rows that have it."""
        return metric_sums(self.row_metrics)

    @property
    def metrics(self) -> dict[str, float]:
        """Mean of each metric over the rows that have it."""
        return {name: total / count for name, (total, count) in self.sums.items()}


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
        on_error: when a function raises, runs out of time, or returns infinity, no score, or not one score
            per row: "error" stops and names the row, "zero" scores 0, "drop" takes the row out of the loss
            and the group's statistics. NaN and None are no errors.
        reward_model: a network that scores too.

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
        reward_model: RewardModel | None = None,
    ) -> None:
        functions = _with_custom(dict(reward_funcs or {}), custom_reward_function)
        if reward_model is not None and reward_model.enable:
            functions = {**functions, MODEL: reward_model.reward()}
        if not functions:
            raise ConfigError(
                "reward.reward_funcs must hold at least one function (found none); use reward=by_source, or "
                "set reward.custom_reward_function.path, or reward.reward_model.enable=true."
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

    def is_right(self, scores: Scores) -> Tensor:
        """(B,) bool: the verifier's score, or the weighted sum, reaches 1 (to 1e-6)."""
        column = scores.rewards
        if self.verifier is not None:
            column = scores.rewards_per_func[:, self.names.index(self.verifier)]
        return column.nan_to_num() >= RIGHT

    def answer(self, sample: Sample) -> str | None:
        """What the verifier, or the first function, reads as the answer; None: it finds none in time."""
        function = self.functions[self.verifier or self.names[0]]
        try:
            return limited(lambda: function.answer(sample), self.manager.timeout)
        except OutOfTime:
            return None

    def to_(self, device: torch.device) -> None:
        """Let reward models score on this device."""
        for function in self.functions.values():
            if isinstance(function, ModelReward):
                function.to_(device)

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
            DataError: a function failed under `on_error=error`, or the data lacks what a function reads.
        """
        waiting = {name: f for name, f in self.functions.items() if isinstance(f, WaitingReward)}
        outcomes = awaited(waiting, samples, self.manager.timeout)
        columns, failures = [], []
        for name in self.functions:
            if name in outcomes:
                results, failed = settled(name, outcomes[name], samples, self.on_error)
            else:
                function = self.functions[name]
                call = function if function.runs_alone else self.manager.call(name)
                results, failed = checked_results(name, call, samples, self.on_error)
            columns.append(results)
            failures.append(failed)
        has_failed: set[int] = set().union(*failures)
        dropped = has_failed if self.on_error == "drop" else set()
        per_func = torch.tensor(
            [[_number(result.score) for result in results] for results in columns], dtype=torch.float32
        ).T.reshape(len(samples), len(columns))  # (B, R)
        rewards = self._totals(per_func, dropped)
        row_metrics = _row_metrics(self.names, columns)
        for row, (metrics, reward) in enumerate(zip(row_metrics, rewards.tolist(), strict=True)):
            metrics["error_frac"] = float(row in has_failed)
            metrics["missing_frac"] = float(math.isnan(reward))
        return Scores(rewards, per_func, self._feedback(columns), row_metrics)

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


def _row_metrics(names: list[str], columns: list[list[RewardResult]]) -> list[dict[str, float]]:
    """Further metrics of each row, under `<function>/<metric>`."""
    return [
        {
            f"{name}/{metric}": value
            for name, result in zip(names, results, strict=True)
            for metric, value in sorted(result.metrics.items())
        }
        for results in zip(*columns, strict=True)
    ]


def metric_sums(row_metrics: Iterable[dict[str, float]]) -> dict[str, tuple[float, int]]:
    """Sum of each metric, and the number of rows that have it.

    Args:
        row_metrics: numbers by name for each row.
    """
    sums: dict[str, tuple[float, int]] = {}
    for metrics in row_metrics:
        for name, value in metrics.items():
            total, count = sums.get(name, (0.0, 0))
            sums[name] = (total + value, count + 1)
    return sums
