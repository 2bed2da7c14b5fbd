"""KL: the penalty that keeps the policy near its reference, in the loss or in the reward.

Which divergence each option makes smaller stands in lit_rl/functional/README.md; tests/objectives/test_kl.py
holds the code to it.
"""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from lit_rl.distributed import all_sum_
from lit_rl.errors import ConfigError
from lit_rl.functional.kl import ESTIMATORS, LOW_VAR_KL_BOUND, adapted_coef
from lit_rl.functional.masking import clamped_frac, masked_mean


@dataclass(frozen=True)
class KLControl:
    """Weight of a KL in the reward (source: verl `algorithm.kl_ctrl`; Ziegler et al. 2019, arXiv 1909.08593).

    Args:
        type: "fixed" keeps the weight; "adaptive" moves it by up to 0.2 * rows / horizon per step, toward
            more while the KL is above target_kl.
        kl_coef: the weight, or its first value.
        horizon: adaptive: pace, in rows.
        target_kl: adaptive: aim, KL per token.

    Raises:
        ConfigError: a value is out of range.
    """

    key: ClassVar[str] = "algo.kl.kl_ctrl"

    type: Literal["fixed", "adaptive"] = "fixed"
    kl_coef: float = 0.005
    horizon: int = 10000
    target_kl: float = 0.1

    def __post_init__(self) -> None:
        checks = [
            ("kl_coef", self.kl_coef >= 0, "must be >= 0"),
            ("horizon", self.horizon >= 1, "must be >= 1"),
            ("target_kl", self.target_kl > 0, "must be > 0"),
        ]
        for name, is_legal, rule in checks:
            if not is_legal:
                raise ConfigError(f"{self.key}.{name} {rule} (found {getattr(self, name)!r}).")


class KLCoefficient:
    """The weight of a KL in the reward as it moves; part of every checkpoint where it does.

    Args:
        control: its settings.
    """

    def __init__(self, control: KLControl) -> None:
        self.control = control
        self.value = control.kl_coef

    @property
    def is_moving(self) -> bool:
        """Whether a checkpoint must hold it."""
        return self.control.type == "adaptive"

    def follow(self, kl: Tensor, mask: Tensor) -> None:
        """After a step: move toward the target, by the mean over rows of the KL per token. Collective.

        Args:
            kl: (B, T) of this rank's rows.
            mask: (B, T) bool.
        """
        if not self.is_moving:
            return
        per_row = masked_mean(kl, mask, dim=-1).double()  # (B,)
        total, rows = all_sum_(torch.stack([per_row.sum(), per_row.new_tensor(float(len(per_row)))])).tolist()
        control = self.control
        self.value = adapted_coef(
            self.value,
            total / max(rows, 1.0),
            target_kl=control.target_kl,
            horizon=control.horizon,
            rows=int(rows),
        )

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = state["value"]


@dataclass(frozen=True)
class KL:
    """KL to the reference, as a term of the loss or of the reward (source: TRL `beta`; verl `kl_loss_type`).

    Args:
        beta: weight in the loss; 0 is off.
        kl_loss_type: estimator in the loss: "low_var_kl" (k3), "mse" (k2), "abs", or one of these or "kl"
            with + for the gradient of KL(policy, ref); "full", the KL over the whole vocabulary, which takes
            a pass of the reference beside each micro-batch; "kl" alone is refused.
        use_kl_in_reward: subtract kl_ctrl.kl_coef times the KL from the reward instead: from each token's
            where the estimator is one over tokens (reinforce_plus_plus, reward), else the row's sum from the
            row's reward, before the advantage.
        kl_penalty: estimator in the reward; "full" charges a token nothing for its own choice, only for what
            it leads to.
        kl_ctrl: weight in the reward.

    Raises:
        ConfigError: beta is negative, or the estimator in the loss is "kl", whose expected gradient there is
            zero.
    """

    key: ClassVar[str] = "algo.kl"

    beta: float = 0.0
    kl_loss_type: Literal["kl", "abs", "mse", "low_var_kl", "full", "kl+", "abs+", "mse+", "low_var_kl+"] = (
        "low_var_kl"
    )
    use_kl_in_reward: bool = False
    kl_penalty: Literal["kl", "abs", "mse", "low_var_kl", "full"] = "kl"
    kl_ctrl: KLControl = field(default_factory=KLControl)

    def __post_init__(self) -> None:
        if self.beta < 0:
            raise ConfigError(f"{self.key}.beta must be >= 0 (found {self.beta!r}).")
        if self.kl_loss_type == "kl":
            raise ConfigError(
                f"{self.key}.kl_loss_type must not be 'kl': inside the loss the expected gradient of 'kl' is "
                f"zero, so it would penalise nothing; 'kl+' has its value and the gradient of the KL."
            )

    @property
    def needs_reference(self) -> bool:
        """Whether the reference has to score the completions."""
        return self.beta > 0 or self.use_kl_in_reward

    @property
    def is_exact_in_loss(self) -> bool:
        """Whether the loss needs both distributions at each token."""
        return self.beta > 0 and self.kl_loss_type == "full"

    @property
    def is_exact_in_reward(self) -> bool:
        """Whether the reward needs both distributions at each token."""
        return self.use_kl_in_reward and self.kl_penalty == "full"

    def per_token(self, logps: Tensor, ref_logps: Tensor) -> Tensor:
        """(B, T): the estimate at each token, for the loss; not for "full".

        Args:
            logps: (B, T), with gradient.
            ref_logps: (B, T).
        """
        return ESTIMATORS[self.kl_loss_type](logps, ref_logps)

    def in_reward(self, old_logps: Tensor, ref_logps: Tensor) -> Tensor:
        """(B, T): the estimate at each token, for the reward, without gradient; not for "full".

        Args:
            old_logps: (B, T) of the policy that sampled.
            ref_logps: (B, T).
        """
        return ESTIMATORS[self.kl_penalty](old_logps, ref_logps).detach()

    def clamped_frac(self, kl: Tensor, mask: Tensor) -> Tensor:
        """Share of the counted tokens whose estimate the bound of low_var_kl holds; the others have none.

        Args:
            kl: (B, T) as `per_token` gives it.
            mask: (B, T) bool.
        """
        if not self.kl_loss_type.startswith("low_var_kl"):
            return kl.new_zeros(())
        return clamped_frac(kl, mask, bound=LOW_VAR_KL_BOUND)
