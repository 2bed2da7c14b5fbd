"""Adapters: masked statistics, log-probabilities, KL, averages and schedules."""

from typing import Any

import torch
from golden_parts import gradient, leaf, mask_of, tensor, verl_mean

from lit_rl.functional import kl as kls
from lit_rl.functional import masking
from lit_rl.functional.distillation import trust_region_logits
from lit_rl.functional.ema import lerp_
from lit_rl.functional.logps import Head, entropy_of_logits, logps_of_logits, token_logps
from lit_rl.functional.schedules import lr_multiplier, weight_decay


def masked_stats(case: dict[str, Any]) -> dict[str, Any]:
    values, mask = tensor(case["inputs"]["values"]), mask_of(case["inputs"]["mask"])
    return {
        "masked_sum": masking.masked_sum(values, mask),
        "masked_sum_axis1": masking.masked_sum(values, mask, dim=1),
        "masked_mean": masking.masked_mean(values, mask),
        "masked_mean_axis1": masking.masked_mean(values, mask, dim=1),
        "masked_var_unbiased": masking.masked_var(values, mask),
        "masked_var_biased": masking.masked_var(values, mask, unbiased=False),
        "masked_whiten": masking.masked_whiten(values, mask),
        "masked_whiten_no_shift": masking.masked_whiten(values, mask, shift_mean=False),
    }


def entropy_logprobs(case: dict[str, Any]) -> dict[str, Any]:
    inputs = case["inputs"]
    scores, labels = leaf(inputs["logits"]), torch.tensor(inputs["labels"])
    head = Head(torch.eye(scores.shape[-1], dtype=torch.float64))
    flat = token_logps(
        scores.flatten(0, -2),
        head,
        labels.flatten(),
        chunk_tokens=5,
        with_entropy=True,
        entropy_gradient=True,
    )
    logps, entropy = (part.view(labels.shape) for part in flat if part is not None)
    torch.testing.assert_close(logps, logps_of_logits(scores, labels))
    torch.testing.assert_close(entropy, entropy_of_logits(scores))
    result = {"token_logprobs": logps, "entropy": entropy}
    if "mask" not in inputs:
        return {**result, "grad_of_logprob_sum_wrt_logits": gradient(logps.sum(), scores)}
    mask = mask_of(inputs["mask"])
    modes = case["expected"]["entropy_loss"]
    return {
        **result,
        "entropy_loss": {mode: verl_mean(entropy, mask, mode) for mode in modes},
        "grad_of_masked_entropy_sum_wrt_logits": gradient((entropy * mask).sum(), scores),
        "grad_of_masked_logprob_sum_wrt_logits": gradient((logps * mask).sum(), scores),
    }


ALIASES = {"k1": "kl", "k2": "mse", "k3": "low_var_kl", "k1+": "kl+", "k2+": "mse+", "k3+": "low_var_kl+"}


def kl_penalty(case: dict[str, Any]) -> dict[str, Any]:
    inputs, kind = case["inputs"], case["kind"]
    if kind == "full":
        return _full_kl(inputs)
    logps, ref_logps, mask = leaf(inputs["log_prob"]), tensor(inputs["ref_log_prob"]), inputs["response_mask"]
    value = kls.ESTIMATORS[ALIASES.get(kind, kind)](logps, ref_logps)
    total = masking.masked_sum(value, mask_of(mask))
    if case["peer"].startswith("OpenRLHF"):
        value = value.clamp(-10, 10)  # of every estimator; ours clamps k3 alone
    return {"kl": value, "grad_of_masked_sum_wrt_log_prob": gradient(total, logps)}


def _full_kl(inputs: dict[str, Any]) -> dict[str, Any]:
    scores, ref = leaf(inputs["logits"]), tensor(inputs["ref_logits"])
    forward = kls.full_kl(scores.log_softmax(-1), ref.log_softmax(-1))
    backward = kls.full_kl(ref.log_softmax(-1), scores.log_softmax(-1))
    return {
        "kl_policy_to_ref": forward,
        "kl_ref_to_policy": backward,
        "grad_of_sum_policy_to_ref_wrt_logits": gradient(forward.sum(), scores),
        "grad_of_sum_ref_to_policy_wrt_logits": gradient(backward.sum(), scores),
    }


def kl_controllers(case: dict[str, Any]) -> dict[str, Any]:
    inputs, params = case["inputs"], case["params"]
    if case["kind"] == "kl_in_reward":
        return _kl_in_reward(inputs, params)
    if case["kind"] == "fixed":
        return {"value_after_each_update": [params["kl_coef"]] * len(inputs["current_kl"])}
    coef, values, rows = params["init_kl_coef"], [], inputs["n_steps"]
    rows = rows if isinstance(rows, list) else [rows] * len(inputs["current_kl"])
    for current, n in zip(inputs["current_kl"], rows, strict=True):
        settings = {"target_kl": params["target_kl"], "horizon": params["horizon"], "rows": n}
        coef = kls.adapted_coef(coef, current, **settings)
        values.append(coef)
    return {"value_after_each_update": values}


