"""Your own reward function: a Python function in verl's or TRL's signature, told apart by its parameter
names.

    verl   compute_score(data_source, solution_str, ground_truth, extra_info=None)     once per completion
    TRL    f(prompts, completions, <any data column>, ...)                             once per batch

verl's may return a score or a mapping; TRL's a list of either. A mapping holds `score`, and if it likes
`feedback` (a text that SDPO shows the teacher) and further numbers, which are logged.

Either may be `async`: then the calls for all rows wait together, for a server say, and so do those of other
such functions.
"""

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

from lit_rl.errors import ConfigError, DataError
from lit_rl.rewards.results import NotScores, as_result, as_results
from lit_rl.rewards.reward import Reward, RewardResult, Sample
from lit_rl.rewards.waiting import Outcome, WaitingReward, outcome_of
from lit_rl.user_code import module_of

_VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
_TRL = ("prompts", "completions", "completion_ids")


def load_function(path: str, name: str) -> Reward:
    """The reward made of a function in a Python file.

    Args:
        path: of the file, `reward.custom_reward_function.path`.
        name: of the function in it.

    Raises:
        ConfigError: no such file or function, the file cannot be run, or the signature is neither verl's
            nor TRL's.
    """
    return from_function(from_file(path, name, "reward.custom_reward_function", "function"))


def from_file(path: str, name: str, key: str, kind: str) -> Callable:
    """A function or class of a Python file.

    Args:
        path: of the file.
        name: in it.
        key: dotted key of the pair, for messages.
        kind: what is looked for, for messages.

    Raises:
        ConfigError: no such file or name, or the file cannot be run.
    """
    found = getattr(module_of(path, f"{key}.path"), name, None)
    if not callable(found):
        raise ConfigError(
            f"{key}.name must be a {kind} in {path} (found {name!r}, which it does not define)."
        )
    return found


def from_function(function: Callable) -> Reward:
    """The reward made of a function.

    Args:
        function: in verl's or TRL's signature.

    Raises:
        ConfigError: the signature is neither.
    """
    name = getattr(function, "__name__", type(function).__name__)
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004
    )
    parameters = inspect.signature(function).parameters
    if "solution_str" in parameters:
        row_function = RowFunction(function, name)
        return AsyncRowFunction(row_function) if is_async else row_function
    if "completions" in parameters:
        batch_function = BatchFunction(function, name)
        return AsyncBatchFunction(batch_function) if is_async else batch_function
    raise ConfigError(
        f"The reward function {name!r} must take solution_str (verl: {', '.join(_VERL)}) or completions "
        f"(TRL: prompts, completions and data columns); found {list(parameters)}."
    )


class RowFunction(Reward):
    """A function in verl's signature.

    Args:
        function: of data_source, solution_str, ground_truth, extra_info; it gets those that it names.
        name: for errors.
    """

    def __init__(self, function: Callable, name: str) -> None:
        self.function, self.name = function, name
        self._accepts = _accepted(function, _VERL)

    def score(self, sample: Sample) -> RewardResult:
        """What the function returns for the sample."""
        return as_result(self.function(**self.arguments(sample)), f"Reward function {self.name!r}")

    def arguments(self, sample: Sample) -> dict[str, Any]:
        """The function's arguments for the sample."""
        values: dict[str, Any] = {}
        for key in self._accepts:
            match key:
                case "solution_str":
                    values[key] = sample.completion
                case "extra_info":
                    values[key] = sample.columns.get("extra_info")
                case _:
                    values[key] = getattr(sample, key)
        return values


