"""Self-distillation: how far the student's next-token distribution is from the teacher's, per position.

Source: SDPO, arXiv 2601.20802; the divergence family: on-policy distillation (GKD), arXiv 2306.13649.
No gradient reaches the teacher.
"""

import math

import torch
from torch import Tensor

from lit_rl.functional.logps import Head, at_targets, logits, over_chunks, tempered
from lit_rl.functional.precision import promoted

LOG_RATIO_BOUND = 20.0
LOG_MASS_BOUND = -1e-7


def divergence(student_logps: Tensor, teacher_logps: Tensor, *, alpha: float) -> Tensor:
    """Divergence between two distributions over the same K entries.

        alpha = 0    KL(teacher || student), forward
        alpha = 1    KL(student || teacher), reverse
        between      (1 - alpha) KL(student || M) + alpha KL(teacher || M)
                     with M = (1 - alpha) student + alpha teacher

    alpha 0.5 is Jensen-Shannon, in [0, ln 2].

    Args:
        student_logps: (n, K) log-probabilities that sum to one.
        teacher_logps: (n, K) likewise; taken without gradient.
        alpha: in [0, 1].

    Returns:
        (n,) float32 or better.
    """
    student, teacher = promoted(student_logps), promoted(teacher_logps).detach()
    if alpha == 0:
        return _kl(teacher, student)
    if alpha == 1:
        return _kl(student, teacher)
    mixture = torch.logaddexp(student + math.log1p(-alpha), teacher + math.log(alpha))
    return (1 - alpha) * _kl(student, mixture) + alpha * _kl(teacher, mixture)


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
    student, support = promoted(student_logps).topk(min(topk, student_logps.shape[-1]), dim=-1)  # (n, K)
    teacher = promoted(teacher_logps).gather(-1, support)
    close = with_tail if add_tail else renormalized
    return divergence(close(student), close(teacher), alpha=alpha)


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


def trust_region_logits(ref_logits: Tensor, student_logits: Tensor, *, mix: float) -> Tensor:
    """Teacher as a mixture, `(1 - mix) * ref + mix * student`, of logits (..., V)."""
    return torch.lerp(promoted(ref_logits), promoted(student_logits), mix)


def chunked_divergence(
    student_hidden: Tensor,
    teacher_hidden: Tensor,
    student_head: Head,
    teacher_head: Head,
    *,
    alpha: float,
    topk: int | None = None,
    add_tail: bool = False,
    temperature: float = 1.0,
    chunk_tokens: int = 512,
) -> Tensor:
    """`divergence` or `topk_divergence` from hidden states, with the logits of one chunk at a time.

    A chunk's logits are computed again in its backward. No gradient reaches the teacher's side.

    Args:
        student_hidden: (N, H). The position that predicts each completion token, under the student's prompt.
        teacher_hidden: (N, H'). The same tokens under the teacher's prompt.
        student_head: output head of the student.
        teacher_head: output head of the teacher, same vocabulary.
        alpha: as in `divergence`.
        topk: entries of the student's top-k support, None = the whole vocabulary.
        add_tail: with topk, one bucket for the rest.
        temperature: > 0, of both.
        chunk_tokens: >= 1. Positions whose logits exist at once.

    Returns:
        (N,) float32 or better.
    """
    targets = torch.zeros(student_hidden.shape[0], dtype=torch.long, device=student_hidden.device)
    return chunked_divergence_and_logps(
        student_hidden,
        teacher_hidden,
        student_head,
        teacher_head,
        targets,
        alpha=alpha,
        topk=topk,
        add_tail=add_tail,
        temperature=temperature,
        chunk_tokens=chunk_tokens,
    )[0]


def chunked_divergence_and_logps(
    student_hidden: Tensor,
    teacher_hidden: Tensor,
    student_head: Head,
    teacher_head: Head,
    targets: Tensor,
    *,
    alpha: float,
    topk: int | None = None,
    add_tail: bool = False,
    temperature: float = 1.0,
    chunk_tokens: int = 512,
) -> tuple[Tensor, Tensor]:
    """`chunked_divergence`, and the student's log-probability of each target from the same logits.

    Args:
        targets: (N,) long, the sampled tokens. The others as in `chunked_divergence`.

    Returns:
        divergence (N,) and logps (N,), float32 or better, both differentiable.
    """

    def of_chunk(
        student_chunk: Tensor, teacher_chunk: Tensor, targets_chunk: Tensor
    ) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            teacher = tempered(logits(teacher_chunk, teacher_head), temperature).log_softmax(-1)
        student = tempered(logits(student_chunk, student_head), temperature).log_softmax(-1)
        if topk is None:
            gap = divergence(student, teacher, alpha=alpha)
        else:
            gap = topk_divergence(student, teacher, topk=topk, alpha=alpha, add_tail=add_tail)
        return gap, at_targets(student, targets_chunk)

    rows = (student_hidden, teacher_hidden, targets)
    gap, logps = over_chunks(of_chunk, rows, chunk_tokens=chunk_tokens)
    return gap, logps
