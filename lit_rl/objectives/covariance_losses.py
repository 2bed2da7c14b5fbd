"""Policy losses that treat apart the few tokens whose advantage and log-probability vary together the most.

Those tokens make the entropy fall (Cui et al., The Entropy Mechanism of Reinforcement Learning for Reasoning
Language Models, arXiv 2505.22617). They are picked over the whole optimizer batch of all ranks before it is
cut, by one more pass without gradient, so that the cut does not matter.
"""

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_rl.functional.policy_loss import (
    clip_cov_tokens,
    clipped_surrogate,
    is_clipped,
    kl_cov_tokens,
    penalised_surrogate,
)
from lit_rl.objectives.policy import Clipping, LossType, PolicyLoss, Terms


class TokenPicking(PolicyLoss):
    """A loss that treats some tokens of an optimizer batch apart.

    Args:
        cov_ratio: share of the optimizer batch's tokens that is picked, in (0, 1]; at least one token.
    """

    cov_ratio: float

    @abstractmethod
    def picked(self, terms: Terms, noise: Tensor) -> Tensor:
        """(B, T) bool: the tokens.

        Args:
            terms: of the whole optimizer batch over all ranks.
            noise: (B, T) uniform numbers, a stream per row; what is left to chance is decided by them.
        """

    def check(self, *more: tuple[str, bool, str]) -> None:
        super().check(*more, ("cov_ratio", 0 < self.cov_ratio <= 1, "must be in (0, 1]"))


@dataclass(frozen=True)
class ClipCov(Clipping, TokenPicking):
    """Clip-Cov: some tokens whose covariance lies in a band leave the gradient; which ones is drawn.

    Args:
        cov_low: candidates have a covariance above it,
        cov_high: and below it.

    Raises:
        ConfigError: a value is out of range.
    """

    epsilon: float = 0.2
    epsilon_high: float | None = None
    cov_ratio: float = 2e-4
    cov_low: float = 1.0
    cov_high: float = 5.0
    loss_type: LossType = "dapo"
    entropy_coeff: float = 0.0

    def __post_init__(self) -> None:
        is_band = self.cov_low < self.cov_high
        self.check(*self.bound_checks, ("cov_high", is_band, f"must be above cov_low {self.cov_low!r}"))

    def picked(self, terms: Terms, noise: Tensor) -> Tensor:
        low, high = self.bounds
        return clip_cov_tokens(
            terms.log_ratios,
            terms.logps,
            terms.advantages,
            terms.mask,
            noise,
            epsilon=low,
            epsilon_high=high,
            cov_ratio=self.cov_ratio,
            cov_low=self.cov_low,
            cov_high=self.cov_high,
        )

    def per_token(self, terms: Terms) -> Tensor:
        assert terms.picked is not None
        low, high = self.bounds
        loss = clipped_surrogate(terms.log_ratios, terms.advantages, epsilon=low, epsilon_high=high)
        return torch.where(terms.picked, torch.zeros_like(loss), loss)

    def is_clipped(self, log_ratios: Tensor, advantages: Tensor) -> Tensor:
        return is_clipped(log_ratios, advantages, *self.bounds)


@dataclass(frozen=True)
class KLCov(TokenPicking):
    """KL-Cov: the unclipped ratio, with a penalty on the tokens of largest covariance.

    Args:
        kl_coef: weight of the penalty |log ratio|.

    Raises:
        ConfigError: a value is out of range.
    """

    cov_ratio: float = 2e-4
    kl_coef: float = 1.0
    loss_type: LossType = "dapo"
    entropy_coeff: float = 0.0

    def __post_init__(self) -> None:
        self.check(("kl_coef", self.kl_coef >= 0, "must be >= 0"))

    def picked(self, terms: Terms, noise: Tensor) -> Tensor:
        return kl_cov_tokens(terms.logps, terms.advantages, terms.mask, cov_ratio=self.cov_ratio)

    def per_token(self, terms: Terms) -> Tensor:
        assert terms.picked is not None
        return penalised_surrogate(terms.log_ratios, terms.advantages, terms.picked, kl_coef=self.kl_coef)

    @property
    def needs_every_row(self) -> bool:
        """A picked token pays without credit too."""
        return True
