"""Credit: from rewards (and values) to the advantage of a completion or of each of its tokens.

Estimators over a group take (P, G) rewards and return (P, G), one advantage per completion. NaN marks a
reward that no function gave: it enters no statistic and its advantage is 0. A group of one keeps its raw
reward. Estimators over tokens take (B, T) rewards and return (B, T), zero at masked positions; rewards per
completion become rewards per token by `terminal_rewards`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lit_rl.functional.masking import masked_mean, masked_whiten
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


def rloo(rewards: Tensor, *, scale: str = "none", std_epsilon: float = 1e-6) -> Tensor:
    """Leave-one-out: the reward less the mean of the other completions, `G / (G - 1) * (r - mean)`.

    Source: Back to Basics, arXiv 2402.14740. Scaled by the group's standard deviation it stays within
    +-sqrt(G), since the deviation includes the completion itself.

    Args:
        rewards: (P, G) float, NaN = not known.
        scale: as in `group_advantages`.
        std_epsilon: added to the standard deviation.
    """
    count = _known(rewards).sum(-1, keepdim=True).to(promoted(rewards).dtype)
    left_out = torch.where(count > 1, count / (count - 1).clamp(min=1), torch.ones_like(count))
    return _scaled(_centred(rewards) * left_out, rewards, scale=scale, std_epsilon=std_epsilon)


def opo(rewards: Tensor, lengths: Tensor) -> Tensor:
    """Reward less the group's mean weighted by length, the baseline of least variance on-policy.

    Source: OPO, arXiv 2505.23585.

    Args:
        rewards: (P, G) float, NaN = not known.
        lengths: (P, G) tokens of each completion.
    """
    rewards = promoted(rewards)
    if rewards.shape[-1] == 1:
        return _centred(rewards)
    known = _known(rewards) & ~is_zero_variance(rewards).unsqueeze(-1)
    weights = torch.where(known, lengths.to(rewards.dtype), torch.zeros_like(rewards))
    total = (torch.where(known, rewards, torch.zeros_like(rewards)) * weights).sum(-1, keepdim=True)
    baseline = total / weights.sum(-1, keepdim=True).clamp(min=1)
    return torch.where(known, rewards - baseline, torch.zeros_like(rewards))


def gpg(rewards: Tensor, *, f_norm: float = 1.0) -> Tensor:
    """Centred reward times `completions / completions of non-zero reward`, over f_norm.

    Source: GPG, arXiv 2504.02546.

    Args:
        rewards: (P, G) float, NaN = not known.
        f_norm: divisor.
    """
    known = _known(rewards)
    nonzero = (known & (rewards != 0)).sum().clamp(min=1)
    return _centred(rewards) * (known.sum() / nonzero) / f_norm


def grpo_passk(rewards: Tensor, *, scale: str = "group", std_epsilon: float = 1e-6) -> Tensor:
    """Pass@k: only the best completion of a group gets credit, its margin over the second best.

    Source: arXiv 2503.19595.

    Args:
        rewards: (P, G) float, G >= 2, NaN = not known. At a tie for the best all get 0.
        scale: as in `group_advantages`.
        std_epsilon: added to the standard deviation.

    Raises:
        ValueError: G is 1.
    """
    if rewards.shape[-1] < 2:
        raise ValueError(
            "grpo_passk compares the two best completions of a group and needs at least 2 (found 1)."
        )
    known = _known(rewards)
    values = torch.where(known, promoted(rewards), torch.full_like(promoted(rewards), -torch.inf))
    best, second = values.topk(2, dim=-1).values.split(1, dim=-1)
    margin = torch.where(second.isinf(), torch.zeros_like(best), best - second)
    columns = torch.arange(values.shape[-1], device=values.device)
    winner = (columns == values.argmax(-1, keepdim=True)) & known
    credit = torch.where(winner, margin, torch.zeros_like(values))
    return _scaled(credit, rewards, scale=scale, std_epsilon=std_epsilon)


def summed_after_normalizing(
    rewards_per_func: Tensor, weights: Tensor, *, std_epsilon: float = 1e-6
) -> Tensor:
    """Each reward function normalised in its group, then their weighted sum normalised over the batch.

    Keeps a function of small spread from being drowned by another. Source: GDPO, arXiv 2601.05242.

    Args:
        rewards_per_func: (P, G, R) float, NaN where a function did not apply.
        weights: (R,).
        std_epsilon: added to the standard deviations.

    Returns:
        (P, G); 0 where no function applied.
    """
    rewards = promoted(rewards_per_func)
    groups = rewards.transpose(1, 2).flatten(0, 1)  # (P * R, G)
    normalized = _scaled(_deviation(groups), groups, scale="group", std_epsilon=std_epsilon)
    normalized = normalized.view(rewards.shape[0], rewards.shape[2], -1).transpose(1, 2)  # (P, G, R)
    total = (normalized * weights.to(rewards.dtype)).sum(-1)
    total = total.masked_fill(rewards.isnan().all(-1), torch.nan).reshape(1, -1)
    result = _scaled(_deviation(total), total, scale="group", std_epsilon=std_epsilon)
    return result.view(rewards.shape[:2])


def _deviation(rewards: Tensor) -> Tensor:
    """As `_centred`, and 0 in groups of one."""
    return _centred(rewards) if rewards.shape[-1] > 1 else torch.zeros_like(rewards)


def terminal_rewards(rewards: Tensor, lengths: Tensor, width: int) -> Tensor:
    """(B, T) token rewards: the whole reward on the last token of each completion, 0 elsewhere.

    Args:
        rewards: (B,) float.
        lengths: (B,) long, tokens of each completion, the end token included. A row of none gets no reward.
        width: T.
    """
    positions = torch.arange(width, device=lengths.device)
    is_last = positions == (lengths - 1).unsqueeze(-1)
    column = promoted(rewards).unsqueeze(-1)
    return torch.where(is_last, column, torch.zeros_like(column))


def discounted_returns(
    token_rewards: Tensor, mask: Tensor, *, gamma: float = 1.0, across_gaps: bool = True
) -> Tensor:
    """The estimator `reward`: discounted sum of the rewards from each token on, no baseline.

    Args:
        token_rewards: (B, T) float.
        mask: (B, T) bool or 0/1. Rewards elsewhere are not read.
        gamma: discount per token, in [0, 1].
        across_gaps: masked positions inside a completion (tool output) pass the return on without discount;
            False: the sum starts anew before them.

    Returns:
        (B, T), zero at masked positions; at gamma 1 and a terminal reward that reward everywhere else.
    """
    rewards, counted = promoted(token_rewards), mask.bool()
    rewards = torch.where(counted, rewards, torch.zeros_like(rewards))
    running, returns = torch.zeros_like(rewards[:, 0]), []
    for t in reversed(range(rewards.shape[1])):
        before_gap = running if across_gaps else torch.zeros_like(running)
        running = torch.where(counted[:, t], rewards[:, t] + gamma * running, before_gap)
        returns.append(running)
    return torch.where(counted, torch.stack(returns[::-1], dim=1), torch.zeros_like(rewards))


def reinforce_plus_plus(
    token_rewards: Tensor, mask: Tensor, *, gamma: float = 1.0, scale: bool = True, across_gaps: bool = False
) -> Tensor:
    """Discounted returns, centred and scaled to variance 1 over all counted tokens given.

    Give it the rows of the whole batch over all ranks: nothing is normalised per prompt.
    Source: REINFORCE++, arXiv 2501.03262; that returns start anew at gaps is verl's reading.

    Args:
        token_rewards: (B, T) float, KL already subtracted where wanted.
        mask: (B, T) bool or 0/1.
        gamma: discount per token, in [0, 1].
        scale: False only centres.
        across_gaps: as in `discounted_returns`; set it where a completion holds tool output.

    Returns:
        (B, T), zero at masked positions, mean 0 over the counted tokens.
    """
    returns = discounted_returns(token_rewards, mask, gamma=gamma, across_gaps=across_gaps)
    return _whitened(returns, mask, scale=scale)


def reinforce_plus_plus_baseline(rewards: Tensor, mask: Tensor, *, scale: bool = True) -> Tensor:
    """Reward less the mean of its group, on each token, whitened over all counted tokens given.

    Source: REINFORCE++, arXiv 2501.03262 (the variant with a group baseline).

    Args:
        rewards: (P, G) float, NaN = not known.
        mask: (P * G, T) bool or 0/1, the rows of a prompt adjacent.
        scale: False only centres.

    Returns:
        (P * G, T), zero at masked positions.
    """
    per_row = _centred(rewards).reshape(-1, 1).expand(mask.shape)
    return _whitened(per_row, mask, scale=scale)


def _whitened(values: Tensor, mask: Tensor, *, scale: bool) -> Tensor:
    if scale:
        return masked_whiten(values, mask)
    return torch.where(mask.bool(), values - masked_mean(values, mask), torch.zeros_like(values))


def remax(token_rewards: Tensor, mask: Tensor, baselines: Tensor) -> Tensor:
    """Return from each token on, less the reward of the greedy completion of the same prompt.

    Source: ReMax, arXiv 2310.10505, algorithm 1.

    Args:
        token_rewards: (B, T) float.
        mask: (B, T) bool or 0/1.
        baselines: (B,) reward of the greedy completion.

    Returns:
        (B, T), zero at masked positions.
    """
    returns = discounted_returns(token_rewards, mask)
    return torch.where(mask.bool(), returns - promoted(baselines).unsqueeze(-1), torch.zeros_like(returns))


class Credit(NamedTuple):
    """Advantages and the critic's targets, (B, T) each."""

    advantages: Tensor
    returns: Tensor


