"""Log-probabilities behind a plain linear head, with gradients written by hand.

All chunks of positions share buffers for their logits, which the backward pass computes again. Where what the
gradients need of all of them takes no more memory than one chunk's logits in float32, it is kept instead. A
head without gradient, as with adapters, needs neither: the direction of each hidden state's gradient is taken
in the forward pass, its length later.
"""

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lit_rl.functional.precision import product_dtype
from lit_rl.functional.slices import row_slices


class PlainHead(torch.autograd.Function):
    """`log_softmax((W h + b) / temperature)` at the target, and the entropy of that distribution.

    With p the softmax, y the target, e = p - onehot(y) and c the gradient of the log-probability over the
    temperature, the gradient of the hidden state h is -c e W and that of the weight the sum of -e^T (c h):
    nothing of the vocabulary's size is multiplied by c. The entropy has no gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk: int,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities (N,) and entropies (N,), or (0,) without; float32 or better.

        Args:
            ctx: of autograd.
            hidden: (N, H).
            weight: (V, H).
            bias: (V,) or None.
            targets: (N,) long.
            temperature: > 0.
            chunk: positions whose logits exist at once.
            with_entropy: compute them.
        """
        of_hidden, of_head = ctx.needs_input_grad[0], any(ctx.needs_input_grad[1:3])
        dtype = product_dtype(weight.dtype, weight.device.type)
        block = chunk * torch.promote_types(dtype, torch.float32).itemsize
        keeps = of_head and 0 < len(hidden) * dtype.itemsize <= block
        logits = _Logits(hidden, weight, bias, temperature, chunk, dtype, keeps=keeps)
        logps = logits.new(len(hidden))
        entropy = logits.new(len(hidden) if with_entropy else 0)
        directions = torch.empty_like(hidden) if of_hidden and not of_head else None
        for part in logits.parts():
            shifted = logits.shifted(part)
            chosen = shifted.gather(-1, targets[part, None])
            if with_entropy:
                total, weighted = _sums(shifted)
                entropy[part] = (total.log() - weighted / total)[:, 0]
            if not with_entropy or directions is not None or keeps:
                weights = shifted.exp_()
                total = weights.sum(-1, keepdim=True)
            logps[part] = (chosen - total.log())[:, 0]
            if directions is not None or keeps:
                error = logits.error(weights.div_(total), part, targets)
            if directions is not None:
                directions[part] = logits.of_hidden(error) / -temperature
        ctx.save_for_backward(hidden, weight, bias, targets, directions, logits.products if keeps else None)
        ctx.temperature, ctx.chunk, ctx.dtype = temperature, chunk, dtype
        ctx.mark_non_differentiable(entropy)
        return logps, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_logps: Tensor, of_entropy: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of hidden states, weight and bias."""
        hidden, weight, bias, targets, directions, kept = ctx.saved_tensors
        if directions is not None:
            return directions * of_logps[:, None].to(directions.dtype), *[None] * 7
        if not any(ctx.needs_input_grad[:3]):
            return (None,) * 8
        logits = _Logits(hidden, weight, bias, ctx.temperature, ctx.chunk, ctx.dtype)
        factors = (of_logps / -ctx.temperature)[:, None]  # (N, 1)
        of_hidden, of_weight = torch.empty_like(hidden), None
        of_bias = None if bias is None else torch.zeros_like(bias, dtype=logits.precision)
        for part in logits.parts():
            if kept is None:
                weights = logits.shifted(part).exp_()
                error = logits.error(weights.div_(weights.sum(-1, keepdim=True)), part, targets)
            else:
                error = kept[part]
            of_hidden[part] = logits.of_hidden(error) * factors[part]
            of_weight = _added(of_weight, error, hidden[part] * factors[part])
            if of_bias is not None:
                of_bias += (error.t() @ factors[part].to(error.dtype))[:, 0]
        if of_weight is None:
            of_weight = torch.zeros_like(weight)
        return (
            of_hidden if ctx.needs_input_grad[0] else None,
            of_weight.to(weight.dtype) if ctx.needs_input_grad[1] else None,
            of_bias.to(bias.dtype) if of_bias is not None and ctx.needs_input_grad[2] else None,
            *[None] * 5,
        )


def _added(of_weight: Tensor | None, error: Tensor, hidden: Tensor) -> Tensor:
    """(V, H) in float32 or better, with error^T (V, n) times hidden (n, H) added; None is zero."""
    if of_weight is None:
        product = error.t() @ hidden.to(error.dtype)
        return product.to(torch.promote_types(error.dtype, torch.float32))
    if of_weight.dtype == error.dtype:
        return of_weight.addmm_(error.t(), hidden.to(error.dtype))
    return of_weight.add_(error.t() @ hidden.to(error.dtype))


def _sums(shifted: Tensor) -> tuple[Tensor, Tensor]:
    """(n, 1) sums of exp(z) and of z exp(z) over the vocabulary, a few rows at a time."""
    total, weighted = (shifted.new_empty(len(shifted), 1) for _ in range(2))
    for rows in row_slices(shifted):
        weights = shifted[rows].exp()
        total[rows] = weights.sum(-1, keepdim=True)
        weighted[rows] = weights.mul_(shifted[rows]).sum(-1, keepdim=True)
    return total, weighted


class _Logits:
    """Scaled logits of chunks, in buffers that are used again.

    Args:
        hidden: (N, H).
        weight: (V, H).
        bias: (V,) or None.
        temperature: > 0.
        chunk: positions at once.
        dtype: that products are computed in.
        keeps: every chunk has a place of its own for its products.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        temperature: float,
        chunk: int,
        dtype: torch.dtype,
        *,
        keeps: bool = False,
    ) -> None:
        self._temperature, self._chunk, self._keeps = temperature, chunk, keeps
        self.hidden, self.weight = hidden.to(dtype), weight.to(dtype)
        self._bias = None if bias is None else bias.to(dtype)
        self.precision = torch.promote_types(dtype, torch.float32)

    @cached_property
    def products(self) -> Tensor:
        """(N, V) where chunks keep theirs, else of one chunk."""
        rows = len(self.hidden) if self._keeps else min(self._chunk, len(self.hidden))
        return self.weight.new_empty(rows, len(self.weight))

    @cached_property
    def _precise(self) -> Tensor:
        """The buffer for logits that are more precise than their products."""
        shape = min(self._chunk, len(self.hidden)), len(self.weight)
        return self.weight.new_empty(shape, dtype=self.precision)

    def _product(self, part: slice) -> Tensor:
        return self.products[part if self._keeps else slice(0, part.stop - part.start)]

    def new(self, rows: int) -> Tensor:
        """(rows,) in the precision of the results."""
        return self.weight.new_empty(rows, dtype=self.precision)

    def parts(self) -> Iterator[slice]:
        """The chunks."""
        for start in range(0, len(self.hidden), self._chunk):
            yield slice(start, min(start + self._chunk, len(self.hidden)))

    def shifted(self, part: slice) -> Tensor:
        """(n, V) logits less the greatest of their row; to be changed in place."""
        shifted = product = self._product(part)
        torch.mm(self.hidden[part], self.weight.t(), out=product)
        if self._bias is not None:
            product += self._bias
        if product.dtype != self.precision:
            shifted = self._precise[: len(product)].copy_(product)
        if self._temperature != 1.0:
            shifted /= self._temperature
        shifted -= shifted.amax(-1, keepdim=True)
        return shifted

    def error(self, probabilities: Tensor, part: slice, targets: Tensor) -> Tensor:
        """(n, V) p - onehot(y) in the products' dtype, in the place of the chunk's products.

        Args:
            probabilities: (n, V), made of what `shifted` gave for this chunk.
            part: the chunk.
            targets: (N,) long.
        """
        rows = targets[part, None]
        probabilities.scatter_add_(-1, rows, torch.full_like(rows, -1, dtype=probabilities.dtype))
        if probabilities.dtype == self.weight.dtype:
            return probabilities
        return self._product(part).copy_(probabilities)

    def of_hidden(self, error: Tensor) -> Tensor:
        """(n, H) the error (n, V) times the weight."""
        return error @ self.weight
