"""Token log-probabilities and entropies, from logits or from hidden states.

From hidden states the logits of only `chunk_tokens` positions exist at once, forward and backward: a chunk's
logits are computed again in its backward. One block of a 150k vocabulary in float32 is 0.6 MB per position.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lit_rl.functional.plain_head import PlainHead
from lit_rl.functional.precision import product_dtype, promoted
from lit_rl.functional.slices import row_slices

BLOCK_BYTES = 96 * 2**20
"""Of the logits that exist at once where nobody asks for another number of positions: 512 positions of a
vocabulary of 49k in float32, 165 of one of 152k."""


class Head(NamedTuple):
    """What turns a hidden state into logits: `softcap * tanh(multiplier * (W h + b) / softcap)`.

    Attributes:
        weight: (V, H).
        bias: (V,) or None.
        multiplier: scale of the logits (Cohere, Granite).
        softcap: bound of the logits (Gemma), None = off.
    """

    weight: Tensor
    bias: Tensor | None = None
    multiplier: float = 1.0
    softcap: float | None = None

    @property
    def is_plain(self) -> bool:
        """Whether logits are `W h + b`."""
        return self.multiplier == 1.0 and self.softcap is None


def logits(hidden: Tensor, head: Head) -> Tensor:
    """(n, V) logits in float32 or better; the product itself runs in the model's dtype, as in the model.

    Args:
        hidden: (n, H).
        head: output head.
    """
    dtype = product_dtype(head.weight.dtype, hidden.device.type)
    inputs = (None if x is None else x.to(dtype) for x in (hidden, head.weight, head.bias))
    scores = promoted(_Product.apply(*inputs))
    if head.multiplier != 1.0:
        scores = scores * head.multiplier
    if head.softcap is not None:
        scores = head.softcap * torch.tanh(scores / head.softcap)
    return scores


def tempered(scores: Tensor, temperature: float) -> Tensor:
    """Logits in float32 or better, divided by the temperature."""
    scores = promoted(scores)
    return scores if temperature == 1.0 else scores / temperature


def log_softmax_(scores: Tensor) -> Tensor:
    """`scores.log_softmax(-1)` of (n, V) in their place, without gradient."""
    for rows in row_slices(scores):
        scores[rows] = scores[rows].log_softmax(-1)
    return scores


def logps_of_logits(scores: Tensor, targets: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Log-probability of each target, `log_softmax(scores / temperature)` at it.

    Args:
        scores: (..., V) logits.
        targets: (...) long, ids in [0, V).
        temperature: > 0.

    Returns:
        (...) float32 or better.
    """
    return at_targets(tempered(scores, temperature).log_softmax(-1), targets)


