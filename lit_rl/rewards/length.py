"""Length: whether a completion has as many tokens as asked for."""

from lit_rl.errors import ConfigError
from lit_rl.rewards.reward import Reward, RewardResult, Sample


class Length(Reward):
    """1 from `low` to `high` tokens, else less by the distance as a share of the nearer bound, down to 0.

    Tokens of the completion, the end token included.

    Args:
        low: least number.
        high: greatest number; null is no limit.

    Raises:
        ConfigError: the bounds are none.
    """

    def __init__(self, low: int = 0, high: int | None = None) -> None:
        if low < 0 or (high is not None and high < max(low, 1)):
            raise ConfigError(
                f"The bounds of Length must be 0 <= low <= high, high at least 1 (found {low!r}, {high!r})."
            )
        self.low, self.high = low, high

    def score(self, sample: Sample) -> RewardResult:
        """Score of the completion's length."""
        length = len(sample.completion_ids)
        if length < self.low:
            return RewardResult(length / self.low, f"Your answer was too short: {length} tokens.")
        if self.high is not None and length > self.high:
            excess = length / self.high - 1
            return RewardResult(max(0.0, 1 - excess), f"Your answer was too long: {length} tokens.")
        return RewardResult(1.0)
