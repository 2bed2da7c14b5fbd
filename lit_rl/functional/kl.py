"""KL divergence of the policy from the reference: estimators from sampled tokens, and the exact one.

README.md beside this file says which divergence each of them makes smaller.

With `d = logps - ref_logps` of a sampled token. Gradients, in expectation over samples of the policy: inside
a loss k1 gives zero, k2 that of KL(policy || ref), k3 that of KL(ref || policy). A name with `+` has the
value of the estimator and the gradient of k2. In the reward (no gradient through it) k1 gives the gradient of
KL(policy || ref). Source: J. Schulman, "Approximating KL divergence" (2020).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from lit_rl.functional.logps import (
    Head,
    at_targets,
    entropy_of_logps,
    logits,
    over_chunks,
    tempered,
)
from lit_rl.functional.precision import promoted

LOG_RATIO_BOUND = 20.0
LOW_VAR_KL_BOUND = 10.0
SERIES_BELOW = 0.1

Estimator = Callable[[Tensor, Tensor], Tensor]


def k1(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """`d`: unbiased, any sign, high variance. Its gradient inside a loss has expectation zero.

    Args:
        logps: (B, T) of the policy.
        ref_logps: (B, T) of the reference.

    Returns:
        (B, T) float32 or better.
    """
    return promoted(logps) - promoted(ref_logps)


def k_abs(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """`|d|`. Shapes as in `k1`."""
    return k1(logps, ref_logps).abs()


def k2(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """`d^2 / 2`: small bias near the reference, low variance, right gradient. Shapes as in `k1`."""
    return 0.5 * k1(logps, ref_logps).square()


def k3(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """`exp(-d) - 1 + d`: unbiased, never negative, low variance. Shapes as in `k1`.

    Near zero by its series, since the plain form loses all digits there in float32. `d` is clamped to +-20
    and the value to 10, without gradient beyond; `clamped_frac(kl, mask, bound=LOW_VAR_KL_BOUND)` is the
    metric.
    """
    minus_d = k1(ref_logps, logps).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    value = torch.where(minus_d.abs() < SERIES_BELOW, _series(minus_d), torch.expm1(minus_d) - minus_d)
    return value.clamp(max=LOW_VAR_KL_BOUND)


def _series(x: Tensor) -> Tensor:
    """exp(x) - 1 - x for |x| < 0.1, to 1e-10 relative."""
    tail = 1 + x / 5 * (1 + x / 6 * (1 + x / 7))
    return x.square() / 2 * (1 + x / 3 * (1 + x / 4 * tail))


def straight_through(estimator: Estimator) -> Estimator:
    """The estimator with the gradient of k2, which is that of KL(policy || ref) in expectation."""

    def with_gradient_of_k2(logps: Tensor, ref_logps: Tensor) -> Tensor:
        carrier = k2(logps, ref_logps)
        return carrier - carrier.detach() + estimator(logps, ref_logps).detach()

    return with_gradient_of_k2


def full_kl(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """Exact KL(policy || ref) = sum_v p_v (log p_v - log q_v).

    A token of probability 0 under the policy adds nothing, whatever the reference says.

    Args:
        logps: (..., V) log-probabilities of the whole vocabulary under the policy.
        ref_logps: (..., V) under the reference.

    Returns:
        (...) float32 or better.
    """
    logps, ref_logps = promoted(logps), promoted(ref_logps)
    gap = torch.where(logps.isneginf(), torch.zeros_like(logps), logps - ref_logps)
    return (logps.exp() * gap).sum(-1)


def token_logps_and_kl(
    hidden: Tensor,
    head: Head,
    ref_hidden: Tensor,
    ref_head: Head,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    chunk_tokens: int = 512,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability of each target, entropy, and exact KL, from the logits of one chunk at a time.

    A chunk's logits are computed again in its backward. No gradient reaches the reference.

    Args:
        hidden: (N, H). The position that predicts each target, under the policy.
        head: output head of the policy.
        ref_hidden: (N, H'). The same position under the reference.
        ref_head: output head of the reference, same vocabulary.
        targets: (N,) long.
        temperature: > 0, of both.
        chunk_tokens: >= 1. Positions whose logits exist at once.
        entropy_gradient: as in `logps.token_logps`.

    Returns:
        logps, entropy in nats and KL(policy || ref), each (N,), float32 or better, differentiable.
    """

    def of_chunk(own: Tensor, other: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            ref_logps = tempered(logits(other, ref_head), temperature).log_softmax(-1)  # (chunk, V)
        logps = tempered(logits(own, head), temperature).log_softmax(-1)
        entropy = entropy_of_logps(logps if entropy_gradient else logps.detach())
        return at_targets(logps, ids), entropy, full_kl(logps, ref_logps)

    logps, entropy, kl = over_chunks(of_chunk, (hidden, ref_hidden, targets), chunk_tokens=chunk_tokens)
    return logps, entropy, kl


ESTIMATORS: dict[str, Estimator] = {
    "kl": k1,
    "abs": k_abs,
    "mse": k2,
    "low_var_kl": k3,
    "kl+": straight_through(k1),
    "abs+": straight_through(k_abs),
    "mse+": straight_through(k2),
    "low_var_kl+": straight_through(k3),
}
"""By the names of the configuration; `full` needs the whole vocabulary: `full_kl`, without a +, since its
own gradient is exact."""


def kl_in_reward(token_rewards: Tensor, kl: Tensor, mask: Tensor, *, coef: float) -> Tensor:
    """Token rewards less the KL penalty, `r - coef * kl` at counted tokens. Source: arXiv 2203.02155, eq. 2.

    Args:
        token_rewards: (B, T) float.
        kl: (B, T) of an estimator above; no gradient passes.
        mask: (B, T) bool or 0/1.
        coef: weight.

    Returns:
        (B, T); the rewards as they are at masked positions.
    """
    rewards, penalty = promoted(token_rewards), promoted(kl).detach()
    return rewards - coef * torch.where(mask.bool(), penalty, torch.zeros_like(penalty))


def adapted_coef(coef: float, current_kl: float, *, target_kl: float, horizon: float, rows: int) -> float:
    """The adaptive controller's next weight: toward more penalty while the KL is above its target.

    `coef * (1 + clip(current_kl / target_kl - 1, +-0.2) * rows / horizon)`.
    Source: arXiv 1909.08593, section 2.2.

    Args:
        coef: weight now.
        current_kl: mean over rows of the mean KL per counted token.
        target_kl: > 0.
        horizon: > 0, in rows.
        rows: rows of this update.
    """
    error = min(max(current_kl / target_kl - 1, -0.2), 0.2)
    return coef * (1 + error * rows / horizon)
