"""What full-vocabulary distillation keeps: a few blocks of (chunk, V), however many tokens there are."""

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from lit_rl.functional import slices
from lit_rl.functional.distillation import Source, divergence, token_gaps, topk_divergence
from lit_rl.functional.logps import Head, at_targets, entropy_of_logps, token_logps

VOCABULARY, HIDDEN, CHUNK = 4000, 8, 16


class Allocations(TorchDispatchMode):
    """Follows every tensor that an operation makes, by its storage, until it is freed.

    Attributes:
        largest: numbers in the largest storage.
        peak: numbers in all storages alive at once, at most.
    """

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.peak = self._alive = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, Tensor):
                self._follow(tensor)
        return out

    def _follow(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes() // tensor.element_size()
        if key in self._known:
            return
        self._known.add(key)
        self._alive += size
        self.largest, self.peak = max(self.largest, size), max(self.peak, self._alive)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._alive -= size


def parts(tokens: int) -> tuple[Tensor, Head, list[Source], Tensor]:
    g = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    student, weight = draw(tokens, HIDDEN).requires_grad_(), draw(VOCABULARY, HIDDEN).requires_grad_()
    teacher = [Source(draw(tokens, HIDDEN), Head(draw(VOCABULARY, HIDDEN)), share) for share in (0.4, 0.6)]
    return student, Head(weight), teacher, torch.randint(VOCABULARY, (tokens,), generator=g)


def measured(tokens: int, topk: int | None) -> Allocations:
    student, head, teacher, targets = parts(tokens)
    with Allocations() as allocations:
        settings = {"alpha": 0.5, "topk": topk, "add_tail": topk is not None, "chunk_tokens": CHUNK}
        gaps = token_gaps(student, head, teacher, targets, **settings)
        (gaps.divergence.sum() + gaps.logps.sum()).backward()
    return allocations


@pytest.mark.parametrize("topk", [None, 50])
def test_the_peak_is_a_few_chunks_of_logits_however_many_tokens_there_are(topk: int | None) -> None:
    few, many = measured(4 * CHUNK, topk), measured(32 * CHUNK, topk)
    block = CHUNK * VOCABULARY
    assert block <= many.largest == few.largest < 2 * block
    grown = many.peak - few.peak  # hidden states and results alone, a few numbers per token
    assert grown < 10 * HIDDEN * 28 * CHUNK < block
    assert many.peak < 20 * block


def test_a_top_k_keeps_one_block_for_its_entries_and_the_sampled_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three at once: the teacher's, the student's logits, and their logarithms or the gradient."""
    monkeypatch.setattr(slices, "_ELEMENTS", VOCABULARY)
    tokens = 4 * CHUNK
    student, head, (source, _), targets = parts(tokens)
    head, sources = Head(head.weight.detach()), [source._replace(share=1.0)]
    with Allocations() as allocations:
        gaps = token_gaps(student, head, sources, targets, alpha=1.0, topk=50, add_tail=True)
        (gaps.divergence.sum() + gaps.logps.sum()).backward()
    assert student.grad is not None
    assert 3 < allocations.peak / (tokens * VOCABULARY) < 3.5


def test_the_gradient_of_a_head_can_be_added_to_in_place() -> None:
    """Autograd does that to tensors that are no views."""
    student, head, teacher, targets = parts(CHUNK)
    seen: list[Tensor] = []
    head.weight.register_hook(seen.append)
    token_gaps(student, head, teacher, targets, alpha=1.0).divergence.sum().backward()
    (gradient,) = seen
    assert not gradient._is_view() and gradient.is_contiguous()


def test_so_is_that_of_log_probabilities_with_an_entropy_to_look_at() -> None:
    def peak(tokens: int) -> int:
        student, head, _, targets = parts(tokens)
        with Allocations() as allocations:
            logps, entropy = token_logps(student, head, targets, chunk_tokens=CHUNK, with_entropy=True)
            logps.sum().backward()
        assert entropy is not None and not entropy.requires_grad
        return allocations.peak

    assert peak(32 * CHUNK) - peak(4 * CHUNK) < CHUNK * VOCABULARY


def test_one_chunk_of_everything_is_seen_by_the_meter() -> None:
    student, head, teacher, targets = parts(4 * CHUNK)
    with Allocations() as allocations:
        gaps = token_gaps(student, head, teacher, targets, alpha=0.5, chunk_tokens=4 * CHUNK)
        gaps.divergence.sum().backward()
    assert allocations.largest >= 4 * CHUNK * VOCABULARY


@pytest.mark.parametrize(("topk", "add_tail"), [(None, False), (50, True), (50, False)])
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_chunks_have_the_gradients_of_the_plain_form(alpha: float, topk: int | None, add_tail: bool) -> None:
    student, head, teacher, targets = parts(3 * CHUNK + 5)
    gaps = token_gaps(
        student,
        head,
        teacher,
        targets,
        alpha=alpha,
        topk=topk,
        add_tail=add_tail,
        chunk_tokens=CHUNK,
        entropy_gradient=True,
    )
    ours = (student @ head.weight.T).log_softmax(-1)
    theirs = sum(source.share * source.hidden @ source.head.weight.T for source in teacher)
    assert isinstance(theirs, Tensor)
    theirs = theirs.log_softmax(-1)
    plain = (
        divergence(ours, theirs, alpha=alpha)
        if topk is None
        else topk_divergence(ours, theirs, topk=topk, alpha=alpha, add_tail=add_tail)
    )
    expected = (plain, at_targets(ours, targets), entropy_of_logps(ours))
    weights = torch.linspace(-1, 1, len(targets), dtype=torch.float64)
    for found, wanted in zip(gaps, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
        leaves = (student, head.weight)
        ours_grad = torch.autograd.grad((found * weights).sum(), leaves, retain_graph=True)
        plain_grad = torch.autograd.grad((wanted * weights).sum(), leaves, retain_graph=True)
        for a, b in zip(ours_grad, plain_grad, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
