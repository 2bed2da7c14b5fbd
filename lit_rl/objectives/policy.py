"""PolicyLoss: the policy-gradient loss of a step and how it is averaged; the clipped ratio, and no ratio.

Further losses stand in `ratio_losses` (another use of the ratio) and `covariance_losses` (tokens picked by
their part in the fall of the entropy).
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from lit_rl.errors import ConfigError
from lit_rl.functional.masking import Totals, aggregate, totals_of
from lit_rl.functional.policy_loss import clipped_surrogate, gpg_loss, is_clipped, log_ratio

LossType = Literal["grpo", "bnpo", "dapo", "dr_grpo", "seq_mean_token_sum"]

AGGREGATION = {
    "grpo": "seq_mean_token_mean",
    "bnpo": "token_mean",
    "dapo": "token_mean",
    "dr_grpo": "seq_mean_token_sum_norm",
    "seq_mean_token_sum": "seq_mean_token_sum",
}


class Terms(NamedTuple):
    """What the loss of each token is made of.

    Attributes:
        log_ratios: (B, T) or (B, 1), with gradient; as `PolicyLoss.log_ratio` gives them.
        logps: (B, T), with gradient.
        advantages: (B,) or (B, T).
        mask: (B, T) bool.
        picked: (B, T) bool, tokens that a `TokenPicking` loss treats apart; None for the others.
    """

    log_ratios: Tensor
    logps: Tensor
    advantages: Tensor
    mask: Tensor
    picked: Tensor | None = None


class PolicyLoss(ABC):
    """A loss per token, and how it becomes a scalar.

    Args:
        loss_type: "grpo" averages each row over its tokens, then over rows; "dapo" over the tokens of the
            optimizer batch; "bnpo" over the tokens of the micro-batch, so that it alone depends on how the
            batch is cut; "dr_grpo" divides by rows times `max_completion_length`; "seq_mean_token_sum" sums
            the tokens of a row and averages over rows.
        entropy_coeff: weight of the entropy bonus.
    """

    key: ClassVar[str] = "algo.policy_loss"

    loss_type: LossType
    entropy_coeff: float

    @abstractmethod
    def per_token(self, terms: Terms) -> Tensor:
        """(B, T), or (B, 1) for a value per row: the loss."""

    def log_ratio(self, logps: Tensor, old_logps: Tensor, mask: Tensor) -> Tensor:
        """(B, T), or (B, 1) at sequence level: log of the probability ratio."""
        return log_ratio(logps, old_logps, mask)

    def is_clipped(self, log_ratios: Tensor, advantages: Tensor) -> Tensor:
        """Bool, shaped as the log-ratios: a bound on the ratio is active. `train/clip_frac` is its mean."""
        return torch.zeros_like(log_ratios, dtype=torch.bool)

    def weighted(self, per_token: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
        """(B, T): the loss times weights per token (B, T), such as those of a rollout correction."""
        return per_token * weights

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

    @property
    def needs_every_row(self) -> bool:
        """Whether rows without credit matter too."""
        return self.entropy_coeff > 0 or self.loss_type == "bnpo"

    def check(self, *more: tuple[str, bool, str]) -> None:
        """Refuse values out of range.

        Args:
            more: (field, whether it is legal, the rule) beyond the common ones.

        Raises:
            ConfigError: one is.
        """
        checks = [
            ("entropy_coeff", self.entropy_coeff >= 0, "must be >= 0"),
            ("loss_type", self.loss_type in AGGREGATION, f"must be one of {', '.join(AGGREGATION)}"),
        ]
        for name, is_legal, rule in [*more, *checks]:
            if not is_legal:
                raise ConfigError(f"{self.key}.{name} {rule} (found {getattr(self, name)!r}).")


class Clipping:
    """Bounds of a ratio, for the losses that have the two fields.

    Args:
        epsilon: the ratio is clipped below at 1 - epsilon.
        epsilon_high: and above at 1 + epsilon_high; null is epsilon. DAPO uses 0.28.
    """

    epsilon: float
    epsilon_high: float | None

    @property
    def bounds(self) -> tuple[float, float]:
        """(epsilon, epsilon_high), the second resolved."""
        return self.epsilon, self.epsilon if self.epsilon_high is None else self.epsilon_high

    @property
    def bound_checks(self) -> tuple[tuple[str, bool, str], ...]:
        """Of the two fields, for `PolicyLoss.check`."""
        return (
            ("epsilon", self.epsilon >= 0, "must be >= 0"),
            ("epsilon_high", self.epsilon_high is None or self.epsilon_high >= 0, "must be null or >= 0"),
        )


@dataclass(frozen=True)
class ClippedSurrogate(Clipping, PolicyLoss):
    """PPO's clipped ratio (Schulman et al. 2017, arXiv 1707.06347, eq. 7), averaged as `loss_type` says.

    Args:
        dual_clip: cap of the ratio's effect at negative advantages (Ye et al. 2020, arXiv 1912.09729); null
            is off.
        importance_sampling_level: one ratio per "token", or per "sequence" from its mean log-ratio (GSPO,
            Zheng et al. 2025, arXiv 2507.18071).

    Raises:
        ConfigError: a value is out of range.
    """

    epsilon: float = 0.2
    epsilon_high: float | None = None
    dual_clip: float | None = None
    loss_type: LossType = "dapo"
    importance_sampling_level: Literal["token", "sequence"] = "token"
    entropy_coeff: float = 0.0

    def __post_init__(self) -> None:
        is_legal = self.dual_clip is None or self.dual_clip > 1
        self.check(*self.bound_checks, ("dual_clip", is_legal, "must be null or > 1"))

    def log_ratio(self, logps: Tensor, old_logps: Tensor, mask: Tensor) -> Tensor:
        return log_ratio(logps, old_logps, mask, self.importance_sampling_level)

    def per_token(self, terms: Terms) -> Tensor:
        low, high = self.bounds
        return clipped_surrogate(
            terms.log_ratios, terms.advantages, epsilon=low, epsilon_high=high, dual_clip=self.dual_clip
        )

    def is_clipped(self, log_ratios: Tensor, advantages: Tensor) -> Tensor:
        return is_clipped(log_ratios, advantages, *self.bounds)


@dataclass(frozen=True)
class GPG(PolicyLoss):
    """The plain policy gradient, without a ratio: for one optimizer step per rollout.

    Source: Chu et al., GPG, arXiv 2504.02546; its estimator is `adv_estimator=gpg`.

    Raises:
        ConfigError: a value is out of range.
    """

    loss_type: LossType = "dapo"
    entropy_coeff: float = 0.0

    def __post_init__(self) -> None:
        self.check()

    def per_token(self, terms: Terms) -> Tensor:
        return gpg_loss(terms.logps, terms.advantages)
