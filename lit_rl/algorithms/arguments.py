"""What a module makes of arguments that plain Python may give in a shorter form, and of a plain Trainer."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lit_rl.errors import ConfigError
from lit_rl.models.parameters import decay_groups
from lit_rl.rewards.base import RewardSum
from lit_rl.schedule import WarmupDecay

OptimizerLike = OptimizerCallable | Optimizer | None
SchedulerLike = Callable[[Optimizer, int], LRScheduler] | LRScheduler | None
RewardLike = RewardSum | Callable[..., Any] | Sequence[Callable[..., Any]] | None
DEFAULT_OPTIMIZER = partial(torch.optim.AdamW, lr=5e-5, weight_decay=0.0)


def reward_sum(reward: RewardLike) -> RewardSum | None:
    """The sum of one or several reward functions, each with weight 1, under their own names.

    Args:
        reward: a `RewardSum`, a function or `Reward`, or a list of those; None stays None.
    """
    if reward is None or isinstance(reward, RewardSum):
        return reward
    return RewardSum.of(list(reward) if isinstance(reward, Sequence) else [reward])


def optimizer_of(given: Any, policy: nn.Module) -> Optimizer:
    """The optimizer itself where one was given, else what the callable makes of decayed and undecayed groups.

    Args:
        given: an optimizer, a callable from parameter groups to one, or None for AdamW at 5e-5.
        policy: whose parameters are trained.
    """
    return given if isinstance(given, Optimizer) else (given or DEFAULT_OPTIMIZER)(decay_groups(policy))


def schedule_of(given: Any, optimizer: Optimizer, total_steps: int) -> LRScheduler:
    """The schedule itself where one was given, else what the callable makes; None is `WarmupDecay`.

    Args:
        given: a schedule, a callable from (optimizer, total_steps) to one, or None.
        optimizer: whose rate it sets.
        total_steps: iterations of the run.
    """
    if isinstance(given, LRScheduler):
        return given
    return (given or WarmupDecay)(optimizer, total_steps)


def check_trainer(trainer: L.Trainer) -> None:
    """Refuse a Trainer that would run something else than the run.

    Raises:
        ConfigError: no datamodule, more than one epoch, or a sampler that Lightning would replace.
    """
    if getattr(trainer, "datamodule", None) is None:
        raise ConfigError(
            "trainer.fit(module, datamodule=...) needs a datamodule, such as PromptDataModule (found "
            "dataloaders or nothing): tokenizer, template and number of steps come from it."
        )
    if trainer.max_epochs not in (1, -1) and trainer.state.fn == "fit":
        raise ConfigError(
            f"Trainer(max_epochs=...) must be 1 (found {trainer.max_epochs}): the whole run is one Lightning "
            "epoch; its length is max_steps, or data.total_epochs."
        )
    if trainer.world_size > 1 and trainer._accelerator_connector.use_distributed_sampler:
        raise ConfigError(
            "Trainer(use_distributed_sampler=...) must be False (found True): the datamodule shares the rows "
            "out by itself."
        )
