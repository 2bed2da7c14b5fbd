"""Critic: the model that estimates what is still to be earned, and how it is trained."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lit_rl.errors import ConfigError
from lit_rl.functional.policy_loss import is_value_clipped, value_loss


@dataclass(frozen=True)
class Critic:
    """A value model with an optimizer and a schedule of its own (source: verl `critic`).

    Optimizer batches and passes over the rows of a step are the policy's, and the value loss is averaged over
    tokens and rows as the policy loss is (`algo.policy_loss.loss_type`).

    Args:
        model: with a value head; a second `model`, each key the policy's unless set.
        optim: a second `optim`, likewise; in Python, null is AdamW at 5e-5.
        schedule: a second `schedule`, likewise; in Python, null is `WarmupDecay`.
        critic_warmup: first steps that train only the critic. The schedules of both count them.
        micro_batch_size: the critic's rows per forward and backward on one device; null is one joint backward
            with the policy.
        max_grad_norm: cap of the norm of the critic's gradient per optimizer step; 0 is off.
        cliprange_value: how far a value may move from what it was before the step's first update, where the
            plain error would be smaller (PPO's reference implementation; arXiv 2006.05990); null is off.
        value_loss_coef: weight of the value loss, whose factor 1/2 is not included in it.

    Raises:
        ConfigError: a value is out of range.
    """

    key: ClassVar[str] = "algo.critic"

    model: nn.Module
    optim: OptimizerCallable | None = None
    schedule: Callable[[Optimizer, int], LRScheduler] | None = None
    critic_warmup: int = 0
    micro_batch_size: int | None = None
    max_grad_norm: float = 1.0
    cliprange_value: float | None = 0.5
    value_loss_coef: float = 1.0

    def __post_init__(self) -> None:
        size, cliprange = self.micro_batch_size, self.cliprange_value
        checks = [
            ("critic_warmup", self.critic_warmup >= 0, "must be >= 0"),
            ("micro_batch_size", size is None or size >= 1, "must be null or >= 1"),
            ("max_grad_norm", self.max_grad_norm >= 0, "must be >= 0"),
            ("cliprange_value", cliprange is None or cliprange > 0, "must be null or > 0"),
            ("value_loss_coef", self.value_loss_coef > 0, "must be > 0"),
        ]
        for name, is_legal, rule in checks:
            if not is_legal:
                raise ConfigError(f"{self.key}.{name} {rule} (found {getattr(self, name)!r}).")

    def per_token(self, values: Tensor, old_values: Tensor, returns: Tensor) -> Tensor:
        """(B, T): the squared error of each value, halved.

        Args:
            values: (B, T) now, with gradient.
            old_values: (B, T) before the step's first update.
            returns: (B, T) what they should have been.
        """
        return value_loss(values, old_values, returns, cliprange_value=self.cliprange_value)

    def is_clipped(self, values: Tensor, old_values: Tensor, returns: Tensor) -> Tensor:
        """(B, T) bool: the bound decides the error. Arguments as above."""
        if self.cliprange_value is None:
            return torch.zeros_like(values, dtype=torch.bool)
        return is_value_clipped(values, old_values, returns, cliprange_value=self.cliprange_value)
