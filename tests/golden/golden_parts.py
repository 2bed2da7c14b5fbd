"""Shared by the adapters: reading tensors from a case, gradients, local divisors."""

from typing import Any

import torch
from torch import Tensor

from lit_rl.functional.masking import Totals, aggregate, totals_of

MODES = {
    "token-mean": "token_mean",
    "seq-mean-token-sum": "seq_mean_token_sum",
    "seq-mean-token-mean": "seq_mean_token_mean",
    "seq-mean-token-sum-norm": "seq_mean_token_sum_norm",
}


def tensor(values: Any) -> Tensor:
    """float64, whatever was written."""
    return torch.tensor(values, dtype=torch.float64)


def mask_of(values: Any) -> Tensor:
    return torch.tensor(values).bool()


def leaf(values: Any) -> Tensor:
    return tensor(values).requires_grad_()


def gradient(loss: Tensor, source: Tensor) -> Tensor:
    return torch.autograd.grad(loss, source, retain_graph=True)[0]


def totals(
    mask: Tensor, *, rows: int | None = None, tokens: int | None = None, length: int | None = None
) -> Totals:
    """Local divisors, with those replaced that the case prescribes."""
    local = totals_of(mask, mask.shape[1] if length is None else length)
    if rows is not None:
        local = local._replace(rows=torch.tensor(rows))
    if tokens is not None:
        local = local._replace(tokens=torch.tensor(tokens))
    return local


def verl_mean(per_token: Tensor, mask: Tensor, mode: str) -> Tensor:
    """verl's aggregation of a local batch; its sum-norm divides by the padded width and not by the rows."""
    rows = 1 if mode == "seq-mean-token-sum-norm" else None
    return aggregate(per_token, mask, mode=MODES[mode], totals=totals(mask, rows=rows))