def gae(
    token_rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    whiten: bool = True,
) -> Credit:
    """Generalised advantage estimation, `A_t = sum_l (gamma lam)^l delta_{t+l}`.

    `delta_t = r_t + gamma V_{t+1} - V_t`, with V_t the estimate before token t is emitted, 0 after the end.
    Masked positions are skipped: value and running advantage are carried across, so padding changes nothing.
    Source: arXiv 1506.02438, eq. 16.

    Args:
        token_rewards: (B, T) float.
        values: (B, T) float.
        mask: (B, T) bool or 0/1. Nothing is read elsewhere.
        gamma: discount per token, in [0, 1].
        lam: trade-off, 0 = one step, 1 = Monte Carlo.
        whiten: scale the advantages to mean 0 and variance 1 over the counted tokens given.

    Returns:
        advantages and returns (advantages before whitening plus values), zero at masked positions.
    """
    rewards, values, counted = promoted(token_rewards), promoted(values).detach(), mask.bool()
    advantage = torch.zeros_like(values[:, 0])
    next_value, columns = advantage, []
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = torch.where(counted[:, t], delta + gamma * lam * advantage, advantage)
        next_value = torch.where(counted[:, t], values[:, t], next_value)
        columns.append(advantage)
    advantages = torch.stack(columns[::-1], dim=1)
    zeros = torch.zeros_like(advantages)
    returns = torch.where(counted, advantages + values, zeros)
    advantages = masked_whiten(advantages, mask) if whiten else torch.where(counted, advantages, zeros)
    return Credit(advantages, returns)
