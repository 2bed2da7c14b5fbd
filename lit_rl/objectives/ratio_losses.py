"""Policy losses that put something else in the place of the clip: a weight, a gate, or a mean of the row."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from lit_rl.errors import ConfigError
from lit_rl.functional.importance import geometric_weights
from lit_rl.functional.policy_loss import cispo, geo_mean, per_token, sapo
from lit_rl.objectives.policy import Clipping, LossType, PolicyLoss, Terms


@dataclass(frozen=True)
class CISPO(Clipping, PolicyLoss):
    """The clipped ratio is a weight without gradient, so that every token keeps one.

    Source: MiniMax-M1, arXiv 2506.13585, eq. 4. Peers disagree on the numbers: verl's bounds are 1 - epsilon
    and 1 + epsilon_high (here), TRL's is a cap of the ratio itself (`ratio_cap`).

    Args:
        ratio_cap: instead of the two bounds: cap of the ratio itself, no lower bound, e.g. 5; null is off.

    Raises:
        ConfigError: a value is out of range, or ratio_cap stands beside bounds that it replaces.
    """

    epsilon: float = 0.2
    epsilon_high: float | None = None
    ratio_cap: float | None = None
    loss_type: LossType = "dapo"
    entropy_coeff: float = 0.0

    def __post_init__(self) -> None:
        is_legal = self.ratio_cap is None or self.ratio_cap >= 1
        self.check(*self.bound_checks, ("ratio_cap", is_legal, "must be null or >= 1"))
        if self.ratio_cap is not None and (self.epsilon, self.epsilon_high) != (0.2, None):
            raise ConfigError(
                f"{self.key}.ratio_cap (found {self.ratio_cap!r}) replaces {self.key}.epsilon (found "
                f"{self.epsilon!r}) and {self.key}.epsilon_high (found {self.epsilon_high!r}); set one "
                f"or the others."
            )

    @property
    def ratio_bounds(self) -> tuple[float, float]:
        """(least, greatest) ratio that weighs."""
        if self.ratio_cap is not None:
            return 0.0, self.ratio_cap
        low, high = self.bounds
        return 1 - low, 1 + high

    def per_token(self, terms: Terms) -> Tensor:
        low, high = self.ratio_bounds
        return cispo(terms.log_ratios, terms.logps, terms.advantages, low=low, high=high)

    def is_clipped(self, log_ratios: Tensor, advantages: Tensor) -> Tensor:
        low, high = self.ratio_bounds
        ratio = log_ratios.detach().exp()
        return (ratio < low) | (ratio > high)


@dataclass(frozen=True)
class SAPO(PolicyLoss):
    """A soft gate in the place of the clip: the further the ratio is from 1, the less gradient.

    Source: Soft Adaptive Policy Optimization, arXiv 2511.20347, eq. 5; peers average by row.

    Args:
        tau_pos: sharpness of the gate at positive advantages.
        tau_neg: at the others; greater is safer.

    Raises:
        ConfigError: a value is out of range.
    """

    tau_pos: float = 1.0
    tau_neg: float = 1.05
    loss_type: LossType = "grpo"
    entropy_coeff: float = 0.0

    def __post_init__(self) -> None:
        self.check(("tau_pos", self.tau_pos > 0, "must be > 0"), ("tau_neg", self.tau_neg > 0, "must be > 0"))

    def per_token(self, terms: Terms) -> Tensor:
        return sapo(terms.log_ratios, terms.advantages, tau_pos=self.tau_pos, tau_neg=self.tau_neg)


@dataclass(frozen=True)
class GeoMean(Clipping, PolicyLoss):
    """GMPO: the geometric mean of a row's token ratios, each clipped in log space.

    Source: Geometric-Mean Policy Optimization, arXiv 2507.20673, which uses
    0.4 for both bounds.

    Args:
        epsilon: a token's log-ratio is clipped below at -epsilon,
        epsilon_high: and above at epsilon_high; null is epsilon.
        loss_type: "grpo", a mean over rows.

    Raises:
        ConfigError: a value is out of range.
    """

    epsilon: float = 0.2
    epsilon_high: float | None = None
    loss_type: Literal["grpo"] = "grpo"
    entropy_coeff: float = 0.0

    def __post_init__(self) -> None:
        self.check(*self.bound_checks, ("loss_type", self.loss_type == "grpo", "must be grpo"))

    def per_token(self, terms: Terms) -> Tensor:
        low, high = self.bounds
        return geo_mean(terms.log_ratios, terms.advantages, terms.mask, epsilon=low, epsilon_high=high)

    def weighted(self, per_token: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
        """(B, 1): a row is weighed by the geometric mean of its tokens' weights."""
        return per_token * geometric_weights(weights, mask)

    def is_clipped(self, log_ratios: Tensor, advantages: Tensor) -> Tensor:
        low, high = self.bounds
        sign = per_token(advantages).sign()
        return ((sign > 0) & (log_ratios > high)) | ((sign < 0) & (log_ratios < -low))
