"""Pattern: whether a completion has a form, such as thinking before the answer."""

import re

from lit_rl.errors import ConfigError
from lit_rl.rewards.reward import Reward, RewardResult, Sample

THINK = r"<think>(?!.*<think>)(.*?)</think>.*"


class Pattern(Reward):
    """1 when the whole completion matches a regular expression, otherwise 0.

    Args:
        regex: a dot matches line breaks too. The default asks for one `<think>` block at the start.
        hint: feedback for a completion that does not match; null says nothing.

    Raises:
        ConfigError: the expression cannot be read.
    """

    def __init__(self, regex: str = THINK, hint: str | None = None) -> None:
        try:
            self.regex = re.compile(regex, re.DOTALL)
        except re.error as error:
            raise ConfigError(f"regex must be a regular expression (found {regex!r}: {error}).") from error
        self.hint = hint

    def score(self, sample: Sample) -> RewardResult:
        """Score and feedback of the sample."""
        if self.regex.fullmatch(sample.answer.strip()):
            return RewardResult(1.0)
        return RewardResult(0.0, self.hint)
