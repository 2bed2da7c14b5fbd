"""Environment: what the environment of a conversation gave (`rollout.environment`)."""

from lit_rl.rewards.reward import Reward, RewardResult, Sample


class EnvironmentReward(Reward):
    """The sum of the rewards that the row's environment gave, none where it gave none.

    The environment's feedback needs no function: it stands beside that of whatever reward there is.
    """

    def score(self, sample: Sample) -> RewardResult:
        """The result of one sample."""
        return RewardResult(sample.environment_reward)
