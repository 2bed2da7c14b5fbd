"""What a reward function sees, what it returns, and the class to write one with."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

from lit_rl.errors import DataError


@dataclass(frozen=True)
class Sample:
    """One completion, with all that is known about its row.

    Attributes:
        prompt: text or chat messages, as in the data.
        completion: decoded, special tokens left out; of a conversation, everything after the prompt.
        completion_ids: tokens, the end token included.
        columns: values of the data row by column name.
        finish_reason: "stop" or "length".
        prompt_ids: tokens of the prompt as it was generated from; empty where that is not known.
        row: of the data; None where that is not known.
        data_source_key: column with the name of the source.
        reward_model_key: column with `{"ground_truth": ...}`.
        messages: of a conversation after the prompt, the policy's turns and the environment's; else empty.
        environment_reward: what the environment gave; None where it gave nothing.
    """

    prompt: Any
    completion: str
    completion_ids: list[int] = field(default_factory=list)
    columns: dict[str, Any] = field(default_factory=dict)
    finish_reason: str = "stop"
    prompt_ids: list[int] = field(default_factory=list)
    row: int | None = None
    data_source_key: str = "data_source"
    reward_model_key: str = "reward_model"
    messages: list[dict[str, Any]] = field(default_factory=list)
    environment_reward: float | None = None

    @property
    def answer(self) -> str:
        """The completion, or the last turn of a conversation."""
        return self.messages[-1]["content"] if self.messages else self.completion

    @property
    def data_source(self) -> str:
        """Name of the row's source. Raises DataError where there is none."""
        source = self.columns.get(self.data_source_key)
        if source is None:
            raise DataError(
                f"The reward needs the column {self.data_source_key!r} (data.data_source_key); the row has "
                f"{sorted(self.columns)}. Name the column that holds the source."
            )
        return str(source)

    @property
    def ground_truth(self) -> Any:
        """The reference answer. Raises DataError where there is none."""
        cell = self.columns.get(self.reward_model_key)
        if not isinstance(cell, dict) or cell.get("ground_truth") is None:
            raise DataError(
                f"The reward needs {self.reward_model_key!r} (data.reward_model_key) as a struct with "
                f"ground_truth (found {cell!r}); the row has the columns {sorted(self.columns)}."
            )
        return cell["ground_truth"]


@dataclass(frozen=True)
class RewardResult:
    """What one function says about one completion.

    Attributes:
        score: None (or NaN) where the function does not apply.
        feedback: text on what is wrong, for algorithms that learn from it; None where there is nothing to
            say.
        metrics: further numbers to log.
    """

    score: float | None
    feedback: str | None = None
    metrics: dict[str, float] = field(default_factory=dict)


NO_ANSWER, AN_ANSWER = {"no_answer": 1.0}, {"no_answer": 0.0}
"""Metrics of a verifier that looks for an answer: none was found, which is another thing than a wrong one."""


class Reward(ABC):
    """A verifier. Subclasses override `score`, or `__call__` where a whole batch is cheaper than its rows.

    Attributes:
        runs_alone: it is called in this process, without a limit of time, whatever the manager.
    """

    runs_alone: ClassVar[bool] = False

    def __call__(self, samples: list[Sample]) -> list[RewardResult]:
        """One result per sample, in order."""
        return [self.score(sample) for sample in samples]

    @abstractmethod
    def score(self, sample: Sample) -> RewardResult:
        """The result of one sample."""

    def answer(self, sample: Sample) -> str | None:
        """What the verifier reads as the answer, for counting equal ones; None where there is none."""
        return None

    def needed_columns(self) -> list[str]:
        """Data columns without which it cannot score."""
        return []
