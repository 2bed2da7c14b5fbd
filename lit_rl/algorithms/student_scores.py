"""One pass of the student beside the teacher: what both losses of SDPO are made of."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn

from lit_rl.batch import RolloutBatch
from lit_rl.functional.distillation import Source
from lit_rl.functional.logps import token_logps
from lit_rl.functional.teacher_support import TopEntries
from lit_rl.models.score import Rows, completion_hidden, head_of, rows_of
from lit_rl.objectives.distillation import Distillation


class StudentScores(NamedTuple):
    """The student's side of a micro-batch.

    Attributes:
        logps: (B, T) of the sampled tokens.
        entropy: (B, T) in nats.
        loss: (B, T) distillation loss per token; 0 in rows that have no teacher.
        divergence: (B, T) from the teacher, without gradient; of the sampled token alone, its log-ratio.
    """

    logps: Tensor
    entropy: Tensor
    loss: Tensor
    divergence: Tensor


def teacher_rows(rows: RolloutBatch) -> Rows:
    """The same completions under the teacher's prompts."""
    assert rows.teacher_prompt_ids is not None and rows.teacher_prompt_len is not None
    return rows_of(rows)._replace(
        prompt_ids=rows.teacher_prompt_ids,
        prompt_len=rows.teacher_prompt_len,
        images=rows.teacher_images,
    )


def top_entries(rows: RolloutBatch) -> TopEntries:
    """What an engine reported of the teacher at the completion tokens of the rows that have one."""
    assert rows.teacher_top_ids is not None and rows.teacher_top_logps is not None
    assert rows.self_distillation_mask is not None
    taught = rows.token_mask & rows.self_distillation_mask[:, None]  # (B, T)
    return TopEntries(rows.teacher_top_ids[taught], rows.teacher_top_logps[taught])


def logit_scores(
    policy: nn.Module,
    rows: RolloutBatch,
    teacher: Sequence[Source] | TopEntries,
    distillation: Distillation,
    temperature: float,
    *,
    entropy_gradient: bool = False,
) -> StudentScores:
    """Student against teacher over the vocabulary or its top entries, in one forward pass of the student.

    Args:
        policy: the student.
        rows: with `self_distillation_mask`.
        teacher: at the completion tokens of the rows that have a teacher.
        distillation: what is compared.
        temperature: divides all logits.
        entropy_gradient: let gradients through the entropy too.
    """
    assert rows.completion_ids is not None and rows.self_distillation_mask is not None
    hidden, head = completion_hidden(policy, rows_of(rows)), head_of(policy)
    taught = rows.token_mask & rows.self_distillation_mask[:, None]  # (B, T)
    untaught = rows.token_mask & ~taught
    is_taught, targets = taught[rows.token_mask], rows.completion_ids[rows.token_mask]  # (N,)
    gaps = distillation.gaps(
        hidden[is_taught],
        head,
        teacher,
        targets[is_taught],
        temperature,
        entropy_gradient=entropy_gradient,
    )
    logps, entropy = token_logps(
        hidden[~is_taught],
        head,
        targets[~is_taught],
        temperature=temperature,
        with_entropy=True,
        entropy_gradient=entropy_gradient,
    )
    assert entropy is not None
    divergence = at_tokens(taught, gaps.divergence)
    return StudentScores(
        at_tokens(taught, gaps.logps) + at_tokens(untaught, logps),
        at_tokens(taught, gaps.entropy) + at_tokens(untaught, entropy),
        divergence,
        divergence.detach(),
    )


def at_tokens(mask: Tensor, flat: Tensor) -> Tensor:
    """(B, T) with N values at the true places, row by row, and 0 elsewhere."""
    return flat.new_zeros(mask.shape).masked_scatter(mask, flat)
