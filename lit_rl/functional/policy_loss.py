"""Policy losses per token. Ratios first; `masking.aggregate` turns the result into a scalar."""

import math

import torch
from torch import Tensor

from lit_rl.functional.masking import masked_mean
from lit_rl.functional.precision import promoted

LOG_RATIO_BOUND = 20.0


def log_ratio(
    logps: Tensor,
    old_logps: Tensor,
    mask: Tensor,
    level: str = "token",
    *,
    bound: float = LOG_RATIO_BOUND,
) -> Tensor:
    """Log of the probability ratio of a token, or the mean over the tokens of a row.

    Clamped to +-bound, without gradient beyond; `clamped_frac(log_ratio, mask, bound=bound)` is the metric.
    Source of the sequence level: GSPO, arXiv 2507.18071, eq. 7.

    Args:
        logps: (B, T) now.
        old_logps: (B, T) at generation; `logps.detach()` when on-policy.
        mask: (B, T) bool or 0/1, the loss mask.
        level: "token" or "sequence".
        bound: of the clamp; infinity = off.

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
    return difference.clamp(-bound, bound)


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
    at negative advantages is at most `-dual_clip * A`): arXiv 1912.09729; cap of the unclipped ratio
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


def sequence_log_ratio_at_tokens(
    logps: Tensor, old_logps: Tensor, mask: Tensor, *, bound: float = LOG_RATIO_BOUND
) -> Tensor:
    """The sequence-level log-ratio at every token, each with the gradient of its own log-probability.

    For weights or advantages that differ between the tokens of a row; with equal ones and a mean per row the
    gradient is that of the sequence level. Source: GSPO-token, arXiv 2507.18071.

    Args:
        logps, old_logps, mask, bound: as in `log_ratio`.

    Returns:
        (B, T), zero where the mask is false.
    """
    sequence = log_ratio(logps, old_logps, mask, "sequence", bound=math.inf).detach()
    logps = promoted(logps)
    carried = (sequence + (logps - logps.detach())).clamp(-bound, bound)
    return torch.where(mask.bool(), carried, torch.zeros_like(logps))


def cispo(log_ratio: Tensor, logps: Tensor, advantages: Tensor, *, low: float, high: float) -> Tensor:
    """CISPO: the clipped ratio is a weight without gradient, `-clip(r, low, high).detach() A logp`.

    Every token keeps a gradient. Source: MiniMax-M1, arXiv 2506.13585.

    Args:
        log_ratio: (B, T) or (B, 1).
        logps: (B, T) now.
        advantages: (B,) or (B, T).
        low: least ratio, e.g. 1 - epsilon; 0 = no lower bound.
        high: greatest ratio itself, e.g. 1 + epsilon_high.

    Returns:
        (B, T) loss per token.
    """
    weight = log_ratio.detach().exp().clamp(low, high)
    return -weight * per_token(advantages) * promoted(logps)


def gpg_loss(logps: Tensor, advantages: Tensor) -> Tensor:
    """The plain policy gradient, `-A logp`, without a ratio. Source: GPG, arXiv 2504.02546.

    Args:
        logps: (B, T) now.
        advantages: (B,) or (B, T).

    Returns:
        (B, T) loss per token.
    """
    return -promoted(logps) * per_token(advantages)


def sapo(log_ratio: Tensor, advantages: Tensor, *, tau_pos: float = 1.0, tau_neg: float = 1.05) -> Tensor:
    """SAPO: a soft gate in place of the clip, `-(4 / tau) sigmoid(tau (r - 1)) A`.

    Source: Soft Adaptive Policy Optimization, arXiv 2511.20347.

    Args:
        log_ratio: (B, T) or (B, 1).
        advantages: (B,) or (B, T).
        tau_pos: sharpness of the gate at positive advantages.
        tau_neg: at the others; greater is safer.

    Returns:
        (B, T) or (B, 1) loss per token or row.
    """
    advantages = per_token(advantages)
    tau = torch.where(advantages > 0, tau_pos, tau_neg).to(log_ratio.dtype)
    return -torch.sigmoid(tau * (log_ratio.exp() - 1)) * 4 / tau * advantages


def geo_mean(
    log_ratio: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    epsilon: float,
    epsilon_high: float | None = None,
) -> Tensor:
    """GMPO: geometric mean of the row's token ratios, each clipped in log space at -epsilon and epsilon_high.

    Source: Geometric-Mean Policy Optimization, arXiv 2507.20673.

    Args:
        log_ratio: (B, T).
        advantages: (B,) or (B, T), of which a row takes the mean.
        mask: (B, T) bool or 0/1.
        epsilon: clip of the log-ratio below.
        epsilon_high: above, None = epsilon.

    Returns:
        (B, 1) loss per row.
    """
    advantages = per_token(advantages)
    sign = advantages.sign()
    clipped = log_ratio.clamp(-epsilon, epsilon if epsilon_high is None else epsilon_high)
    pessimistic = sign * torch.minimum(sign * log_ratio, sign * clipped)
    ratio = masked_mean(pessimistic, mask, dim=-1).exp()
    return (-masked_mean(advantages, mask, dim=-1) * ratio).unsqueeze(-1)


def token_covariance(logps: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """(B, T) each token's part of the covariance of advantage and log-probability over the tokens given.

    Large values are the tokens that make the entropy fall. Source: arXiv 2505.22617.

    Args:
        logps: (B, T) now; no gradient passes.
        advantages: (B,) or (B, T).
        mask: (B, T) bool or 0/1.
    """
    logps, advantages = promoted(logps).detach(), per_token(advantages)
    return (advantages - masked_mean(advantages, mask)) * (logps - masked_mean(logps, mask))


def clip_cov(
    log_ratio: Tensor,
    logps: Tensor,
    advantages: Tensor,
    mask: Tensor,
    noise: Tensor,
    *,
    epsilon: float,
    epsilon_high: float | None = None,
    cov_ratio: float = 2e-4,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
) -> Tensor:
    """Clip-Cov: the clipped surrogate, with some tokens of large covariance taken out of the gradient.

    Source: The Entropy Mechanism of RL for Reasoning LMs, arXiv 2505.22617.

    Args:
        log_ratio: (B, T).
        logps: (B, T) now.
        advantages: (B,) or (B, T).
        mask: (B, T) bool or 0/1.
        noise: (B, T) uniform numbers, which decide among the candidates: the least win.
        epsilon: clip range below 1.
        epsilon_high: above, None = epsilon.
        cov_ratio: share of the counted tokens that is taken out, at least one token.
        cov_low: candidates have a covariance above it
        cov_high: and below it.

    Returns:
        (B, T) loss per token, zero for those taken out.
    """
    loss = clipped_surrogate(log_ratio, advantages, epsilon=epsilon, epsilon_high=epsilon_high)
    clip = {"epsilon": epsilon, "epsilon_high": epsilon_high}
    band = {"cov_ratio": cov_ratio, "cov_low": cov_low, "cov_high": cov_high}
    taken = clip_cov_tokens(log_ratio, logps, advantages, mask, noise, **clip, **band)  # type: ignore[arg-type]
    return torch.where(taken, torch.zeros_like(loss), loss)


def clip_cov_tokens(
    log_ratio: Tensor,
    logps: Tensor,
    advantages: Tensor,
    mask: Tensor,
    noise: Tensor,
    *,
    epsilon: float,
    epsilon_high: float | None,
    cov_ratio: float,
    cov_low: float,
    cov_high: float,
) -> Tensor:
    """(B, T) bool: the tokens that `clip_cov` takes out. Arguments as there.

    Mean, share and noise are over the rows given: give it the whole optimizer batch.
    """
    covariance = token_covariance(logps, advantages, mask)
    clipped = is_clipped(log_ratio, advantages, epsilon, epsilon_high)
    candidates = mask.bool() & ~clipped & (covariance > cov_low) & (covariance < cov_high)
    return _least(noise, candidates, _share(mask, cov_ratio))


def kl_cov(
    log_ratio: Tensor,
    logps: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    cov_ratio: float = 2e-4,
    kl_coef: float = 1.0,
) -> Tensor:
    """KL-Cov: the unclipped surrogate, with a penalty `kl_coef |log r|` on the tokens of largest covariance.

    Source: arXiv 2505.22617.

    Args:
        log_ratio: (B, T).
        logps: (B, T) now.
        advantages: (B,) or (B, T).
        mask: (B, T) bool or 0/1.
        cov_ratio: share of the counted tokens that pays, at least one token.
        kl_coef: weight of the penalty.

    Returns:
        (B, T) loss per token.
    """
    paying = kl_cov_tokens(logps, advantages, mask, cov_ratio=cov_ratio)
    return penalised_surrogate(log_ratio, advantages, paying, kl_coef=kl_coef)


def kl_cov_tokens(logps: Tensor, advantages: Tensor, mask: Tensor, *, cov_ratio: float) -> Tensor:
    """(B, T) bool: the tokens that pay in `kl_cov`. Arguments as there.

    Mean and share are over the rows given: give it the whole optimizer batch.
    """
    covariance = token_covariance(logps, advantages, mask)
    return _least(-covariance, mask.bool(), _share(mask, cov_ratio))


def penalised_surrogate(log_ratio: Tensor, advantages: Tensor, paying: Tensor, *, kl_coef: float) -> Tensor:
    """(B, T) loss `-r A`, plus `kl_coef |log r|` where `paying` is true. Arguments as in `kl_cov`."""
    loss = -per_token(advantages) * log_ratio.exp()
    return torch.where(paying, loss + kl_coef * log_ratio.abs(), loss)


def _share(mask: Tensor, ratio: float) -> int:
    """That share of the counted tokens, at least one."""
    return max(int(ratio * int(mask.sum())), 1)


def _least(values: Tensor, candidates: Tensor, count: int) -> Tensor:
    """Bool of the same shape: the `count` candidates of least value, or all if they are fewer."""
    order = values.masked_fill(~candidates, torch.inf).flatten().argsort(stable=True)[:count]
    chosen = torch.zeros_like(candidates.flatten())
    chosen[order] = True
    return chosen.view_as(candidates) & candidates


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, *, cliprange_value: float | None = None
) -> Tensor:
    """Squared error of the critic, the larger of the plain and the clipped one, with the factor 1/2.

    Source: PPO's reference implementation; arXiv 2006.05990.

    Args:
        values: (B, T) now.
        old_values: (B, T) at generation.
        returns: (B, T) targets.
        cliprange_value: how far a value may move from the old one, None = no clipping.

    Returns:
        (B, T) loss per token.
    """
    values, old_values, returns = promoted(values), promoted(old_values), promoted(returns)
    error = (values - returns).square()
    if cliprange_value is not None:
        near = torch.clamp(values, old_values - cliprange_value, old_values + cliprange_value)
        error = torch.maximum(error, (near - returns).square())
    return 0.5 * error


def is_value_clipped(
    values: Tensor, old_values: Tensor, returns: Tensor, *, cliprange_value: float
) -> Tensor:
    """(B, T) bool: the clipped error is the larger one. Arguments as in `value_loss`."""
    clipped = value_loss(values, old_values, returns, cliprange_value=cliprange_value)
    return (clipped > value_loss(values, old_values, returns)).detach()
