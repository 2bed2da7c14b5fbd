"""Token log-probabilities: the chunked form is the plain one, and never holds all logits."""

import math

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lit_rl.functional.logps import Head, entropy_of_logits, logits, logps_of_logits, over_chunks, token_logps


def make(
    n: int = 23, h: int = 6, v: int = 11, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(n, h, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(v, h, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(v, (n,), generator=g)


@pytest.mark.field("num/9")
def test_log_probabilities_are_taken_at_the_temperature() -> None:
    # softmax([4, 2, 0])[0] = 1 / (1 + e^-2 + e^-4); logits [2, 1, 0] over temperature 0.5
    expected = -math.log(1 + math.exp(-2) + math.exp(-4))
    assert expected == pytest.approx(-0.1429, abs=1e-4)
    scores = torch.tensor([[2.0, 1.0, 0.0]], dtype=torch.float64)
    assert logps_of_logits(scores, torch.tensor([0]), temperature=0.5).item() == pytest.approx(
        expected, rel=1e-6
    )
    by_head, _ = token_logps(
        scores, Head(torch.eye(3, dtype=torch.float64)), torch.tensor([0]), temperature=0.5
    )
    assert by_head.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("chunk_tokens", [1, 5, 22])
def test_chunks_give_the_plain_values_and_gradients(dtype: torch.dtype, chunk_tokens: int) -> None:
    hidden, weight, targets = make(dtype=dtype)
    bias = torch.linspace(-1, 1, 11, dtype=dtype).requires_grad_()
    head = Head(weight, bias, multiplier=0.7, softcap=5.0)
    results = []
    for size in (100, chunk_tokens):
        logps, entropy = token_logps(
            hidden,
            head,
            targets,
            temperature=0.8,
            chunk_tokens=size,
            with_entropy=True,
            entropy_gradient=True,
        )
        assert entropy is not None
        loss = (logps * torch.linspace(0, 1, 23, dtype=dtype)).mean() + entropy.mean()
        results.append((logps, entropy, *torch.autograd.grad(loss, (hidden, weight, bias))))
    for chunked, plain in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(chunked, plain, rtol=1e-6, atol=1e-6)


def test_the_gradient_is_that_of_finite_differences() -> None:
    hidden, weight, targets = make(n=4, h=3, v=5)

    def function(h: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        logps, entropy = token_logps(
            h, Head(w, softcap=3.0), targets, chunk_tokens=3, with_entropy=True, entropy_gradient=True
        )
        assert entropy is not None
        return logps, entropy

    assert torch.autograd.gradcheck(function, (hidden, weight))


def products_with_the_vocabulary(hidden: Tensor, weight: Tensor, targets: Tensor) -> list[int]:
    """Rows of each product that makes logits, forward and backward."""

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func.overloadpacket is torch.ops.aten.mm and out.shape[1] == len(weight):
                rows.append(len(out))
            return out

    rows: list[int] = []
    with Products():
        logps, _ = token_logps(hidden, Head(weight), targets, chunk_tokens=4, with_entropy=True)
        if logps.requires_grad:
            logps.sum().backward()
    return rows


def test_no_more_than_a_chunk_of_logits_exists_at_once() -> None:
    hidden, weight, targets = make()
    once = [4, 4, 4, 4, 4, 3]
    assert products_with_the_vocabulary(hidden, weight, targets) == once * 2
    with torch.no_grad():
        assert products_with_the_vocabulary(hidden, weight, targets) == once
    few = products_with_the_vocabulary(hidden[:3], weight, targets[:3])
    assert few == [3]  # one chunk: what its gradients need is kept
    half = [tensor.detach().bfloat16().requires_grad_() for tensor in (hidden, weight)]
    assert products_with_the_vocabulary(half[0][:8], half[1], targets[:8]) == [4, 4]  # as large as one chunk
    assert products_with_the_vocabulary(half[0][:9], half[1], targets[:9]) == [4, 4, 1] * 2


@pytest.mark.parametrize("rows", [3, 8, 9, 23])
def test_in_16_bits_what_is_kept_or_computed_again_is_the_same(rows: int) -> None:
    hidden, weight, targets = make()
    found = []
    for chunk_tokens in (rows, 4):
        inputs = [tensor.detach().bfloat16().requires_grad_() for tensor in (hidden[:rows], weight)]
        logps, _ = token_logps(inputs[0], Head(inputs[1]), targets[:rows], chunk_tokens=chunk_tokens)
        logps.sum().backward()
        found.append([logps.detach(), *(tensor.grad.float() for tensor in inputs)])
    torch.testing.assert_close(*found, atol=0.05, rtol=0.02)


def test_a_frozen_head_makes_its_logits_once() -> None:
    hidden, weight, targets = make()
    frozen = weight.detach()
    assert products_with_the_vocabulary(hidden, frozen, targets) == [4, 4, 4, 4, 4, 3]
    found = torch.autograd.grad(token_logps(hidden, Head(frozen), targets, chunk_tokens=4)[0].sum(), hidden)
    wanted = torch.autograd.grad(logps_of_logits(hidden @ frozen.T, targets).sum(), hidden)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("is_trained", [True, False])
@pytest.mark.parametrize("chunk_tokens", [5, 100])
def test_a_plain_head_has_the_gradient_of_the_plain_formula(chunk_tokens: int, is_trained: bool) -> None:
    hidden, weight, targets = make()
    bias = torch.linspace(-1, 1, 11, dtype=torch.float64).requires_grad_(is_trained)
    weight = weight.detach().requires_grad_(is_trained)
    inputs = (hidden, weight, bias) if is_trained else (hidden,)
    factors = torch.linspace(-1, 2, 23, dtype=torch.float64)
    head = Head(weight, bias)
    logps, entropy = token_logps(
        hidden, head, targets, temperature=0.7, chunk_tokens=chunk_tokens, with_entropy=True
    )
    scores = logits(hidden, head)
    plain = logps_of_logits(scores, targets, temperature=0.7)
    torch.testing.assert_close(logps, plain)
    torch.testing.assert_close(entropy, entropy_of_logits(scores, temperature=0.7))
    assert entropy is not None and not entropy.requires_grad
    found = torch.autograd.grad((logps * factors).sum(), inputs)
    torch.testing.assert_close(found, torch.autograd.grad((plain * factors).sum(), inputs))


@pytest.mark.parametrize("chunk_tokens", [5, 100])
def test_under_autocast_the_product_runs_in_its_dtype(chunk_tokens: int) -> None:
    hidden, weight, targets = make(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logps, _ = token_logps(hidden, Head(weight), targets, chunk_tokens=chunk_tokens)
    found = torch.autograd.grad(logps.sum(), (hidden, weight))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = logps_of_logits(torch.nn.functional.linear(hidden, weight).float(), targets)
    torch.testing.assert_close(logps, plain)
    for ours, wanted in zip(found, torch.autograd.grad(plain.sum(), (hidden, weight)), strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, wanted, rtol=2e-2, atol=2e-2)


def test_logits_saved_for_backward_stay_below_the_vocabulary() -> None:
    hidden, weight, targets = make(n=40, v=64)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t.shape), t)[1], lambda t: t):
        token_logps(hidden, Head(weight), targets, chunk_tokens=8)
    assert all(shape[-1:] != (64,) for shape in saved if len(shape) == 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_promoted_before_the_softmax(dtype: torch.dtype) -> None:
    hidden, weight, targets = make(dtype=dtype)
    logps, _ = token_logps(hidden, Head(weight), targets)
    product = torch.nn.functional.linear(hidden, weight)
    assert logps.dtype == torch.float32
    torch.testing.assert_close(logps, logps_of_logits(product.float(), targets))
    assert logps_of_logits(product.double(), targets).dtype == torch.float64


def test_entropy_of_equal_logits_is_the_log_of_their_number() -> None:
    assert entropy_of_logits(torch.zeros(1, 8)).item() == pytest.approx(math.log(8), rel=1e-6)


def test_no_tokens_give_an_empty_result_in_the_graph() -> None:
    hidden, weight, _ = make(n=0)
    logps, entropy = token_logps(hidden, Head(weight), torch.zeros(0, dtype=torch.long), with_entropy=True)
    assert logps.shape == (0,) and entropy is not None and entropy.shape == (0,)
    logps.sum().backward()
    assert weight.grad is not None and not weight.grad.any()


def test_a_chunk_below_one_token_is_refused() -> None:
    with pytest.raises(ValueError, match="chunk_tokens must be at least 1"):
        over_chunks(lambda x: (x,), (torch.zeros(3),), chunk_tokens=0)