def _kl_in_reward(inputs: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
    mask, coef = mask_of(inputs["response_mask"]), params["init_kl_coef"]
    penalty = kls.ESTIMATORS[params["kl_penalty"]](
        tensor(inputs["old_log_prob"]), tensor(inputs["ref_log_prob"])
    )
    current = float(masking.masked_mean(penalty, mask, dim=-1).mean())
    settings = {"target_kl": params["target_kl"], "horizon": params["horizon"], "rows": mask.shape[0]}
    return {
        "token_level_rewards": kls.kl_in_reward(
            tensor(inputs["token_level_scores"]), penalty, mask, coef=coef
        ),
        "current_kl": current,
        "coef_used": coef,
        "coef_after": kls.adapted_coef(coef, current, **settings),
    }


def ema_update(case: dict[str, Any]) -> dict[str, Any]:
    inputs, params = case["inputs"], case["params"]
    if case["kind"] == "trust_region_logits":
        ref, student = tensor(inputs["ref_logits"]), tensor(inputs["student_logits"])
        return {"teacher_logits": trust_region_logits(ref, student, mix=params["mix_coef"])}
    rate = params.get("alpha", params.get("teacher_update_rate"))
    students = inputs["student_after_each_update"]
    names = list(students[0]) if isinstance(students[0], dict) else list(range(len(students[0])))
    start = inputs.get("initial_teacher")
    first = students[0] if start is None else start
    teacher = [tensor(first[name]) * (start is not None) for name in names]  # adapters start from zeros
    after = []
    for update, student in enumerate(students, start=1):
        if update % params["sync_every"] == 0:
            lerp_(teacher, [tensor(student[name]) for name in names], rate)
        values = [value.clone() for value in teacher]
        after.append(dict(zip(names, values, strict=True)) if isinstance(student, dict) else values)
    return {"teacher_after_each_update": after}


def lr_schedules(case: dict[str, Any]) -> dict[str, Any]:
    return {"verl": _verl, "Megatron-core": _megatron, "transformers": _transformers}[case["peer"]](case)


def _verl(case: dict[str, Any]) -> dict[str, Any]:
    params, steps = case["params"], len(case["expected"]["lr_multiplier_by_step"])
    warmup, total = params["num_warmup_steps"], params.get("num_training_steps", steps)
    settings = {"lr_scheduler_type": case["schedule"], "total_steps": total, "warmup_steps": warmup}
    settings["min_ratio"] = params.get("min_lr_ratio", 0.0)
    settings["num_cycles"] = params.get("num_cycles", 0.5)
    settings["warmup_init_ratio"] = params.get("init_lr_ratio") or 0.0
    if case["schedule"] == "wsd":
        stable = int((total - warmup) * params["stable_ratio"])
        settings |= {"wsd_decay_style": "cosine", "wsd_decay_steps": total - warmup - stable}
    return {"lr_multiplier_by_step": [lr_multiplier(step, **settings) for step in range(steps)]}


def _megatron(case: dict[str, Any]) -> dict[str, Any]:
    params, steps = case["params"], len(case["expected"]["lr_by_step"])
    peak = params["max_lr"]
    settings = {
        "lr_scheduler_type": params["lr_decay_style"].replace("-", "_").lower(),
        "total_steps": params["lr_decay_steps"],
        "warmup_steps": params["lr_warmup_steps"],
        "warmup_init_ratio": params["init_lr"] / peak,
        "min_ratio": params["min_lr"] / peak,
    }
    if "lr_wsd_decay_style" in params:
        style = params["lr_wsd_decay_style"]
        settings |= {"wsd_decay_style": style, "wsd_decay_steps": params["wsd_decay_steps"]}
    decay = {"style": params["wd_incr_style"], "start": params["start_wd"], "end": params["end_wd"]}
    decay["total_steps"] = params["wd_incr_steps"]
    return {
        "lr_by_step": [peak * lr_multiplier(step, **settings) for step in range(steps)],
        "weight_decay_by_step": [weight_decay(step, **decay) for step in range(steps)],
    }


TRANSFORMERS = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "warmup_stable_decay": "wsd",
}


def _transformers(case: dict[str, Any]) -> dict[str, Any]:
    params, steps = case["params"], len(case["expected"]["lr_by_step"])
    settings = {
        "lr_scheduler_type": TRANSFORMERS[case["schedule"]],
        "total_steps": params["num_training_steps"],
        "warmup_steps": params["num_warmup_steps"],
        "num_cycles": params.get("num_cycles", 0.5),
        "min_ratio": params.get("min_lr_rate", params.get("min_lr_ratio", 0.0)),
    }
    if case["schedule"] == "warmup_stable_decay":
        style = {"1-sqrt": "minus_sqrt"}.get(
            params.get("decay_type", "cosine"), params.get("decay_type", "cosine")
        )
        settings |= {"wsd_decay_style": style, "wsd_decay_steps": params["num_decay_steps"]}
        settings["warmup_init_ratio"] = settings["min_ratio"]  # its warm-up starts from the minimum
    return {"lr_by_step": [params["base_lr"] * lr_multiplier(step, **settings) for step in range(steps)]}
