"""Log-probabilities over a wide vocabulary: what exists at once is bounded, and nothing else changes."""

import pytest
import torch
from torch import Tensor

from lit_rl.functional.logps import Head, token_logps
from lit_rl.memory import TensorMemory

V, H, N = 151_665, 16, 512
BLOCK = N * V * 2  # bytes of the batch's logits in bfloat16


@pytest.fixture(scope="module")
def wide() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, H, generator=generator).bfloat16() for n in (N, V))
    return hidden, weight, torch.randint(V, (N,), generator=generator)


@pytest.mark.field("mem/1")
def test_a_pass_without_gradients_holds_less_than_two_blocks(wide) -> None:
    hidden, weight, targets = wide
    with torch.no_grad(), TensorMemory() as memory:
        logps, entropy = token_logps(hidden, Head(weight), targets, with_entropy=True)
    assert memory.peak < 2 * BLOCK
    rows = slice(0, N, 16)
    every = (hidden[rows] @ weight.T).double().log_softmax(-1)
    torch.testing.assert_close(
        logps[rows].double(), every.gather(1, targets[rows, None])[:, 0], rtol=0, atol=1e-5
    )
    torch.testing.assert_close(entropy[rows].double(), -(every.exp() * every).sum(1), rtol=0, atol=1e-5)


@pytest.mark.field("mem/1")
def test_forward_and_backward_hold_no_more_than_a_chunk_needs(wide) -> None:
    hidden, weight, targets = (tensor.clone() for tensor in wide)
    peaks = []
    for chunk_tokens in (32, 64):
        hidden.requires_grad_().grad = None
        with TensorMemory() as memory:
            logps, _ = token_logps(hidden, Head(weight), targets, chunk_tokens=chunk_tokens)
            (-logps.mean()).backward()
        peaks.append(memory.peak)
    assert peaks[1] < 1.3 * BLOCK and peaks[0] < 0.6 * peaks[1]
