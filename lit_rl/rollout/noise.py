"""Sampling noise: one uniform number per row and token, and how it becomes a token (rulings.md 3).

The numbers of a completion are drawn from the completion's own stream, so they are the same on any rank, in
any batch and beside any neighbours. A token is the inverse of the cumulative distribution at its number.
"""

import torch
from torch import Tensor

from lit_rl.seeding import derived_generator


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


def inverse_cdf(weights: Tensor, numbers: Tensor) -> Tensor:
    """The token at each number in the cumulative distribution of unnormalised probabilities.

    Token i is chosen with probability weights[i] / sum(weights): it is the first whose cumulative weight
    exceeds the number times the sum. The sums are float64. A weight of zero is never chosen: where rounding
    in a parallel sum would allow it, the heaviest token stands in.

    Args:
        weights: (B, V) float, >= 0, at least one positive in each row.
        numbers: (B,) float64, in [0, 1).

    Returns:
        (B,) long.
    """
    cumulative = weights.cumsum(-1, dtype=torch.float64)  # (B, V)
    thresholds = numbers[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, thresholds, right=True)
    tokens.clamp_(max=weights.shape[-1] - 1)
    is_empty = weights.gather(-1, tokens) == 0
    if is_empty.any():
        tokens = torch.where(is_empty, weights.argmax(-1, keepdim=True), tokens)
    return tokens[:, 0]
