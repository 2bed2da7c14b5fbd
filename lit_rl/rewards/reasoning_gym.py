"""Reasoning Gym: the verifier that comes with each task of the package reasoning-gym."""

import importlib
import json
from collections.abc import Callable
from functools import cache
from typing import Any

from lit_rl.errors import ConfigError, DataError
from lit_rl.rewards.reward import Reward, RewardResult, Sample

PREFIX = "reasoning_gym/"


class ReasoningGym(Reward):
    """What the task's own verifier gives, from 0 to 1.

    The answer is what stands between the last `<answer>` and `</answer>`, else the whole completion. The task
    is the rest of the data source, the question as the verifier knows it is JSON in `extra_info`'s `entry`.
    Needs the extra `reasoning-gym`.
    """

    def score(self, sample: Sample) -> RewardResult:
        """Score and feedback of the sample. Raises ConfigError where reasoning-gym is not installed."""
        info = sample.columns.get("extra_info")
        if not isinstance(info, dict) or not isinstance(info.get("entry"), str):
            raise DataError(
                "The verifiers of reasoning-gym need the column 'extra_info' with 'entry' (found "
                f"{info!r}); make the rows with data=reasoning_gym or python -m lit_rl.data.prepare."
            )
        attempt = self.answer(sample)
        no_answer = {"no_answer": float(attempt is None)}
        if attempt is None:
            return RewardResult(0.0, "There was no answer.", no_answer)
        score = float(_verifier(sample.data_source.removeprefix(PREFIX))(attempt, json.loads(info["entry"])))
        said = None if score >= 1 else f"Your answer was {attempt}, which is not right."
        return RewardResult(score, said, no_answer)

    def answer(self, sample: Sample) -> str | None:
        """The text that is verified."""
        _, opened, after = sample.answer.rpartition("<answer>")
        text = after.partition("</answer>")[0] if opened else sample.answer
        return text.strip() or None


@cache
def _verifier(task: str) -> Callable[[str, dict[str, Any]], float]:
    try:
        gym = importlib.import_module("reasoning_gym")
    except ImportError as error:
        raise ConfigError(
            f"The source {PREFIX}{task} needs the package reasoning-gym ({error}): "
            "`pip install 'lit_rl[reasoning-gym]'`."
        ) from error
    try:
        return gym.get_score_answer_fn(task)
    except ValueError as error:
        raise DataError(f"The source {PREFIX}{task} names no task of reasoning-gym ({error}).") from error
