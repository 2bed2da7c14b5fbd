"""Advantage: how the rewards of a step become credit for its rows."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from lit_rl.distributed import gather_objects, is_distributed, rank
from lit_rl.errors import ConfigError
from lit_rl.functional.advantages import group_advantages


@dataclass(frozen=True)
class Advantage:
    """Estimator of the advantages (source: TRL GRPOConfig; verl `algorithm.adv_estimator`).

    Args:
        adv_estimator: "grpo" centres the rewards in their group; "none" computes nothing, for a loss without
            a policy term.
        scale_rewards: what the centred reward is divided by: the standard deviation of its "group", of the
            whole "batch", or "none".
        std_epsilon: added to that deviation.

    Raises:
        ConfigError: std_epsilon is negative.
    """

    key: ClassVar[str] = "algo.advantage"

    adv_estimator: Literal["grpo", "none"] = "grpo"
    scale_rewards: Literal["group", "batch", "none"] = "group"
    std_epsilon: float = 1e-6

    def __post_init__(self) -> None:
        if self.std_epsilon < 0:
            raise ConfigError(f"{self.key}.std_epsilon must be >= 0 (found {self.std_epsilon!r}).")

    def __call__(self, rewards: Tensor, num_generations: int) -> Tensor:
        """Advantages of this rank's rows. Collective when the whole batch is the scale.

        Args:
            rewards: (B,) float, the rows of a prompt adjacent; NaN where no function applied.
            num_generations: G.

        Returns:
            (B,) float; 0 for rows without a reward and in groups of equal rewards.
        """
        if self.adv_estimator == "none":
            return torch.zeros_like(rewards)
        if self.scale_rewards == "batch" and is_distributed():
            parts = gather_objects(rewards.cpu())
            everything = self._group_relative(torch.cat(parts), num_generations)
            return everything.split([len(part) for part in parts])[rank()].to(rewards.device)
        return self._group_relative(rewards, num_generations)

    def _group_relative(self, rewards: Tensor, num_generations: int) -> Tensor:
        groups = rewards.view(-1, num_generations)
        return group_advantages(groups, scale=self.scale_rewards, std_epsilon=self.std_epsilon).flatten()
