"""Teacher: which weights score the completions for the student to follow."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import nn

from lit_rl.errors import ConfigError
from lit_rl.models.roles import AveragedCopy, Live, Role, reference_of


@dataclass(frozen=True)
class Teacher:
    """The teacher's weights (source: TRL SDPOConfig).

    Args:
        teacher_model_kind: "ema" averages the policy, "live" is the policy itself, "base" the initial policy.
        teacher_update_rate: ema: teacher = (1 - rate) * teacher + rate * policy, in float32.
        teacher_sync_steps: ema: steps between two updates.

    Raises:
        ConfigError: a value is out of range.
    """

    key: ClassVar[str] = "algo.teacher"

    teacher_model_kind: Literal["ema", "live", "base"] = "ema"
    teacher_update_rate: float = 0.05
    teacher_sync_steps: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.teacher_update_rate <= 1:
            raise ConfigError(
                f"{self.key}.teacher_update_rate must be in [0, 1] (found {self.teacher_update_rate!r})."
            )
        if self.teacher_sync_steps < 1:
            raise ConfigError(
                f"{self.key}.teacher_sync_steps must be >= 1 (found {self.teacher_sync_steps!r})."
            )

    def role(self, policy: nn.Module) -> Role:
        """The teacher of this policy, as it stands before training."""
        roles = {"ema": AveragedCopy, "live": Live, "base": reference_of}
        return roles[self.teacher_model_kind](policy)  # type: ignore[operator]

    def follow(self, role: Role, step: int) -> None:
        """Move an averaged teacher toward the policy.

        Args:
            role: what `role` made.
            step: iterations done, this one included.
        """
        if isinstance(role, AveragedCopy) and step % self.teacher_sync_steps == 0:
            role.move_(self.teacher_update_rate)

    @property
    def is_fixed_in_step(self) -> bool:
        """Whether its log-probabilities stay the same while a step updates the policy."""
        return self.teacher_model_kind != "live"
