"""KL: the penalty that keeps the policy near its reference, in the loss."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from lit_rl.errors import ConfigError
from lit_rl.functional import kl as estimators

ESTIMATORS = {
    "abs": estimators.k_abs,
    "mse": estimators.k2,
    "low_var_kl": estimators.k3,
}


@dataclass(frozen=True)
class KL:
    """KL to the reference as a term of the loss (source: TRL `beta`; verl `kl_loss_type`).

    Args:
        beta: weight; 0 loads no reference.
        kl_loss_type: "low_var_kl" is k3 (Schulman 2020, "Approximating KL divergence"), "mse" k2, "abs" |k1|.

    Raises:
        ConfigError: beta is negative, or the estimator is "kl", whose expected gradient in a loss is zero.
    """

    key: ClassVar[str] = "algo.kl"

    beta: float = 0.0
    kl_loss_type: Literal["kl", "abs", "mse", "low_var_kl"] = "low_var_kl"

    def __post_init__(self) -> None:
        if self.beta < 0:
            raise ConfigError(f"{self.key}.beta must be >= 0 (found {self.beta!r}).")
        if self.kl_loss_type == "kl":
            raise ConfigError(
                f"{self.key}.kl_loss_type must be low_var_kl, mse or abs (found 'kl'): inside the loss the "
                f"expected gradient of 'kl' is zero, so it would penalise nothing."
            )

    def per_token(self, logps: Tensor, ref_logps: Tensor) -> Tensor:
        """(B, T): the estimate at each token.

        Args:
            logps: (B, T), with gradient.
            ref_logps: (B, T).
        """
        return ESTIMATORS[self.kl_loss_type](logps, ref_logps)
