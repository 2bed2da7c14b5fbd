"""Self-distillation over the teacher's own top entries, where the teacher is known by nothing else.

Source: TRL SDPO, "teacher from the vLLM server". The local form, over the student's entries, is in
`distillation`; with a teacher close to the student the two sets nearly agree.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lit_rl.functional.distillation import TokenGaps, divergence_of_entries
from lit_rl.functional.logps import Head, logits, logps_and_entropy, over_chunks, tempered


class TopEntries(NamedTuple):
    """The most likely tokens of the teacher at each of N positions.

    Attributes:
        ids: (N, K) long.
        logps: (N, K) log-probabilities over the whole vocabulary.
    """

    ids: Tensor
    logps: Tensor


def support_gaps(
    student_hidden: Tensor,
    student_head: Head,
    teacher: TopEntries,
    targets: Tensor,
    *,
    alpha: float,
    add_tail: bool = False,
    temperature: float = 1.0,
    chunk_tokens: int = 512,
    entropy_gradient: bool = False,
) -> TokenGaps:
    """Divergence on the teacher's entries, with the student's logits of one chunk at a time.

    Args:
        student_hidden: (N, H). The position that predicts each completion token, under the student's prompt.
        student_head: output head of the student.
        teacher: its entries at the same N tokens; taken without gradient.
        targets: (N,) long, the sampled tokens.
        alpha: as in `divergence`.
        add_tail: True: one more entry holds the mass of all other tokens. False: the kept mass is scaled up.
        temperature: > 0, of the student.
        chunk_tokens: >= 1. Positions whose logits exist at once.
        entropy_gradient: as in `logps.token_logps`.
    """

    def of_chunk(hidden: Tensor, ids: Tensor, logps: Tensor, tokens: Tensor) -> TokenGaps:
        scores = tempered(logits(hidden, student_head), temperature)
        ours, entropy = logps_and_entropy(scores, torch.cat([ids, tokens[:, None]], -1))
        theirs = logps.to(ours.dtype)
        gap = divergence_of_entries(ours[:, :-1], theirs, alpha=alpha, add_tail=add_tail)
        return TokenGaps(gap, ours[:, -1], entropy if entropy_gradient else entropy.detach())

    rows = (student_hidden, teacher.ids, teacher.logps, targets)
    return TokenGaps(*over_chunks(of_chunk, rows, chunk_tokens=chunk_tokens))
