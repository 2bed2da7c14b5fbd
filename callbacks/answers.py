"""Completions beyond those of the step, for callbacks that measure or search."""

import lightning as L

from lit_rl.algorithms.base import RLModule
from lit_rl.batch import RolloutBatch
from lit_rl.callbacks.rollout import RolloutGeneration
from lit_rl.errors import ConfigError


def answered(
    trainer: L.Trainer, module: RLModule, prompts: RolloutBatch, num_generations: int, purpose: str
) -> RolloutBatch:
    """Completions by the current policy, drawn as in training, with rewards and feedback.

    Args:
        trainer: its callbacks generate.
        module: holds policy and reward.
        prompts: P rows.
        num_generations: G.
        purpose: keeps the noise apart from that of training and of other purposes.

    Raises:
        ConfigError: no callback generates.
    """
    assert module.reward is not None
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, RolloutGeneration):
            rollout = callback.generate(module, prompts, module.sampling, num_generations, purpose=purpose)
            scores = module.reward(module.samples(rollout))
            rollout.rewards, rollout.feedback = scores.rewards.to(module.device), scores.feedback
            return rollout
    raise ConfigError(
        "No callback generates completions: add RolloutGeneration (callbacks.rollout=${rollout})."
    )
