"""Sampling noise: one uniform number per row and token, and how it becomes a token (rulings.md 3).

The numbers of a completion are drawn from the completion's own stream, so they are the same on any rank, in
any batch and beside any neighbours. A token is the inverse of the cumulative distribution at its number.
"""

import torch
from torch import Tensor

from lit_rl.seeding import derived_generator

_BLOCK = 256
"""Weights that are summed together before the cumulative sum, about the root of a vocabulary."""


def uniforms(seed: int, step: int, prompt_rows: list[int], generations: list[int], tokens: int) -> Tensor:
    """The numbers that completions are drawn with: (B, tokens) float64 on the CPU, in [0, 1).

    The first n numbers of a row are the same whatever `tokens` is.

    Args:
        seed: of the run and the purpose.
        step: iterations done before this one.
        prompt_rows: data row of each completion.
        generations: index of each completion within its group.
        tokens: numbers per row.
    """
    streams = (
        derived_generator(seed, step, prompt_row, generation)
        for prompt_row, generation in zip(prompt_rows, generations, strict=True)
    )
    return torch.stack([torch.rand(tokens, generator=stream, dtype=torch.float64) for stream in streams])


def block_sums(weights: Tensor) -> Tensor:
    """(B, ceil(V / 256)) float64: sums of 256 neighbouring weights, each of them in the weights' own dtype.

    Args:
        weights: (B, V) float, >= 0.
    """
    whole = weights.shape[-1] // _BLOCK * _BLOCK
    sums = weights[:, :whole].unflatten(-1, (-1, _BLOCK)).sum(-1)
    return torch.cat([sums, weights[:, whole:].sum(-1, keepdim=True)], -1).double()


def inverse_cdf(weights: Tensor, numbers: Tensor, sums: Tensor | None = None) -> Tensor:
    """The token at each number in the cumulative distribution of unnormalised probabilities.

    Token i is chosen with probability weights[i] / sum(weights): it is the first whose cumulative weight
    exceeds the number times the sum. First its block is found, then its place in the block; sums of blocks
    are accumulated in float64. A weight of zero is never chosen: where rounding in a parallel sum would allow
    it, the heaviest token stands in.

    Args:
        weights: (B, V) float, >= 0, at least one positive in each row.
        numbers: (B,) float64, in [0, 1].
        sums: `block_sums` of the weights, where they are at hand.

    Returns:
        (B,) long.
    """
    sums = block_sums(weights) if sums is None else sums
    up_to = sums.cumsum(-1)  # (B, blocks)
    thresholds = numbers[:, None] * up_to[:, -1:]
    block = _first_above(up_to, thresholds)
    thresholds = thresholds - (up_to - sums).gather(-1, block)
    inside = block * _BLOCK + torch.arange(_BLOCK, device=weights.device)  # (B, 256)
    last = weights.shape[-1] - 1
    own = weights.gather(-1, inside.clamp(max=last)).masked_fill_(inside > last, 0)
    tokens = block * _BLOCK + _first_above(own.cumsum(-1, dtype=torch.float64), thresholds)
    tokens.clamp_(max=last)
    is_empty = weights.gather(-1, tokens) == 0
    if is_empty.any():
        tokens = torch.where(is_empty, weights.argmax(-1, keepdim=True), tokens)
    return tokens[:, 0]


def _first_above(cumulative: Tensor, thresholds: Tensor) -> Tensor:
    """(B, 1) index of the first value above the threshold, or of the last value."""
    return torch.searchsorted(cumulative, thresholds, right=True).clamp_(max=cumulative.shape[-1] - 1)
