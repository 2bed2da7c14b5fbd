"""Adapters: divergences and whole losses of self-distillation, from logits.

The logits play the hidden states of a head that is the identity, so the chunked functions are what is tested.
"""

from typing import Any

import torch
from golden_losses import trl_policy_loss
from golden_parts import gradient, leaf, mask_of, tensor, totals, verl_mean
from torch import Tensor

from lit_rl.functional import distillation as ours
from lit_rl.functional.logps import Head, logps_of_logits
from lit_rl.functional.masking import aggregate
from lit_rl.objectives.distillation import Distillation

CHUNK_TOKENS = 7
OFFICIAL = {"token-mean": "active_tokens", "seq-mean-token-mean": "active_rows"}
"""Averages of the authors' code that `distillation_divisor` offers, by their name there."""


def token_divergence(
    student: Tensor, teacher: Tensor, *, alpha: float, topk: int | None, add_tail: bool
) -> Tensor:
    """(B, T) from logits (B, T, V)."""
    head = Head(torch.eye(student.shape[-1], dtype=torch.float64))
    hidden = student.flatten(0, -2)
    flat = ours.token_gaps(
        hidden,
        head,
        [ours.Source(teacher.flatten(0, -2), head)],
        torch.zeros(len(hidden), dtype=torch.long),
        alpha=alpha,
        topk=topk,
        add_tail=add_tail,
        chunk_tokens=CHUNK_TOKENS,
    )
    return flat.divergence.view(student.shape[:-1])


def divergence(case: dict[str, Any]) -> dict[str, Any]:
    inputs, params = case["inputs"], case["params"]
    if "is_clip" in params:
        weight = ours.importance_weight(
            tensor(inputs["student_log_probs"]), tensor(inputs["old_log_prob"]), params["is_clip"]
        )
        return {"per_token": tensor(inputs["per_token_loss"]) * weight}
    student, teacher = leaf(inputs["student_logits"]), tensor(inputs["teacher_logits"])
    if params.get("sampled_token"):
        targets = torch.tensor(inputs["completion_ids"])
        per_token = ours.sampled_token_loss(
            logps_of_logits(student, targets), logps_of_logits(teacher, targets)
        )
    else:
        per_token = token_divergence(
            student,
            teacher,
            alpha=params["alpha"],
            topk=params.get("topk"),
            add_tail=bool(params.get("add_tail")),
        )
    return {"per_token": per_token, "grad_of_sum_student_logits": gradient(per_token.sum(), student)}


def trl(case: dict[str, Any]) -> dict[str, Any]:
    inputs, params = case["inputs"], case["params"]
    student, teacher = leaf(inputs["student_logits"]), tensor(inputs["teacher_logits"])
    targets, mask = torch.tensor(inputs["completion_ids"]), mask_of(inputs["completion_mask"])
    logps = logps_of_logits(student, targets)
    active = mask & mask_of(inputs["self_distillation_mask"]).unsqueeze(-1)
    old_logps = tensor(inputs["old_log_prob"]) if "old_log_prob" in inputs else None
    per_token = _per_token(params, student, teacher, targets, logps)
    peer = Distillation(distillation_is_clip=params["distillation_is_clip"], distillation_divisor="all_rows")
    per_token = per_token * peer.importance(logps, old_logps)
    loss = peer.mean(per_token, active, totals(active, rows=active.shape[0]))
    weight = params["distillation_weight"]
    logged = aggregate(per_token, active, mode="token_mean", totals=totals(active)).unsqueeze(0)
    result = {"logged_distillation_loss": logged if weight > 0 else []}
    if weight < 1:
        policy_inputs = {"num_items_in_batch": int(mask.sum()), **inputs}
        before = logps.detach() if old_logps is None else old_logps
        policy = trl_policy_loss(params["loss_type"], params, logps, before, policy_inputs, mask)
        loss = (1 - weight) * policy + weight * loss
    return {**result, "loss": loss, "grad_student_logits": gradient(loss, student)}


def _per_token(params: dict, student: Tensor, teacher: Tensor, targets: Tensor, logps: Tensor) -> Tensor:
    mode = params["distillation_mode"]
    if mode == "sampled_token":
        return ours.sampled_token_loss(logps, logps_of_logits(teacher, targets))
    topk = params["distillation_topk"] if mode == "topk_logits" else None
    tail = bool(params.get("distillation_add_tail"))
    return token_divergence(student, teacher, alpha=params["distillation_alpha"], topk=topk, add_tail=tail)


def official(case: dict[str, Any]) -> dict[str, Any]:
    inputs, params = case["inputs"], case["params"]
    student, teacher = leaf(inputs["student_logits"]), tensor(inputs["teacher_logits"])
    targets, mask = torch.tensor(inputs["completion_ids"]), mask_of(inputs["completion_mask"])
    logps = logps_of_logits(student, targets)
    if params["full_logit_distillation"]:
        topk, tail = params.get("distillation_topk"), bool(params.get("distillation_add_tail"))
        per_token = token_divergence(student, teacher, alpha=params["alpha"], topk=topk, add_tail=tail)
    else:
        per_token = ours.sampled_token_loss(logps, logps_of_logits(teacher, targets))
    old_logps = tensor(inputs["old_log_prob"]) if "old_log_prob" in inputs else None
    settings = Distillation(
        distillation_is_clip=params["is_clip"],
        distillation_divisor=OFFICIAL.get(params["loss_agg_mode"], "active_tokens"),
    )
    per_token = per_token * settings.importance(logps, old_logps)
    if "rollout_is_weights" in inputs:
        per_token = per_token * tensor(inputs["rollout_is_weights"])
    active = mask
    if "self_distillation_mask" in inputs:
        active = mask & mask_of(inputs["self_distillation_mask"]).unsqueeze(-1)
    if params["loss_agg_mode"] in OFFICIAL:
        loss = settings.mean(per_token, active, totals(active))
    else:
        loss = verl_mean(per_token, active, params["loss_agg_mode"])
    return {"loss": loss, "grad_student_logits": gradient(loss, student)}
