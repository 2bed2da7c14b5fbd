"""Policy losses per token. Ratios first; `masking.aggregate` turns the result into a scalar."""

import torch
from torch import Tensor

from lit_rl.functional.masking import masked_mean
from lit_rl.functional.precision import promoted

LOG_RATIO_BOUND = 20.0


def log_ratio(logps: Tensor, old_logps: Tensor, mask: Tensor, level: str = "token") -> Tensor:
    """Log of the probability ratio of a token, or the mean over the tokens of a row.

    Clamped to +-20, without gradient beyond; `clamped_frac(log_ratio, mask, bound=LOG_RATIO_BOUND)` is the
    metric. Source of the sequence level: GSPO, arXiv 2507.18071, eq. 7.

    Args:
        logps: (B, T) now.
        old_logps: (B, T) at generation; `logps.detach()` when on-policy.
        mask: (B, T) bool or 0/1, the loss mask.
        level: "token" or "sequence".

    Returns:
        (B, T), zero where the mask is false; or (B, 1).

    Raises:
        ValueError: the level is neither.
    """
    difference = promoted(logps) - promoted(old_logps)
    if level == "token":
        difference = torch.where(mask.bool(), difference, torch.zeros_like(difference))
    elif level == "sequence":
        difference = masked_mean(difference, mask, dim=-1).unsqueeze(-1)
    else:
        raise ValueError(f"level must be token or sequence (found {level!r}).")
    return difference.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def per_token(advantages: Tensor) -> Tensor:
    """(B, 1) or (B, T): one advantage per row as a column, one per token as it is."""
    advantages = promoted(advantages)
    return advantages.unsqueeze(-1) if advantages.dim() == 1 else advantages


def clipped_surrogate(
    log_ratio: Tensor,
    advantages: Tensor,
    *,
    epsilon: float,
    epsilon_high: float | None = None,
    dual_clip: float | None = None,
    ratio_cap: float | None = None,
) -> Tensor:
    """PPO's clipped loss, `-min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A)`.

    Sources: PPO, arXiv 1707.06347, eq. 7; separate upper bound: DAPO, arXiv 2503.14476; dual clip (the loss
    at negative advantages is at most `-dual_clip * A`): arXiv 1912.09729, eq. 5; cap of the unclipped ratio
    at either sign: INTELLECT-2, arXiv 2505.07291.

    Args:
        log_ratio: (B, T) or (B, 1).
        advantages: (B,) or (B, T).
        epsilon: clip range below 1.
        epsilon_high: clip range above 1, None = epsilon.
        dual_clip: > 1, None = off.
        ratio_cap: > 1 + epsilon_high, None = off.

    Returns:
        (B, T) or (B, 1) loss per token or row.
    """
    advantages = per_token(advantages)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - epsilon, 1 + (epsilon if epsilon_high is None else epsilon_high))
    unclipped = ratio if ratio_cap is None else ratio.clamp(max=ratio_cap)
    loss = torch.maximum(-advantages * unclipped, -advantages * clipped)
    if dual_clip is None:
        return loss
    return torch.where(advantages < 0, torch.minimum(loss, -advantages * dual_clip), loss)


def is_clipped(
    log_ratio: Tensor, advantages: Tensor, epsilon: float, epsilon_high: float | None = None
) -> Tensor:
    """Bool, shaped as the loss: the clip is active, so the token has no gradient. Arguments as above."""
    advantages, ratio = per_token(advantages), log_ratio.detach().exp()
    high = 1 + (epsilon if epsilon_high is None else epsilon_high)
    return ((ratio < 1 - epsilon) & (advantages < 0)) | ((ratio > high) & (advantages > 0))


def clip_fraction(
    log_ratio: Tensor,
    advantages: Tensor,
    mask: Tensor,
    epsilon: float,
    epsilon_high: float | None = None,
) -> Tensor:
    """Share of the counted tokens at which the clip is active. Arguments as above, mask (B, T)."""
    return masked_mean(is_clipped(log_ratio, advantages, epsilon, epsilon_high).float(), mask)
