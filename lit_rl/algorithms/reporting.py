"""What a step reports about its rollout: one function per family of metrics, all as exact sums.

| metric | formula |
| --- | --- |
| `rollout/completion_len` | tokens / rows |
| `rollout/truncated_frac` | rows that ended at the length limit / rows |
| `rollout/tokens` | completion tokens of the step, all ranks |
| `rollout/loss_tokens` | tokens that count in the loss |
| `rollout/turns` | turns of the policy / rows; with an environment |
| `rollout/foreign_tokens` | tokens that the environment wrote, counted in the lengths too; likewise |
| `rollout/empty_frac` | rows without a token that counts / rows |
| `rollout/reward`, `reward/<function>` | mean over rows that have one |
| `rollout/reward/<source>` | mean over rows of a data source that have one |
| `rollout/reward_min`, `rollout/reward_max` | over the rows of the step that have one |
| `rollout/reward_std` | mean over groups of the standard deviation in the group |
| `rollout/zero_variance_frac` | groups of equal rewards / groups |
| `rollout/all_right_frac`, `rollout/all_wrong_frac` | groups of right, or of wrong, rows only / groups |
| `train/value_mean`, `train/return_mean` | mean over tokens of the critic's values, of their targets |
| `train/explained_variance` | 1 - variance of (return - value) / variance of returns; 0 if these are equal |
| `rollout_is/kl` | mean over tokens of k3 of KL(engine, trainer), the policy that generated |
| `rollout_is/touched_frac` | tokens whose weight is bounded or that are rejected / tokens |
| `rollout_is/effective_sample_frac` | (sum of weights)^2 / sum of squares / tokens; tokens that still count |
| `rollout_is/max_ratio` | greatest ratio, before bounds |

`rollout_is/...` is over the rows that the update computes; over all rows where some may be rejected. A row is
right when its weighted reward reaches 1 (to 1e-6).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lit_rl.batch import RolloutBatch
from lit_rl.distributed import all_sum_, world_size
from lit_rl.functional.importance import Correction
from lit_rl.functional.kl import k3
from lit_rl.functional.masking import masked_sum
from lit_rl.metrics import MetricSums
from lit_rl.rewards.base import RIGHT
from lit_rl.timing import Clock

FLAT = 1e-8
PHASES = ("generate", "score", "teacher", "update")


def add_phase_metrics(sums: MetricSums, clock: Clock) -> None:
    """Seconds and memory of the step by phase; a new lap begins."""
    lap = clock.lap()
    for phase in PHASES:
        sums.add_max(f"time/{phase}", lap.get(phase, 0.0))
        if phase in lap:
            sums.add_max(f"memory/{phase}", clock.memory[phase])


def add_rollout_metrics(sums: MetricSums, rollout: RolloutBatch) -> None:
    """Lengths and ends of the completions."""
    assert rollout.completion_len is not None and rollout.completion_mask is not None
    rows, tokens = len(rollout), rollout.completion_len.sum()
    sums.add("rollout/completion_len", tokens, rows)
    sums.add_max("rollout/completion_len_max", rollout.completion_len.max() if rows else 0.0)
    sums.add("rollout/tokens", tokens, 1.0 / world_size())
    sums.add("rollout/loss_tokens", rollout.completion_mask.sum(), 1.0 / world_size())
    if rollout.conversations is not None and rollout.foreign_mask is not None:
        sums.add("rollout/turns", sum(talk.turns for talk in rollout.conversations), rows)
        sums.add("rollout/foreign_tokens", rollout.foreign_mask.sum(), 1.0 / world_size())
    sums.add("rollout/empty_frac", (~rollout.completion_mask.any(1)).sum(), rows)
    cut = sum(reason == "length" for reason in rollout.finish_reason or [])
    sums.add("rollout/truncated_frac", cut, rows)


def add_reward_metrics(sums: MetricSums, rollout: RolloutBatch) -> None:
    """Means, spread and saturation of the rewards."""
    if rollout.rewards is None:
        return
    has_reward = ~rollout.rewards.isnan()
    sums.add("rollout/reward", rollout.rewards.nan_to_num().sum(), has_reward.sum())
    sums.add_min("rollout/reward_min", rollout.rewards.nan_to_num(torch.inf).amin())
    sums.add_max("rollout/reward_max", rollout.rewards.nan_to_num(-torch.inf).amax())
    groups = rollout.rewards.view(-1, rollout.num_generations)
    low, high = _extremes(groups)
    count = len(groups)
    if rollout.num_generations > 1:  # a group of one has no spread, and nobody looks for it
        sums.add("rollout/reward_std", group_std(groups).sum(), count)
        sums.add("rollout/zero_variance_frac", is_flat(groups).sum(), count)
    sums.add("rollout/all_right_frac", (low >= RIGHT).sum(), count)
    sums.add("rollout/all_wrong_frac", (high < RIGHT).sum(), count)


def add_source_metrics(sums: MetricSums, rewards: Tensor, sources: Sequence[str | None]) -> None:
    """Mean reward by data source; rows without a source are in no such metric.

    Args:
        sums: where they go.
        rewards: (B,) float, NaN where there is none.
        sources: B of them.
    """
    for name in dict.fromkeys(source for source in sources if source is not None):
        own = rewards[[i for i, source in enumerate(sources) if source == name]]
        sums.add(f"rollout/reward/{name}", own.nansum(), (~own.isnan()).sum())


def is_flat(groups: Tensor) -> Tensor:
    """(P,) bool: the rewards of the group are equal (to 1e-8), or there are none.

    Args:
        groups: (P, G) float, NaN where there is no reward.
    """
    low, high = _extremes(groups)
    return high - low <= FLAT


def _extremes(groups: Tensor) -> tuple[Tensor, Tensor]:
    return groups.nan_to_num(torch.inf).amin(1), groups.nan_to_num(-torch.inf).amax(1)


def group_std(groups: Tensor) -> Tensor:
    """(P,) unbiased standard deviation of each row's numbers, 0 for fewer than two.

    Args:
        groups: (P, G) float, NaN where there is no reward.
    """
    count = (~groups.isnan()).sum(1)
    mean = groups.nanmean(1, keepdim=True)
    squares = (groups - mean).square().nansum(1)
    return (squares / (count - 1).clamp(min=1)).sqrt()


def add_value_metrics(sums: MetricSums, values: Tensor, returns: Tensor, mask: Tensor) -> None:
    """How well the critic foresaw the returns, before the step's first update. Collective.

    Args:
        sums: where they go.
        values: (B, T) of this rank's rows.
        returns: (B, T).
        mask: (B, T) bool.
    """
    sums.add("train/value_mean", masked_sum(values, mask), mask.sum())
    sums.add("train/return_mean", masked_sum(returns, mask), mask.sum())
    kept = [part[mask].double() for part in (returns, returns - values)]
    moments = [torch.stack([part.sum(), part.square().sum()]) for part in kept]
    count = mask.sum().double()
    total = all_sum_(torch.cat([*moments, count[None]]))
    count = total[4].clamp(min=1)
    spread, missed = (total[i + 1] / count - (total[i] / count) ** 2 for i in (0, 2))
    explained = torch.where(spread > FLAT, 1 - missed / spread.clamp(min=FLAT), torch.zeros_like(spread))
    sums.add("train/explained_variance", explained)


def add_correction_metrics(
    sums: MetricSums, correction: Correction, old_logps: Tensor, rollout_logps: Tensor, mask: Tensor
) -> None:
    """How far the engine's probabilities are from the trainer's, and what that costs.

    Args:
        sums: where they go.
        correction: of this rank's rows.
        old_logps: (B, T) by the training model.
        rollout_logps: (B, T) as the engine reported.
        mask: (B, T) bool, the loss mask before the correction.
    """
    tokens, kept = mask.sum(), correction.mask
    ratio = correction.log_ratio.exp().expand(mask.shape)
    is_touched = mask & (~kept | (correction.weights < ratio))
    add_mismatch(sums, old_logps, rollout_logps, mask)
    sums.add("rollout_is/touched_frac", is_touched.sum(), tokens)
    sums.add_max("rollout_is/max_ratio", (ratio * mask).max() if mask.numel() else 0.0)
    sums.add_weights("rollout_is/effective_sample_frac", correction.weights[kept])


def add_mismatch(sums: MetricSums, old_logps: Tensor, rollout_logps: Tensor, mask: Tensor) -> None:
    """KL of the engine from the trainer, both with the weights that generated. Arguments as above."""
    sums.add("rollout_is/kl", (k3(rollout_logps, old_logps) * mask).sum(), mask.sum())