def entropy_of_logits(scores: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Entropy in nats. Shapes as in `logps_of_logits`."""
    return entropy_of_logps(tempered(scores, temperature).log_softmax(-1))


def at_targets(logps: Tensor, targets: Tensor) -> Tensor:
    """(...) the entries of (..., V) at the ids (...)."""
    return logps.gather(-1, targets.unsqueeze(-1)).squeeze(-1)


def entropy_of_logps(logps: Tensor) -> Tensor:
    """(...) entropy in nats of log-probabilities (..., V), `-sum_v p_v log p_v`."""
    if logps.requires_grad and torch.is_grad_enabled():
        return -(logps.exp() * logps).sum(-1)
    rows = logps.flatten(0, -2)  # (n, V)
    entropy = rows.new_empty(len(rows))
    for part in row_slices(rows):
        entropy[part] = -rows[part].exp().mul_(rows[part]).sum(-1)
    return entropy.unflatten(0, logps.shape[:-1])


def logps_and_entropy(scores: Tensor, ids: Tensor, *, with_entropy: bool = True) -> tuple[Tensor, Tensor]:
    """Log-probabilities of some entries of each distribution, and its entropy, from logits.

    Args:
        scores: (n, V) logits, float32 or better.
        ids: (n, K) long, in [0, V).
        with_entropy: compute the entropies.

    Returns:
        logps (n, K), and entropy (n,) in nats or (0,) without; both differentiable.
    """
    return _LogpsAndEntropy.apply(scores, ids, with_entropy)


def token_logps(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    chunk_tokens: int | None = None,
    with_entropy: bool = False,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of each target token, and the entropy of its distribution if asked for.

    Differentiable in the hidden states and in the head. In one piece when N <= chunk_tokens.

    Args:
        hidden: (N, H). The position that predicts each target.
        head: output head.
        targets: (N,) long.
        temperature: > 0. The logits are divided by it.
        chunk_tokens: >= 1. Positions whose logits exist at once; None is as many as `BLOCK_BYTES` hold.
        with_entropy: also return the entropies.
        entropy_gradient: let gradients through them.

    Returns:
        logps (N,), and entropy (N,) in nats or None; float32 or better, N = 0 included.
    """

    def of_chunk(hidden_chunk: Tensor, targets_chunk: Tensor) -> tuple[Tensor, ...]:
        scores = tempered(logits(hidden_chunk, head), temperature)  # (chunk, V)
        logps, entropy = logps_and_entropy(scores, targets_chunk[:, None], with_entropy=with_entropy)
        if not with_entropy:
            return (logps[:, 0],)
        return logps[:, 0], entropy if entropy_gradient else entropy.detach()

    size = positions_of_block(head) if chunk_tokens is None else chunk_tokens
    if head.is_plain and not entropy_gradient:
        inputs = [hidden, head.weight, head.bias]
        if not torch.is_grad_enabled():
            inputs = [None if tensor is None else tensor.detach() for tensor in inputs]
        logps, entropy = PlainHead.apply(*inputs, targets, temperature, size, with_entropy)
        return logps, entropy if with_entropy else None
    results = over_chunks(of_chunk, (hidden, targets), chunk_tokens=size)
    return results[0], results[1] if with_entropy else None


def positions_of_block(head: Head) -> int:
    """How many positions' logits `BLOCK_BYTES` hold in float32; at least one."""
    return max(BLOCK_BYTES // (4 * len(head.weight)), 1)


def over_chunks(
    function: Callable[..., tuple[Tensor, ...]], rows: tuple[Tensor, ...], *, chunk_tokens: int
) -> tuple[Tensor, ...]:
    """`function(*rows)` computed on chunks of rows and joined; a chunk is computed again in its backward.

    Args:
        function: row-wise; takes slices of the tensors in `rows`, returns a tuple of tensors of as many rows.
            What it closes over may require a gradient. It must not draw random numbers.
        rows: tensors of N rows each.
        chunk_tokens: >= 1. Rows of a chunk.

    Raises:
        ValueError: chunk_tokens is below 1.
    """
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be at least 1 (found {chunk_tokens!r}).")
    if rows[0].shape[0] <= chunk_tokens:
        return function(*rows)
    chunks = zip(*(tensor.split(chunk_tokens) for tensor in rows), strict=True)
    if torch.is_grad_enabled():
        parts = [checkpoint(function, *c, use_reentrant=False, preserve_rng_state=False) for c in chunks]
    else:
        parts = [function(*c) for c in chunks]
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))


class _LogpsAndEntropy(torch.autograd.Function):
    """`logps_and_entropy`, with one (n, V) tensor kept for the backward.

    With p the softmax of the scores z, y an entry and H the entropy: d log p_y / dz = onehot(y) - p and
    dH / dz = -p (log p + H).
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, ids: Tensor, with_entropy: bool) -> tuple[Tensor, Tensor]:
        every = scores.log_softmax(-1)
        entropy = entropy_of_logps(every) if with_entropy else every.new_zeros(0)
        ctx.save_for_backward(every, ids, entropy)
        ctx.set_materialize_grads(False)
        return every.gather(-1, ids), entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_logps: Tensor | None, of_entropy: Tensor | None) -> tuple[Tensor, None, None]:
        every, ids, entropy = ctx.saved_tensors
        weights = every.new_zeros(ids.shape) if of_logps is None else of_logps
        weight = weights.sum(-1, keepdim=True)
        if of_entropy is not None and len(entropy):
            of_all = (every + entropy[:, None]).mul_(of_entropy[:, None]).add_(weight)
            gradient = every.exp().mul_(of_all).neg_()
        else:
            gradient = every.exp().mul_(-weight)
        return gradient.scatter_add_(-1, ids, weights), None, None


class _Product(torch.autograd.Function):
    """`F.linear`, all in one dtype.

    The gradient of the weight is no view, so that autograd adds to it in place that of an embedding with the
    same weight; behind `F.linear` their sum takes a third tensor of that size.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return F.linear(hidden, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_scores: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        of_hidden, of_weight, of_bias = ctx.needs_input_grad
        return (
            of_scores @ weight if of_hidden else None,
            of_scores.t() @ hidden if of_weight else None,
            of_scores.sum(0) if of_bias else None,
        )
