"""Rewards of a rollout, and which of its rows must not count in a loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lit_rl.algorithms.reporting import add_source_metrics
from lit_rl.batch import RolloutBatch

if TYPE_CHECKING:
    from lit_rl.algorithms.base import RLModule


def fill_rewards_(module: RLModule, rollout: RolloutBatch) -> None:
    """Fill in rewards and feedback, and count what each function gave.

    Args:
        module: has a reward.
        rollout: rows with completions.
    """
    assert module.reward is not None
    scores = module.reward(module.samples(rollout))
    rollout.rewards = scores.rewards.to(module.device)
    rollout.rewards_per_func = scores.rewards_per_func.to(module.device)
    rollout.feedback = _with_environment_s(rollout, scores.feedback)
    own = module.trainer.datamodule.data_source_key  # type: ignore[attr-defined]
    add_source_metrics(module.sums, rollout.rewards, rollout.columns.get(own, []))
    for name, (total, count) in scores.sums.items():
        module.sums.add(f"reward/{name}", total, count)


def _with_environment_s(rollout: RolloutBatch, feedback: list[str | None]) -> list[str | None]:
    """The reward's feedback on each row, behind that of the row's environment."""
    if rollout.conversations is None:
        return feedback
    both = zip(rollout.conversations, feedback, strict=True)
    return ["\n".join(filter(None, (talk.feedback, own))) or None for talk, own in both]


def take_out_(rollout: RolloutBatch, *, truncated: bool) -> None:
    """Take rows without a reward out of the loss mask.

    Args:
        rollout: rows with completions.
        truncated: rows that were cut at the length limit too.
    """
    assert rollout.completion_mask is not None
    if rollout.rewards is not None:
        rollout.completion_mask = rollout.completion_mask & ~rollout.rewards.isnan()[:, None]
    if truncated:
        assert rollout.finish_reason is not None
        is_cut = torch.tensor([reason == "length" for reason in rollout.finish_reason])
        rollout.completion_mask = (
            rollout.completion_mask & ~is_cut.to(rollout.completion_mask.device)[:, None]
        )
