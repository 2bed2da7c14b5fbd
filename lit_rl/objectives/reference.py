"""Ref: whose weights the KL penalty is towards, and where they rest."""

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from lit_rl.errors import ConfigError
from lit_rl.models.roles import AdapterOff, Offloaded, Role, reference_of


@dataclass(frozen=True)
class Ref:
    """The reference (source: verl `actor_rollout_ref.ref`). It has the policy's dtype.

    Args:
        path: other weights with the policy's vocabulary, as in `model.path`; null is the initial policy.
        param_offload: weights rest in CPU memory and come to the device only to score.
        trust_remote_code: run code that comes with those weights.
    """

    key: ClassVar[str] = "algo.ref"

    path: str | None = None
    param_offload: bool = False
    trust_remote_code: bool = False

    def role(self, policy: nn.Module, *, moves: bool) -> Role:
        """The reference of this policy, as it stands before training.

        Args:
            policy: the initial policy.
            moves: a callback will mix it with the policy.

        Raises:
            ConfigError: the other weights do not fit, or there are no weights to offload.
        """
        role = reference_of(policy, self.path, moves=moves, trust_remote_code=self.trust_remote_code)
        if not self.param_offload:
            return role
        if isinstance(role, AdapterOff):
            raise ConfigError(
                f"{self.key}.param_offload (found True) has no effect with fresh LoRA adapters: the "
                "reference is the base model itself; leave it false."
            )
        return Offloaded(role)
