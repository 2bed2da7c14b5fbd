"""Self-distillation: how far the student's next-token distribution is from the teacher's, per position.

Source: SDPO, arXiv 2601.20802; the divergence family: on-policy distillation (GKD), arXiv 2306.13649.
No gradient reaches the teacher.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lit_rl.functional.logps import (
    Head,
    at_targets,
    entropy_of_logps,
    log_softmax_,
    logits,
    logps_and_entropy,
    logps_of_logits,
    over_chunks,
    tempered,
)
from lit_rl.functional.precision import promoted
from lit_rl.functional.slices import row_slices

LOG_RATIO_BOUND = 20.0
LOG_MASS_BOUND = -1e-7


def divergence(student_logps: Tensor, teacher_logps: Tensor, *, alpha: float) -> Tensor:
    """Divergence between two distributions over the same K entries.

        alpha = 0    KL(teacher || student), forward
        alpha = 1    KL(student || teacher), reverse
        between      (1 - alpha) KL(student || M) + alpha KL(teacher || M)
                     with M = (1 - alpha) student + alpha teacher

    alpha 0.5 is Jensen-Shannon, in [0, ln 2]. The family jumps at its ends, as in GKD and in both public
    SDPO codes: near 0 the middle form shrinks as alpha KL(teacher || student), near 1 as
    (1 - alpha) KL(student || teacher). Its direction tends to that of the end, its size to zero, so an alpha
    close to an end wants a larger learning rate or the end itself.

    Args:
        student_logps: (n, K) log-probabilities that sum to one.
        teacher_logps: (n, K) likewise; taken without gradient.
        alpha: in [0, 1].

    Returns:
        (n,) float32 or better.
    """
    return _Divergence.apply(promoted(student_logps), promoted(teacher_logps).detach(), alpha)


class _Divergence(torch.autograd.Function):
    """`divergence` of (n, K) float32 or better, which keeps nothing beside its arguments for the backward.

    With s and t the log-probabilities of student and teacher and m of their mixture, the gradient in s is
    -exp(t) for alpha 0, exp(s) (s - t + 1) for alpha 1, and (1 - alpha) exp(s) (s - m) between.
    """

    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor, alpha: float) -> Tensor:
        """(n,) values."""
        ctx.save_for_backward(student, teacher)
        ctx.alpha = alpha
        value = student.new_empty(len(student))
        for rows in row_slices(student):
            s, t = student[rows], teacher[rows]
            if alpha == 0:
                value[rows] = _kl(t, s)
            elif alpha == 1:
                value[rows] = _kl(s, t)
            else:
                m = _mixture(s, t, alpha)
                value[rows] = (1 - alpha) * _kl(s, m) + alpha * _kl(t, m)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_value: Tensor) -> tuple[Tensor, None, None]:
        """The student's gradient, (n, K)."""
        (student, teacher), alpha = ctx.saved_tensors, ctx.alpha
        gradient = torch.empty_like(student)
        for rows in row_slices(student):
            s, t = student[rows], teacher[rows]
            if alpha == 0:
                of_rows = -t.exp()
            elif alpha == 1:
                of_rows = s.exp().mul_(s - t + 1)
            else:
                of_rows = (1 - alpha) * s.exp().mul_(s - _mixture(s, t, alpha))
            torch.mul(of_rows, of_value[rows, None], out=gradient[rows])
        return gradient, None, None


def _mixture(student: Tensor, teacher: Tensor, alpha: float) -> Tensor:
    return torch.logaddexp(student + math.log1p(-alpha), teacher + math.log(alpha))


def _kl(logps: Tensor, other_logps: Tensor) -> Tensor:
    return (logps.exp() * (logps - other_logps)).sum(-1)


