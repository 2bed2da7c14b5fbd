"""SoftOverlong: a penalty that grows over the last tokens before the length limit."""

from lit_rl.errors import ConfigError
from lit_rl.rewards.reward import Reward, RewardResult, Sample


class SoftOverlong(Reward):
    """0 up to the start of the zone before the limit, then down in a straight line to -1 at the limit.

    `-(length - (limit - zone)) / zone` inside the zone. Source: DAPO, arXiv 2503.14476, eq. 13; verl
    `overlong_buffer`, TRL `get_soft_overlong_punishment`. Its weight is the factor of the penalty.

    Args:
        max_completion_length: the limit, in tokens.
        soft_punish_cache: tokens of the zone; null is a fifth of the limit, as in the paper.

    Raises:
        ConfigError: the zone is empty or longer than the limit.
    """

    def __init__(self, max_completion_length: int, soft_punish_cache: int | None = None) -> None:
        zone = max(max_completion_length // 5, 1) if soft_punish_cache is None else soft_punish_cache
        if not 1 <= zone <= max_completion_length:
            raise ConfigError(
                f"reward.reward_funcs.soft_overlong.soft_punish_cache must be null or from 1 to the limit of "
                f"{max_completion_length} tokens (found {soft_punish_cache!r})."
            )
        self.limit, self.zone = max_completion_length, zone

    def score(self, sample: Sample) -> RewardResult:
        """The penalty of the sample's length."""
        inside = len(sample.completion_ids) - (self.limit - self.zone)
        return RewardResult(-min(max(inside / self.zone, 0.0), 1.0))
