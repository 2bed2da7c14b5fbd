"""Divergence over the teacher's own top entries."""

import math

import pytest
import torch

from lit_rl.functional.distillation import Source, divergence, token_gaps
from lit_rl.functional.logps import Head
from lit_rl.functional.teacher_support import TopEntries, support_gaps

N, H, V = 7, 5, 11


@pytest.fixture
def parts() -> tuple[torch.Tensor, torch.Tensor, Head, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    return draw(N, H), draw(N, H), Head(draw(V, H)), torch.randint(0, V, (N,), generator=generator)


def entries(teacher: torch.Tensor, head: Head, k: int) -> TopEntries:
    top = (teacher @ head.weight.T).log_softmax(-1).topk(k, dim=-1)
    return TopEntries(top.indices, top.values)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("chunk_tokens", [2, 512])
def test_all_entries_are_the_whole_vocabulary(parts, alpha: float, chunk_tokens: int) -> None:
    student, teacher, head, targets = parts
    student.requires_grad_()
    local = token_gaps(student, head, [Source(teacher, head)], targets, alpha=alpha)
    by_entries = support_gaps(
        student, head, entries(teacher, head, V), targets, alpha=alpha, chunk_tokens=chunk_tokens
    )
    for found, right in zip(by_entries, local, strict=True):
        torch.testing.assert_close(found, right)
    gradients = [torch.autograd.grad(gaps.divergence.sum(), student)[0] for gaps in (by_entries, local)]
    torch.testing.assert_close(*gradients)


def test_a_case_by_hand() -> None:
    """Student (1/2, 1/4, 1/4), teacher (1/4, 3/4, 0): on its two entries the student is (1/3, 2/3)."""
    head = Head(torch.eye(3))
    student = torch.tensor([[0.5, 0.25, 0.25]]).log()
    teacher = TopEntries(torch.tensor([[1, 0]]), torch.tensor([[0.75, 0.25]]).log())
    gaps = support_gaps(student, head, teacher, torch.tensor([2]), alpha=1.0)
    assert gaps.divergence.item() == pytest.approx(
        1 / 3 * math.log((1 / 3) / 0.75) + 2 / 3 * math.log((2 / 3) / 0.25)
    )
    assert gaps.logps.item() == pytest.approx(math.log(0.25))


def test_a_tail_holds_the_rest_of_both() -> None:
    """Student (0.4, 0.3, 0.2, 0.1), teacher (0.1, 0.6, 0.2, 0.1)."""
    head = Head(torch.eye(4, dtype=torch.float64))
    ours = torch.tensor([[0.4, 0.3, 0.2, 0.1]], dtype=torch.float64)
    top = TopEntries(torch.tensor([[1, 2]]), torch.tensor([[0.6, 0.2]], dtype=torch.float64).log())
    found = support_gaps(ours.log(), head, top, torch.tensor([0]), alpha=0.0, add_tail=True).divergence
    right = divergence(
        torch.tensor([[0.3, 0.2, 0.5]], dtype=torch.float64).log(),
        torch.tensor([[0.6, 0.2, 0.2]], dtype=torch.float64).log(),
        alpha=0.0,
    )
    torch.testing.assert_close(found, right)
