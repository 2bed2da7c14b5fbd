"""Divergences to the teacher: end points, top-k, tail, chunks, gradients."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_rl.functional import distillation as module
from lit_rl.functional import slices
from lit_rl.functional.distillation import (
    Source,
    divergence,
    importance_weight,
    renormalized,
    sampled_token_loss,
    source_logps,
    token_gaps,
    topk_divergence,
    trust_region_logits,
    with_tail,
)
from lit_rl.functional.logps import Head, entropy_of_logps, logits, token_logps

ALPHAS = [0.0, 0.5, 1.0]


def random_logps(seed: int, n: int = 7, v: int = 50, dtype: torch.dtype = torch.float64) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(n, v, generator=g, dtype=torch.float64)).to(dtype).log_softmax(-1)


def kl(p: Tensor, q: Tensor) -> Tensor:
    return (p.exp() * (p - q)).sum(-1)


@pytest.mark.field("sdpo/6")
def test_the_end_points_are_forward_and_reverse_kl() -> None:
    student, teacher = random_logps(0), random_logps(1)
    torch.testing.assert_close(divergence(student, teacher, alpha=0.0), kl(teacher, student))
    torch.testing.assert_close(divergence(student, teacher, alpha=1.0), kl(student, teacher))


@pytest.mark.field("sdpo/6")
def test_near_an_end_the_middle_form_shrinks_in_the_direction_of_that_end() -> None:
    """The documented jump: divided by its distance from the end, it is the KL of that end."""
    student, teacher = random_logps(0), random_logps(1)
    near = 1e-7
    forward = divergence(student, teacher, alpha=near) / near
    reverse = divergence(student, teacher, alpha=1 - near) / near
    torch.testing.assert_close(forward, kl(teacher, student), rtol=1e-3, atol=0)
    torch.testing.assert_close(reverse, kl(student, teacher), rtol=1e-3, atol=0)


def test_between_the_end_points_by_hand() -> None:
    p, q = torch.tensor([[0.9, 0.1]], dtype=torch.float64), torch.tensor([[0.2, 0.8]], dtype=torch.float64)
    mixture = (0.7 * p + 0.3 * q).log()  # alpha 0.3
    expected = 0.7 * kl(p.log(), mixture) + 0.3 * kl(q.log(), mixture)
    torch.testing.assert_close(divergence(p.log(), q.log(), alpha=0.3), expected)


@pytest.mark.field("sdpo/6")
@pytest.mark.parametrize("alpha", ALPHAS)
def test_the_whole_vocabulary_as_top_k_is_the_full_divergence(alpha: float) -> None:
    student, teacher = random_logps(0, dtype=torch.float32), random_logps(1, dtype=torch.float32)
    full = divergence(student, teacher, alpha=alpha)
    for topk in (50, 500):
        for add_tail in (True, False):
            cut = topk_divergence(student, teacher, topk=topk, alpha=alpha, add_tail=add_tail)
            torch.testing.assert_close(cut, full, rtol=1e-5, atol=1e-5)


@pytest.mark.field("sdpo/6")
@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("topk", [None, 1, 4, 50])
@pytest.mark.parametrize("add_tail", [True, False])
def test_an_equal_teacher_gives_zero(alpha: float, topk: int | None, add_tail: bool) -> None:
    student = random_logps(0, dtype=torch.float32)
    if topk is None:
        gap = divergence(student, student, alpha=alpha)
    else:
        gap = topk_divergence(student, student, topk=topk, alpha=alpha, add_tail=add_tail)
    assert gap.abs().max() < 1e-6


@pytest.mark.field("sdpo/6")
@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("student_is_peaked", [True, False])
def test_a_certain_token_with_a_tail_stays_finite(alpha: float, student_is_peaked: bool) -> None:
    peaked = torch.full((1, 50), math.log(1e-9 / 49))
    peaked[0, 3] = 0.0  # 1 - 1e-9, which float32 cannot tell from 1
    flat = random_logps(0, n=1, dtype=torch.float32)
    student = (peaked if student_is_peaked else flat).clone().requires_grad_()
    gap = topk_divergence(
        student.log_softmax(-1), flat if student_is_peaked else peaked, topk=1, alpha=alpha, add_tail=True
    )
    gradient = torch.autograd.grad(gap.sum(), student)[0]
    assert gap.isfinite().all() and gradient.isfinite().all() and bool((gap >= -1e-6).all())


@pytest.mark.field("sdpo/6")
def test_jensen_shannon_lies_between_zero_and_ln_2() -> None:
    student = 20 * torch.eye(4, dtype=torch.float64)
    teacher = student.roll(1, dims=0)
    gap = divergence(student.log_softmax(-1), teacher.log_softmax(-1), alpha=0.5)
    assert bool((gap >= 0).all()) and bool((gap <= math.log(2)).all()) and bool((gap > 0.69).all())


def test_the_support_is_the_students() -> None:
    student = torch.tensor([[0.6, 0.3, 0.1]]).log()
    teacher = torch.tensor([[0.1, 0.1, 0.8]]).log()
    # top 2 of the student: student (2/3, 1/3), teacher (1/2, 1/2)
    expected = 2 / 3 * math.log(4 / 3) + 1 / 3 * math.log(2 / 3)
    gap = topk_divergence(student, teacher, topk=2, alpha=1.0)
    assert gap.item() == pytest.approx(expected, rel=1e-5)
    with_rest = topk_divergence(student, teacher, topk=2, alpha=1.0, add_tail=True)
    expected = 0.6 * math.log(6) + 0.3 * math.log(3) + 0.1 * math.log(1 / 8)
    assert with_rest.item() == pytest.approx(expected, rel=1e-5)


def test_kept_mass_is_scaled_to_one_and_the_tail_fills_up_to_one() -> None:
    some = torch.tensor([[0.5, 0.2]], dtype=torch.float64).log()
    assert renormalized(some).exp().sum().item() == pytest.approx(1.0)
    assert with_tail(some).exp().tolist() == [[pytest.approx(0.5), pytest.approx(0.2), pytest.approx(0.3)]]


@pytest.mark.field("mem/5")
@pytest.mark.parametrize("alpha", ALPHAS)
def test_no_gradient_reaches_the_teacher(alpha: float) -> None:
    student, teacher = random_logps(0).requires_grad_(), random_logps(1).requires_grad_()
    divergence(student, teacher, alpha=alpha).sum().backward()
    assert teacher.grad is None and student.grad is not None and bool(student.grad.any())


def heads(v: int = 13, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Head, Head, Tensor]:
    g = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype).requires_grad_()

    student, teacher = draw(17, 4), draw(17, 6)
    return student, teacher, Head(draw(v, 4)), Head(draw(v, 6)), torch.randint(v, (17,), generator=g)


def gap(student: Tensor, teacher: Tensor, head: Head, teacher_head: Head, **settings: Any) -> Tensor:
    """Divergence of a student from one plain teacher, whatever was sampled."""
    targets = torch.zeros(len(student), dtype=torch.long)
    return token_gaps(student, head, [Source(teacher, teacher_head)], targets, **settings).divergence


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(("topk", "add_tail"), [(None, False), (3, False), (3, True)])
def test_chunks_give_the_plain_values_and_gradients(
    dtype: torch.dtype, alpha: float, topk: int | None, add_tail: bool
) -> None:
    student, teacher, student_head, teacher_head, targets = heads(dtype=dtype)
    results = []
    for chunk_tokens in (100, 5):
        found = token_gaps(
            student,
            student_head,
            [Source(teacher, teacher_head)],
            targets,
            alpha=alpha,
            topk=topk,
            add_tail=add_tail,
            temperature=0.7,
            chunk_tokens=chunk_tokens,
            entropy_gradient=True,
        )
        uneven = torch.linspace(-1, 1, 17, dtype=dtype)
        loss = found.divergence.mean() + (found.logps * uneven).mean() + (found.entropy * uneven).mean()
        results.append((*found, *torch.autograd.grad(loss, (student, student_head.weight))))
    for chunked, plain in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(chunked, plain, rtol=1e-6, atol=1e-6)
    logps, entropy = token_logps(student, student_head, targets, temperature=0.7, with_entropy=True)
    torch.testing.assert_close(results[1][1], logps)
    torch.testing.assert_close(results[1][2], entropy)


@pytest.mark.field("sdpo/8")
@pytest.mark.parametrize("alpha", [0.0, 0.4, 1.0])
def test_the_gradient_is_that_of_finite_differences(alpha: float) -> None:
    student, teacher, student_head, teacher_head, _ = heads(v=5)

    def function(hidden: Tensor, weight: Tensor) -> Tensor:
        return gap(
            hidden,
            teacher[:3],
            Head(weight),
            teacher_head,
            alpha=alpha,
            topk=3,
            add_tail=True,
            chunk_tokens=2,
        )

    student = student[:3].detach().requires_grad_()
    assert torch.autograd.gradcheck(function, (student, student_head.weight))


def test_the_teachers_side_stays_out_of_the_graph() -> None:
    student, teacher, student_head, teacher_head, _ = heads()
    for chunk_tokens in (5, 100):
        gap(
            student, teacher, student_head, teacher_head, alpha=0.5, chunk_tokens=chunk_tokens
        ).sum().backward()
    assert teacher.grad is None and teacher_head.weight.grad is None and student.grad is not None


def test_no_more_than_a_chunk_of_logits_exists_at_once(monkeypatch) -> None:
    seen = []

    def spy(hidden: Tensor, head: Head) -> Tensor:
        seen.append(hidden.shape[0])
        return logits(hidden, head)

    monkeypatch.setattr(module, "logits", spy)
    student, teacher, student_head, teacher_head, _ = heads()
    gap(student, teacher, student_head, teacher_head, alpha=0.5, chunk_tokens=6)
    assert seen == [6, 6, 6, 6, 5, 5]  # teacher and student of each chunk


def test_no_tokens_give_an_empty_result_in_the_graph() -> None:
    student, teacher, student_head, teacher_head, _ = heads()
    empty = gap(student[:0], teacher[:0], student_head, teacher_head, alpha=0.5, topk=3)
    empty.sum().backward()
    assert empty.shape == (0,) and student_head.weight.grad is not None and not student_head.weight.grad.any()


def test_the_sampled_token_has_the_gradient_of_reverse_kl_in_expectation() -> None:
    theta = torch.tensor([0.5, 0.3, -0.9], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([-0.2, 0.6, 0.1], dtype=torch.float64).log_softmax(-1)
    logps = theta.log_softmax(-1)
    over_samples = (logps.exp().detach() * sampled_token_loss(logps, teacher)).sum()
    exact = divergence(logps[None], teacher[None], alpha=1.0).sum()
    sampled = torch.autograd.grad(over_samples, theta, retain_graph=True)[0]
    torch.testing.assert_close(sampled, torch.autograd.grad(exact, theta)[0])


def test_the_importance_weight_is_capped_detached_and_finite() -> None:
    logps = torch.tensor([[0.5, 0.0, -900.0, 900.0]], requires_grad=True)
    weight = importance_weight(logps, torch.zeros(1, 4), 1.5)
    assert weight.tolist() == [[1.5, 1.0, pytest.approx(math.exp(-20.0)), 1.5]]
    assert not weight.requires_grad


def test_the_trust_region_teacher_mixes_logits() -> None:
    ref, student = torch.tensor([[0.0, 4.0]]), torch.tensor([[2.0, 0.0]])
    assert trust_region_logits(ref, student, mix=0.25).tolist() == [[0.5, 3.0]]


def test_a_teacher_of_two_models_has_their_mixed_logits() -> None:
    student, teacher, student_head, teacher_head, targets = heads()
    sources = [Source(teacher, teacher_head, 0.75), Source(student.detach(), student_head, 0.25)]
    mixed = trust_region_logits(logits(teacher, teacher_head), logits(student, student_head), mix=0.25)
    expected = (mixed / 0.7).log_softmax(-1)
    own = (logits(student, student_head) / 0.7).log_softmax(-1)
    for chunk_tokens in (100, 5):
        settings = {"temperature": 0.7, "chunk_tokens": chunk_tokens}
        found = token_gaps(student, student_head, sources, targets, alpha=1.0, **settings)
        torch.testing.assert_close(found.divergence, kl(own, expected))
        logps = source_logps(sources, targets, **settings)
        torch.testing.assert_close(logps, expected.gather(1, targets[:, None])[:, 0])
        assert not logps.requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_promoted(dtype: torch.dtype) -> None:
    student, teacher = random_logps(0).to(dtype), random_logps(1).to(dtype)
    for result in (
        divergence(student, teacher, alpha=0.5),
        topk_divergence(student, teacher, topk=3, alpha=0.5, add_tail=True),
        sampled_token_loss(student, teacher),
        importance_weight(student, teacher, 2.0),
    ):
        assert result.dtype == torch.float32


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("elements", [1, 14, 2**21])
def test_gradients_are_those_of_finite_differences_however_rows_are_sliced(
    alpha: float, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slices, "_ELEMENTS", elements)
    generator = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(5, 7, generator=generator, dtype=torch.float64) for _ in range(2))
    teacher = teacher.log_softmax(-1)

    def gaps(scores: Tensor) -> tuple[Tensor, Tensor]:
        logps = scores.log_softmax(-1)
        cut = topk_divergence(logps, teacher, topk=3, alpha=alpha, add_tail=True)
        return divergence(logps, teacher, alpha=alpha), cut

    assert torch.autograd.gradcheck(gaps, (student.requires_grad_(),))
    logps = student.detach().log_softmax(-1)
    torch.testing.assert_close(entropy_of_logps(logps), -(logps.exp() * logps).sum(-1))
