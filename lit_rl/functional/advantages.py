"""Credit: from rewards (and values) to the advantage of a completion or of each of its tokens."""

import torch
from torch import Tensor

from lit_rl.functional.precision import promoted


def group_advantages(rewards: Tensor, *, scale: str, std_epsilon: float = 1e-6) -> Tensor:
    """Reward of each completion relative to the other completions of its prompt.

    `(r - mean(group)) / (std + std_epsilon)` with the unbiased standard deviation, in two passes.
    Source: DeepSeekMath, arXiv 2402.03300, section 4.1.2; without the division: Dr. GRPO, arXiv 2503.20783.

    Args:
        rewards: (P, G) float. NaN: no reward function applied; such a completion gets 0 and enters neither
            mean nor standard deviation.
        scale: "group" (the group's standard deviation), "batch" (that of all rewards given) or "none" (1).
        std_epsilon: added to the standard deviation.

    Returns:
        (P, G), zero mean in each row; exactly zero in a row of equal rewards. A group of one keeps its reward
        as it is (mean 0, std 1), which no longer compares anything: refuse G = 1 before.

    Raises:
        ValueError: the scale is none of the above.
    """
    return _scaled(_centred(rewards), rewards, scale=scale, std_epsilon=std_epsilon)


def _known(rewards: Tensor) -> Tensor:
    return ~rewards.isnan()


def _mean(values: Tensor, known: Tensor) -> Tensor:
    """(P, 1) mean of the known entries of each row, 0 where there is none."""
    total = torch.where(known, values, torch.zeros_like(values)).sum(-1, keepdim=True)
    return total / known.sum(-1, keepdim=True).clamp(min=1)


def _std(values: Tensor, known: Tensor) -> Tensor:
    """(P, 1) unbiased standard deviation of the known entries of each row, 0 where fewer than two."""
    squares = torch.where(known, values - _mean(values, known), torch.zeros_like(values)).square()
    return (squares.sum(-1, keepdim=True) / (known.sum(-1, keepdim=True) - 1).clamp(min=1)).sqrt()


def is_zero_variance(rewards: Tensor) -> Tensor:
    """(P,) bool: all known rewards of the group are equal (or none is known).

    Compares the extremes, since the mean of equal floats need not equal them.

    Args:
        rewards: (P, G) float, NaN = not known.
    """
    known = _known(rewards)
    high = torch.where(known, rewards, torch.full_like(rewards, -torch.inf)).amax(-1)
    low = torch.where(known, rewards, torch.full_like(rewards, torch.inf)).amin(-1)
    return high <= low


def _centred(rewards: Tensor) -> Tensor:
    """(P, G) reward less the mean of its group; 0 where unknown; raw in groups of one."""
    rewards = promoted(rewards)
    if rewards.shape[-1] == 1:
        return rewards.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf)
    known = _known(rewards)
    kept = known & ~is_zero_variance(rewards).unsqueeze(-1)
    return torch.where(kept, rewards - _mean(rewards, known), torch.zeros_like(rewards))


def _scaled(centred: Tensor, rewards: Tensor, *, scale: str, std_epsilon: float) -> Tensor:
    """Centred rewards over the chosen standard deviation of the rewards."""
    if scale == "none":
        return centred
    rewards = promoted(rewards)
    if scale == "batch":
        everything = rewards.reshape(1, -1)
        return centred / (_std(everything, _known(everything)) + std_epsilon)
    if scale == "group":
        std = _std(rewards, _known(rewards)) if rewards.shape[-1] > 1 else torch.ones_like(rewards)
        return centred / (std + std_epsilon)
    raise ValueError(f"scale must be group, batch or none (found {scale!r}).")
