"""Random: a coin. The control run: whatever improves under it was not learnt from the reward."""

from lit_rl.rewards.reward import Reward, RewardResult, Sample
from lit_rl.seeding import derived_seed


class Random(Reward):
    """1 or 0 by a coin that depends on the seed, the prompt and the completion alone, and never on the
    answer.

    The same completion of the same prompt always gets the same reward, on any rank and after a resume.
    Held-out accuracy under this reward should stay where it started.

    Args:
        seed: of the coin.
        probability: of a 1, in [0, 1].
    """

    def __init__(self, seed: int = 0, probability: float = 0.5) -> None:
        self.seed, self.probability = seed, probability

    def score(self, sample: Sample) -> RewardResult:
        """The coin of the sample."""
        draw = derived_seed(self.seed, "reward", repr(sample.prompt), sample.completion) / 2**63
        return RewardResult(1.0 if draw < self.probability else 0.0)