def topk_divergence(
    student_logps: Tensor, teacher_logps: Tensor, *, topk: int, alpha: float, add_tail: bool = False
) -> Tensor:
    """Divergence on the student's `topk` most likely tokens.

    Args:
        student_logps: (n, V) log-probabilities of the whole vocabulary.
        teacher_logps: (n, V) likewise; taken without gradient.
        topk: >= 1, capped at V.
        alpha: as in `divergence`.
        add_tail: True: one more entry holds the mass of all other tokens. False: the kept mass is scaled up.

    Returns:
        (n,) float32 or better.
    """
    student, teacher = promoted(student_logps), promoted(teacher_logps)
    support = top_ids(student, topk)
    return divergence_of_entries(
        student.gather(-1, support), teacher.gather(-1, support), alpha=alpha, add_tail=add_tail
    )


def divergence_of_entries(
    student_logps: Tensor, teacher_logps: Tensor, *, alpha: float, add_tail: bool = False
) -> Tensor:
    """Divergence on some entries of the vocabulary, the same of student and teacher.

    Args:
        student_logps: (n, K) their log-probabilities, float32 or better.
        teacher_logps: (n, K) likewise; taken without gradient.
        alpha: as in `divergence`.
        add_tail: as in `topk_divergence`.

    Returns:
        (n,) float32 or better.
    """
    close = with_tail if add_tail else renormalized
    return divergence(close(student_logps), close(teacher_logps.detach()), alpha=alpha)


def top_ids(scores: Tensor, topk: int) -> Tensor:
    """(n, K) ids of the largest of (n, V) logits or log-probabilities, K at most V."""
    return scores.detach().topk(min(topk, scores.shape[-1]), dim=-1).indices


def renormalized(logps: Tensor) -> Tensor:
    """(n, K) log-probabilities of some entries, scaled so that they sum to one."""
    return logps - logps.logsumexp(-1, keepdim=True)


def with_tail(logps: Tensor) -> Tensor:
    """(n, K + 1): log-probabilities of some entries, and that of all the others together.

    The log of the kept mass is held at -1e-7 or below, so a tail of nothing counts as 1e-7, without gradient.
    """
    mass = logps.logsumexp(-1, keepdim=True).clamp(max=LOG_MASS_BOUND)
    return torch.cat([logps, torch.log(-torch.expm1(mass))], dim=-1)


def sampled_token_loss(logps: Tensor, teacher_logps: Tensor) -> Tensor:
    """Reverse KL by the sampled token alone: its log-ratio, detached, times its log-probability.

    Its gradient equals that of KL(student || teacher) in expectation over the student's samples; its value
    does not estimate the KL.

    Args:
        logps: (B, T) of the student.
        teacher_logps: (B, T) of the teacher on the same tokens.

    Returns:
        (B, T) float32 or better.
    """
    logps, teacher_logps = promoted(logps), promoted(teacher_logps)
    return (logps - teacher_logps).detach() * logps


def importance_weight(logps: Tensor, old_logps: Tensor, clip: float) -> Tensor:
    """Ratio of the current to the sampling policy, capped: a weight without gradient for a loss per token.

    The log-ratio is clamped to +-20 before the exponential.

    Args:
        logps: (B, T) now.
        old_logps: (B, T) at generation.
        clip: upper bound of the weight.

    Returns:
        (B, T) float32 or better, in (0, clip].
    """
    difference = (promoted(logps) - promoted(old_logps)).detach()
    return difference.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp().clamp(max=clip)


class Source(NamedTuple):
    """One model's part in the teacher: its logits count with its share, and the parts add up.

    Attributes:
        hidden: (N, H). The position that predicts each completion token, under the teacher's prompt.
        head: output head of that model.
        share: weight of its logits. One source of share 1 is a plain teacher.
    """

    hidden: Tensor
    head: Head
    share: float = 1.0


class TokenGaps(NamedTuple):
    """What `token_gaps` finds at each of N completion tokens, differentiable in the student.

    Attributes:
        divergence: (N,) of the student's next-token distribution from the teacher's.
        logps: (N,) log-probability of the sampled token under the student.
        entropy: (N,) of the student's distribution, in nats; without gradient unless asked for.
    """

    divergence: Tensor
    logps: Tensor
    entropy: Tensor