class BatchFunction(Reward):
    """A function in TRL's signature.

    Completions are texts, or one assistant message each where prompts are chats, as in TRL; with an
    environment all messages after the prompt. A parameter
    with the name of a data column gets that column; `**kwargs` gets them all.

    Args:
        function: of prompts, completions, completion_ids and columns.
        name: for errors.
    """

    def __init__(self, function: Callable, name: str) -> None:
        self.function, self.name = function, name
        self._parameters = inspect.signature(function).parameters
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in self._parameters.values())

    def __call__(self, samples: list[Sample]) -> list[RewardResult]:
        """What the function returns for the samples."""
        values = self.function(**self.arguments(samples))
        return as_results(values, len(samples), f"Reward function {self.name!r}")

    def arguments(self, samples: list[Sample]) -> dict[str, list]:
        """The function's arguments for the samples. Raises DataError where a column is missing."""
        values: dict[str, list] = {
            "prompts": [s.prompt for s in samples],
            "completions": [_as_prompted(s) for s in samples],
            "completion_ids": [list(s.completion_ids) for s in samples],
        }
        for column in dict.fromkeys(name for s in samples for name in s.columns):
            values.setdefault(column, [s.columns.get(column) for s in samples])
        if not self._takes_all:
            values = {name: value for name, value in values.items() if name in self._parameters}
        if lacking := [name for name in self.needed_columns() if name not in values]:
            raise DataError(
                f"Reward function {self.name!r} needs the columns {lacking}, which the rows do not have "
                f"(found {sorted(samples[0].columns) if samples else []})."
            )
        return values

    def score(self, sample: Sample) -> RewardResult:
        """What the function returns for the sample alone."""
        return self([sample])[0]

    def needed_columns(self) -> list[str]:
        """Parameters that have no default and are data columns."""
        return [
            name
            for name, p in self._parameters.items()
            if name not in _TRL and p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
        ]


class AsyncRowFunction(WaitingReward):
    """An asynchronous function in verl's signature: one call per row, all at once.

    Args:
        inner: what it is called with.
    """

    def __init__(self, inner: RowFunction) -> None:
        self.inner = inner

    async def outcomes(self, samples: list[Sample], timeout: float) -> list[Outcome]:
        """A result for each row, or what went wrong with it."""
        return await asyncio.gather(*(outcome_of(self._result(s), timeout) for s in samples))

    async def _result(self, sample: Sample) -> RewardResult:
        value = await self.inner.function(**self.inner.arguments(sample))
        return as_result(value, f"Reward function {self.inner.name!r}")


class AsyncBatchFunction(WaitingReward):
    """An asynchronous function in TRL's signature: one call per batch, and one per row where that fails.

    Args:
        inner: what it is called with.
    """

    def __init__(self, inner: BatchFunction) -> None:
        self.inner = inner

    async def outcomes(self, samples: list[Sample], timeout: float) -> list[Outcome]:
        """A result for each row, or what went wrong with it."""
        together = await outcome_of(self._results(samples), timeout)
        if not isinstance(together, Exception):
            return together
        if len(samples) == 1:
            return [together]
        alone = await asyncio.gather(*(outcome_of(self._results([s]), timeout) for s in samples))
        outcomes = [rows if isinstance(rows, Exception) else rows[0] for rows in alone]
        is_mixed_up = isinstance(together, NotScores) and not any(isinstance(o, Exception) for o in outcomes)
        return [together] * len(samples) if is_mixed_up else outcomes

    async def _results(self, samples: list[Sample]) -> list[RewardResult]:
        values = await self.inner.function(**self.inner.arguments(samples))
        return as_results(values, len(samples), f"Reward function {self.inner.name!r}")

    def needed_columns(self) -> list[str]:
        """Parameters that have no default and are data columns."""
        return self.inner.needed_columns()


def _accepted(function: Callable, names: tuple[str, ...]) -> list[str]:
    """Those of the names that the function takes; ConfigError where it needs others."""
    parameters = inspect.signature(function).parameters
    named = {n: p for n, p in parameters.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    if others := [n for n, p in named.items() if n not in names and p.default is p.empty]:
        raise ConfigError(
            f"The reward function {getattr(function, '__name__', '')!r} needs {others}; in verl's signature "
            f"it gets {', '.join(names)}. Give the others defaults."
        )
    takes_all = len(named) < len(parameters)
    return [name for name in names if takes_all or name in named]


def _as_prompted(sample: Sample) -> Any:
    if isinstance(sample.prompt, str) or sample.prompt is None:
        return sample.completion
    return list(sample.messages) or [{"role": "assistant", "content": sample.completion}]
