"""RolloutCorrection: weights and rejections for tokens that the engine sampled with other probabilities."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from lit_rl.errors import ConfigError
from lit_rl.functional.importance import Correction, rollout_correction


@dataclass(frozen=True)
class RolloutCorrection:
    """Importance weights of training over engine probability (source: verl `algorithm.rollout_is`).

    An engine computes in another precision and with other kernels than the trainer, so that it samples from a
    slightly different policy. The ratio is taken once per step, under the weights that generated; needs
    `rollout.calculate_log_probs`.

    Args:
        rollout_is: weigh every loss per token of the policy and of the distillation.
        rollout_is_level: a ratio per "token"; per "sequence", the product over the row; or "geometric", the
            row's geometric mean.
        rollout_is_mode: outside the bounds: "truncate" caps the weight; "mask" takes the token, or row, out
            of the loss and its divisor; "none" leaves the weight, for the veto alone.
        rollout_is_threshold: upper bound of the ratio, above 1; null is none.
        rollout_is_threshold_lower: lower bound, below 1, mode mask; null is 1 / upper.
        rollout_is_veto_threshold: a row that holds a token ratio below it leaves the loss; null is off.

    Raises:
        ConfigError: a value is out of range, or belongs to another mode.
    """

    key: ClassVar[str] = "algo.rollout_correction"

    rollout_is: bool = False
    rollout_is_level: Literal["token", "sequence", "geometric"] = "token"
    rollout_is_mode: Literal["truncate", "mask", "none"] = "truncate"
    rollout_is_threshold: float | None = None
    rollout_is_threshold_lower: float | None = None
    rollout_is_veto_threshold: float | None = None

    def __post_init__(self) -> None:
        upper, lower = self.rollout_is_threshold, self.rollout_is_threshold_lower
        veto, mode = self.rollout_is_veto_threshold, self.rollout_is_mode
        checks = [
            ("rollout_is_threshold", upper is None or upper > 1, "must be null or > 1"),
            ("rollout_is_threshold_lower", lower is None or 0 < lower < 1, "must be null or in (0, 1)"),
            ("rollout_is_veto_threshold", veto is None or 0 < veto < 1, "must be null or in (0, 1)"),
            ("rollout_is_threshold_lower", lower is None or mode == "mask", _needs("mask", mode)),
            ("rollout_is_threshold", upper is None or mode != "none", _needs("truncate or mask", mode)),
        ]
        for name, is_legal, rule in checks:
            if not is_legal:
                raise ConfigError(f"{self.key}.{name} {rule} (found {getattr(self, name)!r}).")
        if self.rollout_is and mode == "none" and veto is None:
            raise ConfigError(
                f"{self.key}.rollout_is_veto_threshold must be set when {self.key}.rollout_is_mode is 'none' "
                f"(found None): the mode leaves every weight, so that nothing else would be corrected."
            )

    @property
    def is_unbounded(self) -> bool:
        """Whether weights are on and nothing bounds them."""
        return self.rollout_is and self.rollout_is_threshold is None and self.rollout_is_mode != "none"

    @property
    def rejects(self) -> bool:
        """Whether tokens or rows may leave the loss, which divisors must know before the first pass."""
        return self.rollout_is and (
            self.rollout_is_mode == "mask" or self.rollout_is_veto_threshold is not None
        )

    def __call__(self, old_logps: Tensor, rollout_logps: Tensor, mask: Tensor) -> Correction:
        """Weights of this rank's tokens, and which still count.

        Args:
            old_logps: (B, T) by the training model, with the weights that generated.
            rollout_logps: (B, T) as the engine reported.
            mask: (B, T) bool, the loss mask.
        """
        return rollout_correction(
            old_logps,
            rollout_logps,
            mask,
            level=self.rollout_is_level,
            mode=self.rollout_is_mode,
            upper=self.rollout_is_threshold,
            lower=self.rollout_is_threshold_lower,
            veto=self.rollout_is_veto_threshold,
        )


def _needs(mode: str, found: str) -> str:
    return f"must be null unless {RolloutCorrection.key}.rollout_is_mode is {mode}, which is {found!r}"
