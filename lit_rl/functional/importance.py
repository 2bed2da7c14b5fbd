"""Rollout correction: weights and masks for tokens that an engine sampled with slightly other probabilities.

The ratio is training probability over engine probability of the sampled token, under the same weights. Bounds
are on the ratio itself (verl 0.8 mirrors them in its k1 rules: its lower bound is our 1 / upper and the
reverse).
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lit_rl.functional.masking import masked_mean, masked_sum
from lit_rl.functional.precision import promoted

LOG_RATIO_BOUND = 20.0


class Correction(NamedTuple):
    """What a policy loss per token is multiplied by, and which tokens still count.

    Attributes:
        weights: (B, T), without gradient, zero where the incoming mask is false.
        mask: (B, T) bool, the incoming mask without what was rejected.
        log_ratio: (B, T) or (B, 1), before bounds; for metrics.
    """

    weights: Tensor
    mask: Tensor
    log_ratio: Tensor


def mismatch(logps: Tensor, rollout_logps: Tensor, mask: Tensor, level: str = "token") -> Tensor:
    """Log of training over engine probability, clamped to +-20, without gradient.

    Args:
        logps: (B, T) by the training model, with the weights that generated.
        rollout_logps: (B, T) as the engine reported.
        mask: (B, T) bool or 0/1.
        level: "token"; "sequence", the sum over the row's counted tokens; "geometric", their mean.

    Returns:
        (B, T), zero where the mask is false; or (B, 1).

    Raises:
        ValueError: the level is none of the above.
    """
    difference = (promoted(logps) - promoted(rollout_logps)).detach()
    if level == "token":
        difference = torch.where(mask.bool(), difference, torch.zeros_like(difference))
    elif level == "sequence":
        difference = masked_sum(difference, mask, dim=-1).unsqueeze(-1)
    elif level == "geometric":
        difference = masked_mean(difference, mask, dim=-1).unsqueeze(-1)
    else:
        raise ValueError(f"level must be token, sequence or geometric (found {level!r}).")
    return difference.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def is_within(log_ratio: Tensor, *, upper: float, lower: float | None = None) -> Tensor:
    """Bool, shaped as the log-ratio: the ratio lies in [lower, upper].

    Args:
        log_ratio: (B, T) or (B, 1).
        upper: > 1.
        lower: < 1, None = 1 / upper.
    """
    ratio = log_ratio.exp()
    return (ratio >= (1 / upper if lower is None else lower)) & (ratio <= upper)


def has_vetoed_token(token_log_ratio: Tensor, mask: Tensor, *, threshold: float) -> Tensor:
    """(B,) bool: some counted token of the row has a ratio below the threshold.

    Args:
        token_log_ratio: (B, T) of level "token".
        mask: (B, T) bool or 0/1.
        threshold: > 0, far below 1.
    """
    return ((token_log_ratio < math.log(threshold)) & mask.bool()).any(-1)


def normalized_weights(weights: Tensor, mask: Tensor) -> Tensor:
    """Weights over their mean: over the counted tokens, or for (B, 1) over the rows that have any.

    Args:
        weights: (B, T) or (B, 1).
        mask: (B, T) bool or 0/1.
    """
    counted = mask.bool() if weights.shape == mask.shape else mask.bool().any(-1, keepdim=True)
    return weights / masked_mean(weights, counted).clamp(min=1e-8)


def rollout_correction(
    logps: Tensor,
    rollout_logps: Tensor,
    mask: Tensor,
    *,
    level: str = "token",
    mode: str = "truncate",
    upper: float | None = None,
    lower: float | None = None,
    veto: float | None = None,
) -> Correction:
    """Importance weights against the engine, and the rejection of tokens or rows.

    Sources: truncation, arXiv 1802.01561 (V-trace); token and sequence levels in this setting, F. Yao et al.,
    "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (2025); geometric level and veto,
    verl.

    Args:
        logps: (B, T) by the training model, with the weights that generated.
        rollout_logps: (B, T) as the engine reported.
        mask: (B, T) bool or 0/1, the loss mask.
        level: "token", "sequence" or "geometric": whose ratio weighs and is bounded.
        mode: "truncate" (the weight is at most `upper`), "mask" (what lies outside the bounds leaves the mask
            and so the divisors; weights inside stay) or "none" (the weight is not bounded).
        upper: > 1, None = no upper bound.
        lower: < 1, for "mask" only; None = 1 / upper, or none without upper.
        veto: rows that hold a token ratio below it leave the mask, None = off.

    Raises:
        ValueError: level or mode is none of the above.
    """
    if mode not in ("truncate", "mask", "none"):
        raise ValueError(f"mode must be truncate, mask or none (found {mode!r}).")
    counted = mask.bool()
    log_ratio = mismatch(logps, rollout_logps, mask, level)
    weights, kept = log_ratio.exp(), counted
    if mode == "truncate" and upper is not None:
        weights = weights.clamp(max=upper)
    if mode == "mask":
        bounds = (math.inf if upper is None else upper, 0.0 if upper is None and lower is None else lower)
        kept = counted & is_within(log_ratio, upper=bounds[0], lower=bounds[1])
    if veto is not None:
        tokens = mismatch(logps, rollout_logps, mask)
        kept = kept & ~has_vetoed_token(tokens, mask, threshold=veto).unsqueeze(-1)
    weights = torch.where(counted, weights.expand(counted.shape), torch.zeros_like(weights))
    return Correction(weights, kept, log_ratio)


def geometric_weights(weights: Tensor, mask: Tensor) -> Tensor:
    """(B, 1) geometric mean of a row's weights, for losses per row; 1 for a row without counted tokens.

    Args:
        weights: (B, T), not negative; held at 1e-10 or above.
        mask: (B, T) bool or 0/1.
    """
    return masked_mean(promoted(weights).clamp(min=1e-10).log(), mask, dim=-1).unsqueeze(-1).exp()
