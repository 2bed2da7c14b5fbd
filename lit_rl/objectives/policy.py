"""ClippedSurrogate: the policy-gradient loss of a step and how it is averaged."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from lit_rl.errors import ConfigError
from lit_rl.functional.masking import Totals, aggregate, totals_of
from lit_rl.functional.policy_loss import clipped_surrogate, log_ratio

AGGREGATION = {
    "grpo": "seq_mean_token_mean",
    "bnpo": "token_mean",
    "dapo": "token_mean",
    "dr_grpo": "seq_mean_token_sum_norm",
    "seq_mean_token_sum": "seq_mean_token_sum",
}


@dataclass(frozen=True)
class ClippedSurrogate:
    """PPO's clipped ratio (Schulman et al. 2017, arXiv 1707.06347, eq. 7), averaged as `loss_type` says.

    Args:
        epsilon: the ratio is clipped below at 1 - epsilon.
        epsilon_high: and above at 1 + epsilon_high; null is epsilon. DAPO uses 0.28.
        dual_clip: cap of the ratio's effect at negative advantages (Ye et al. 2020, arXiv 1912.09729); null
            is off.
        loss_type: "grpo" averages each row over its tokens, then over rows; "dapo" over the tokens of the
            optimizer batch; "bnpo" over the tokens of the micro-batch, so that it alone depends on how the
            batch is cut; "dr_grpo" divides by rows times `max_completion_length`; "seq_mean_token_sum" sums
            the tokens of a row and averages over rows.
        importance_sampling_level: one ratio per "token", or per "sequence" from its mean log-ratio (GSPO,
            Zheng et al. 2025, arXiv 2507.18071).
        entropy_coeff: weight of the entropy bonus.

    Raises:
        ConfigError: a value is out of range.
    """

    key: ClassVar[str] = "algo.policy_loss"

    epsilon: float = 0.2
    epsilon_high: float | None = None
    dual_clip: float | None = None
    loss_type: Literal["grpo", "bnpo", "dapo", "dr_grpo", "seq_mean_token_sum"] = "dapo"
    importance_sampling_level: Literal["token", "sequence"] = "token"
    entropy_coeff: float = 0.0

    def __post_init__(self) -> None:
        checks = [
            ("epsilon", self.epsilon >= 0, "must be >= 0"),
            ("epsilon_high", self.epsilon_high is None or self.epsilon_high >= 0, "must be null or >= 0"),
            ("dual_clip", self.dual_clip is None or self.dual_clip > 1, "must be null or > 1"),
            ("entropy_coeff", self.entropy_coeff >= 0, "must be >= 0"),
            ("loss_type", self.loss_type in AGGREGATION, f"must be one of {', '.join(AGGREGATION)}"),
        ]
        for name, is_legal, rule in checks:
            if not is_legal:
                raise ConfigError(f"{self.key}.{name} {rule} (found {getattr(self, name)!r}).")

    @property
    def bounds(self) -> tuple[float, float]:
        """(epsilon, epsilon_high), the second resolved."""
        return self.epsilon, self.epsilon if self.epsilon_high is None else self.epsilon_high

    def log_ratio(self, logps: Tensor, old_logps: Tensor, mask: Tensor) -> Tensor:
        """(B, T), or (B, 1) at sequence level: log of the probability ratio."""
        return log_ratio(logps, old_logps, mask, self.importance_sampling_level)

    def per_token(self, log_ratios: Tensor, advantages: Tensor) -> Tensor:
        """(B, T) or (B, 1): the loss of each token.

        Args:
            log_ratios: (B, T) or (B, 1).
            advantages: (B,) or (B, T).
        """
        low, high = self.bounds
        return clipped_surrogate(
            log_ratios, advantages, epsilon=low, epsilon_high=high, dual_clip=self.dual_clip
        )

    def mean(self, per_token: Tensor, mask: Tensor, totals: Totals) -> Tensor:
        """The scalar of this micro-batch; over the micro-batches of all ranks it adds up to the loss.

        Args:
            per_token: (B, T), or (B, 1) for a value per row.
            mask: (B, T) bool.
            totals: of the whole optimizer batch over all ranks.
        """
        if self.loss_type == "bnpo":
            totals = totals_of(mask, totals.max_completion_length)
        return aggregate(per_token, mask, mode=AGGREGATION[self.loss_type], totals=totals)
