"""By source: the built-in verifier for the row's data source."""

from lit_rl.errors import DataError
from lit_rl.rewards.arithmetic import Arithmetic
from lit_rl.rewards.exact_match import ExactMatch
from lit_rl.rewards.gsm8k import GSM8K
from lit_rl.rewards.math import Math
from lit_rl.rewards.multiple_choice import MultipleChoice
from lit_rl.rewards.reasoning_gym import ReasoningGym
from lit_rl.rewards.reward import Reward, RewardResult, Sample

MATH_SOURCES = (
    "lighteval/MATH",
    "DigitalLearningGmbH/MATH-lighteval",
    "HuggingFaceH4/MATH-500",
    "math_dapo",
    "aime",
)
"""Names by which verl's data sets of mathematics go."""


class BySource(Reward):
    """Scores each row with the verifier whose source name is the longest that the row's source starts with.

    | source | verifier |
    | --- | --- |
    | `openai/gsm8k` | GSM8K, strict |
    | `sciknoweval` | MultipleChoice |
    | `lit_rl/arithmetic` | Arithmetic |
    | `lit_rl/question` | ExactMatch |
    | `reasoning_gym/<task>` | ReasoningGym |
    | `lighteval/MATH` and the others of MATH_SOURCES | Math |

    Args:
        sources: further verifiers by source name, or others for the names above.
    """

    def __init__(self, sources: dict[str, Reward] | None = None) -> None:
        self.sources: dict[str, Reward] = {
            "openai/gsm8k": GSM8K(),
            "sciknoweval": MultipleChoice(),
            "lit_rl/arithmetic": Arithmetic(),
            "lit_rl/question": ExactMatch(),
            "reasoning_gym/": ReasoningGym(),
            **dict.fromkeys(MATH_SOURCES, Math()),
            **(sources or {}),
        }

    def __call__(self, samples: list[Sample]) -> list[RewardResult]:
        """One result per sample; each verifier is called once, with its rows."""
        rows: dict[str, list[int]] = {}
        for row, sample in enumerate(samples):
            rows.setdefault(self._name(sample), []).append(row)
        scored: dict[int, RewardResult] = {}
        for name, members in rows.items():
            results = self.sources[name]([samples[row] for row in members])
            scored.update(zip(members, results, strict=True))
        return [scored[row] for row in range(len(samples))]

    def score(self, sample: Sample) -> RewardResult:
        """The result of the sample's verifier."""
        return self.sources[self._name(sample)].score(sample)

    def answer(self, sample: Sample) -> str | None:
        """The answer that the sample's verifier reads."""
        return self.sources[self._name(sample)].answer(sample)

    def _name(self, sample: Sample) -> str:
        source = sample.data_source
        names = [name for name in self.sources if source.startswith(name)]
        if not names:
            raise DataError(
                f"No verifier for the data source {source!r}; the known ones are {sorted(self.sources)}. Set "
                "reward.custom_reward_function.path, or add one to reward.reward_funcs.by_source.sources."
            )
        return max(names, key=len)
