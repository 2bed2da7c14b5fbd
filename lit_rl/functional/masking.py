"""Masked statistics, and `aggregate`: the one place where a loss per token becomes a scalar."""

from typing import NamedTuple

import torch
from torch import Tensor

from lit_rl.functional.precision import promoted

WHITEN_EPSILON = 1e-8


def masked_sum(values: Tensor, mask: Tensor, *, dim: int | None = None) -> Tensor:
    """Sum where the mask is true. What stands elsewhere is never read, NaN included.

    Args:
        values: (B, T), or anything that broadcasts to it.
        mask: (B, T) bool or 0/1.
        dim: the axis to sum over, None = all.
    """
    values, mask = torch.broadcast_tensors(promoted(values), mask.bool())
    kept = torch.where(mask, values, torch.zeros_like(values))
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(values: Tensor, mask: Tensor, *, dim: int | None = None) -> Tensor:
    """Mean where the mask is true; 0 where it is nowhere true. Arguments as in `masked_sum`."""
    count = mask.bool().sum() if dim is None else mask.bool().sum(dim)
    return masked_sum(values, mask, dim=dim) / count.clamp(min=1)


def masked_var(values: Tensor, mask: Tensor, *, unbiased: bool = True) -> Tensor:
    """Variance where the mask is true, in two passes (mean first).

    Args:
        values: (B, T).
        mask: (B, T) bool or 0/1.
        unbiased: divide by n - 1 instead of n.

    Returns:
        scalar; 0 when fewer than two values count.
    """
    centred = promoted(values) - masked_mean(values, mask)
    count = mask.bool().sum()
    return masked_sum(centred.square(), mask) / (count - int(unbiased)).clamp(min=1)


def masked_whiten(values: Tensor, mask: Tensor, *, shift_mean: bool = True, unbiased: bool = True) -> Tensor:
    """Values scaled to variance 1, and to mean 0 unless told otherwise, over the counted positions.

    `(x - mean) / sqrt(var + 1e-8)`.

    Args:
        values: (B, T).
        mask: (B, T) bool or 0/1.
        shift_mean: False adds the mean again.
        unbiased: divide the variance by n - 1 instead of n.

    Returns:
        (B, T), zero at masked positions; all zero when fewer than two values count.
    """
    mean, var = masked_mean(values, mask), masked_var(values, mask, unbiased=unbiased)
    whitened = (promoted(values) - mean) * torch.rsqrt(var + WHITEN_EPSILON)
    if not shift_mean:
        whitened = whitened + mean
    counted = mask.bool() & (mask.bool().sum() >= 2)
    return torch.where(counted, whitened, torch.zeros_like(whitened))


def clamped_frac(values: Tensor, mask: Tensor, *, bound: float) -> Tensor:
    """Share of the counted values that a clamp to [-bound, bound] holds (or would hold).

    Args:
        values: (B, T) or (B, 1), before or after the clamp.
        mask: (B, T) bool or 0/1.
        bound: of the clamp.
    """
    return masked_mean((values.detach().abs() >= bound).float(), mask)


class Totals(NamedTuple):
    """Divisors of a loss, counted over the whole optimizer batch: all its micro-batches on all ranks.

    Attributes:
        tokens: counted tokens.
        rows: rows with at least one counted token. Rows without any enter no mean.
        max_completion_length: the constant length of `seq_mean_token_sum_norm`, in tokens.
    """

    tokens: Tensor
    rows: Tensor
    max_completion_length: int


def totals_of(mask: Tensor, max_completion_length: int) -> Totals:
    """Totals of these rows alone, as scalar long tensors; add them up over micro-batches and ranks.

    Args:
        mask: (B, T) bool or 0/1, the loss mask.
        max_completion_length: in tokens.
    """
    counted = mask.bool()
    return Totals(counted.sum(), counted.any(-1).sum(), max_completion_length)


def aggregate(per_token: Tensor, mask: Tensor, *, mode: str, totals: Totals) -> Tensor:
    """The loss of an optimizer batch, or the part of it that these rows contribute.

    With the divisors of the whole optimizer batch the parts of any cut into micro-batches add up to the loss
    of the whole, and so do their gradients. Across W ranks the sum is wanted and DDP averages, so the caller
    multiplies by W. With `m` the mask, `x` the loss per token and sums over the rows given:

        token_mean                sum m x / tokens                            DAPO, arXiv 2503.14476
        seq_mean_token_mean       sum_rows (sum_t m x / sum_t m) / rows       GRPO, arXiv 2402.03300, eq. 3
        seq_mean_token_sum        sum m x / rows
        seq_mean_token_sum_norm   sum m x / (rows * max_completion_length)    Dr. GRPO, arXiv 2503.20783

    Args:
        per_token: (B, T), or (B, 1) for a loss per row. Not read where the mask is false.
        mask: (B, T) bool or 0/1, the loss mask.
        mode: one of the four above.
        totals: divisors of the whole optimizer batch; `totals_of(mask, ...)` when these rows are all of it.

    Returns:
        scalar; exactly 0, with zero gradients and still part of the graph, when no token counts.

    Raises:
        ValueError: the mode is none of the above.
    """
    if mode == "seq_mean_token_mean":
        summed = masked_mean(per_token, mask, dim=-1).sum()
    else:
        summed = masked_sum(per_token, mask)
    return summed / _divisor(mode, totals)


def _divisor(mode: str, totals: Totals) -> Tensor:
    tokens, rows = totals.tokens.clamp(min=1), totals.rows.clamp(min=1)
    if mode == "token_mean":
        return tokens
    if mode in ("seq_mean_token_mean", "seq_mean_token_sum"):
        return rows
    if mode == "seq_mean_token_sum_norm":
        return rows * max(totals.max_completion_length, 1)
    raise ValueError(
        "mode must be token_mean, seq_mean_token_mean, seq_mean_token_sum or "
        f"seq_mean_token_sum_norm (found {mode!r})."
    )