def trust_region_logits(ref_logits: Tensor, student_logits: Tensor, *, mix: float) -> Tensor:
    """Teacher as a mixture, `(1 - mix) * ref + mix * student`, of logits (..., V)."""
    return mixed_logits([ref_logits, student_logits], [1 - mix, mix])


def mixed_logits(parts: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    """(..., V) sum of shares times logits, in float32 or better; probabilities mix geometrically."""
    first, *others = (
        promoted(scores) if share == 1.0 else share * promoted(scores)
        for scores, share in zip(parts, shares, strict=True)
    )
    return sum(others, first)


def token_gaps(
    student_hidden: Tensor,
    student_head: Head,
    teacher: Sequence[Source],
    targets: Tensor,
    *,
    alpha: float,
    topk: int | None = None,
    add_tail: bool = False,
    temperature: float = 1.0,
    chunk_tokens: int = 512,
    entropy_gradient: bool = False,
) -> TokenGaps:
    """`divergence` or `topk_divergence` from hidden states, with the logits of one chunk at a time.

    A chunk's logits are computed again in its backward, so that of student and teacher together only a few
    blocks of (chunk_tokens, V) exist, whatever N is. No gradient reaches the teacher's side.

    Args:
        student_hidden: (N, H). The position that predicts each completion token, under the student's prompt.
        student_head: output head of the student.
        teacher: what the teacher is made of, on the same N tokens and with the same vocabulary.
        targets: (N,) long, the sampled tokens.
        alpha: as in `divergence`.
        topk: entries of the student's top-k support, None = the whole vocabulary.
        add_tail: with topk, one bucket for the rest.
        temperature: > 0, of both.
        chunk_tokens: >= 1. Positions whose logits exist at once.
        entropy_gradient: as in `logps.token_logps`.
    """
    heads, shares = [source.head for source in teacher], [source.share for source in teacher]

    def of_chunk(student_chunk: Tensor, targets_chunk: Tensor, *teacher_chunks: Tensor) -> TokenGaps:
        with torch.no_grad():
            theirs = log_softmax_(tempered(_mixture_of(teacher_chunks, heads, shares), temperature))
        scores = tempered(logits(student_chunk, student_head), temperature)
        if topk is None:
            ours = scores.log_softmax(-1)
            gap = divergence(ours, theirs, alpha=alpha)
            logps = at_targets(ours, targets_chunk)
            entropy = entropy_of_logps(ours if entropy_gradient else ours.detach())
        else:
            support = top_ids(scores, topk)
            ours, entropy = logps_and_entropy(scores, torch.cat([support, targets_chunk[:, None]], -1))
            theirs = theirs.gather(-1, support)
            gap = divergence_of_entries(ours[:, :-1], theirs, alpha=alpha, add_tail=add_tail)
            logps = ours[:, -1]
        return TokenGaps(gap, logps, entropy if entropy_gradient else entropy.detach())

    rows = (student_hidden, targets, *(source.hidden for source in teacher))
    return TokenGaps(*over_chunks(of_chunk, rows, chunk_tokens=chunk_tokens))


def _mixture_of(chunks: Sequence[Tensor], heads: Sequence[Head], shares: Sequence[float]) -> Tensor:
    """(n, V) the teacher's logits."""
    return mixed_logits([logits(chunk, head) for chunk, head in zip(chunks, heads, strict=True)], shares)


@torch.no_grad()
def source_logps(
    teacher: Sequence[Source], targets: Tensor, *, temperature: float = 1.0, chunk_tokens: int = 512
) -> Tensor:
    """(N,) log-probability of each target under the teacher, without gradient. Arguments as above."""
    heads, shares = [source.head for source in teacher], [source.share for source in teacher]

    def of_chunk(targets_chunk: Tensor, *chunks: Tensor) -> tuple[Tensor]:
        scores = _mixture_of(chunks, heads, shares)
        return (logps_of_logits(scores, targets_chunk, temperature=temperature),)

    rows = (targets, *(source.hidden for source in teacher))
    return over_chunks(of_chunk, rows, chunk_tokens=chunk_tokens)[0]
