"""Adapters: policy losses of verl, TRL and OpenRLHF, their aggregation, and the value loss."""

import math
from typing import Any

import torch
from golden_parts import MODES, gradient, leaf, mask_of, tensor, totals, verl_mean
from torch import Tensor

from lit_rl.functional import importance, kl
from lit_rl.functional import policy_loss as ours
from lit_rl.functional.masking import aggregate, masked_mean


def aggregation(case: dict[str, Any]) -> dict[str, Any]:
    params, mask = case["params"], mask_of(case["inputs"]["loss_mask"])
    values = leaf(case["inputs"]["loss_mat"])
    mode, ranks = case["mode"], params.get("dp_size", 1)
    if mode == "seq-mean-token-sum-norm":  # divides by the width alone, and is not corrected for the ranks
        divisors, ranks = totals(mask, rows=1, length=params.get("loss_scale_factor")), 1
    else:
        divisors = totals(mask, rows=params.get("global_batch_size"), tokens=params.get("batch_num_tokens"))
    loss = ranks * aggregate(values, mask, mode=MODES[mode], totals=divisors)
    return {"loss": loss, "grad": gradient(loss, values)}


def verl(case: dict[str, Any]) -> dict[str, Any]:
    inputs, params = case["inputs"], case["params"]
    mask, logps = mask_of(inputs["response_mask"]), leaf(inputs["log_prob"])
    old_logps, advantages = tensor(inputs["old_log_prob"]), tensor(inputs["advantages"])
    weights = tensor(inputs["rollout_is_weights"]) if "rollout_is_weights" in inputs else None
    return VERL[case["loss_mode"]](params, logps, old_logps, advantages, mask, weights)


def _clip(params: dict) -> dict[str, float]:
    return {"epsilon": params["clip_ratio_low"], "epsilon_high": params["clip_ratio_high"]}


def _result(per_token: Tensor, mask: Tensor, mode: str, logps: Tensor, **metrics: Tensor) -> dict[str, Any]:
    loss = verl_mean(per_token, mask, mode)
    return {"loss": loss, "grad_log_prob": gradient(loss, logps), "metrics": metrics}


def _weighted(per_token: Tensor, weights: Tensor | None) -> Tensor:
    return per_token if weights is None else per_token * weights


def _vanilla(params, logps, old_logps, advantages, mask, weights) -> dict[str, Any]:
    ratio = ours.log_ratio(logps, old_logps, mask)
    loss = ours.clipped_surrogate(ratio, advantages, **_clip(params), dual_clip=params["clip_ratio_c"])
    clipped = ours.clip_fraction(ratio, advantages, mask, **_clip(params))
    metrics = {"actor/pg_clipfrac": clipped, "actor/ppo_kl": -masked_mean(ratio, mask)}
    result = _result(_weighted(loss, weights), mask, params["loss_agg_mode"], logps)
    return {**result, "metrics": metrics}


def _gspo(params, logps, old_logps, advantages, mask, weights) -> dict[str, Any]:
    ratio = ours.sequence_log_ratio_at_tokens(logps, old_logps, mask, bound=10.0)
    loss = ours.clipped_surrogate(ratio, advantages, **_clip(params))
    return _result(_weighted(loss, weights), mask, "seq-mean-token-mean", logps)


def _sapo(params, logps, old_logps, advantages, mask, weights) -> dict[str, Any]:
    ratio = ours.log_ratio(logps, old_logps, mask)
    loss = ours.sapo(ratio, advantages, tau_pos=params["tau_pos"], tau_neg=params["tau_neg"])
    return _result(loss, mask, "seq-mean-token-mean", logps)


def _cispo(params, logps, old_logps, advantages, mask, weights) -> dict[str, Any]:
    ratio = ours.log_ratio(logps, old_logps, mask)
    bounds = {"low": 1 - params["clip_ratio_low"], "high": 1 + params["clip_ratio_high"]}
    loss = ours.cispo(ratio, logps, advantages, **bounds)
    return _result(loss, mask, params["loss_agg_mode"], logps)


def _gpg(params, logps, old_logps, advantages, mask, weights) -> dict[str, Any]:
    return _result(ours.gpg_loss(logps, advantages), mask, params["loss_agg_mode"], logps)


def _geo_mean(params, logps, old_logps, advantages, mask, weights) -> dict[str, Any]:
    ratio = ours.log_ratio(logps, old_logps, mask, bound=math.inf)
    loss = ours.geo_mean(ratio, advantages, mask, **_clip(params))
    if weights is not None:
        loss = loss * importance.geometric_weights(weights, mask)
    divisors = totals(mask, rows=mask.shape[0])  # rows without tokens stay in verl's mean
    loss = aggregate(loss, mask, mode="seq_mean_token_mean", totals=divisors)
    metrics = {"actor/ppo_kl": -masked_mean(ratio, mask)}
    return {"loss": loss, "grad_log_prob": gradient(loss, logps), "metrics": metrics}


def _clip_cov(params, logps, old_logps, advantages, mask, weights) -> dict[str, Any]:
    ratio = ours.log_ratio(logps, old_logps, mask, bound=math.inf)
    bounds = {"cov_low": params["clip_cov_lb"], "cov_high": params["clip_cov_ub"]}
    bounds["cov_ratio"] = params["clip_cov_ratio"]
    noise = torch.zeros_like(advantages)
    loss = ours.clip_cov(ratio, logps, advantages, mask, noise, **_clip(params), **bounds)
    return _result(loss, mask, params["loss_agg_mode"], logps)


def _kl_cov(params, logps, old_logps, advantages, mask, weights) -> dict[str, Any]:
    ratio = ours.log_ratio(logps, old_logps, mask, bound=math.inf)
    settings = {"cov_ratio": params["kl_cov_ratio"], "kl_coef": params["ppo_kl_coef"]}
    loss = ours.kl_cov(ratio, logps, advantages, mask, **settings)
    return _result(loss, mask, params["loss_agg_mode"], logps)


def _bypass(params, logps, old_logps, advantages, mask, weights) -> dict[str, Any]:
    """The engine's log-probabilities are the old ones; rejection and weights are of the current ratio."""
    assert params["rollout_rs"] == "token_k1"
    settings = {"level": params["rollout_is"], "upper": params["rollout_is_threshold"]}
    weights = importance.rollout_correction(logps, old_logps, mask, **settings).weights
    low, high = (float(bound) for bound in params["rollout_rs_threshold"].split("_"))
    bounds = {"upper": 1 / low, "lower": 1 / high}  # verl's k1 bounds are mirrored
    mask = importance.rollout_correction(logps, old_logps, mask, mode="mask", **bounds).mask
    if params["loss_type"] == "reinforce":
        loss = ours.gpg_loss(logps, advantages) * weights
    else:
        ratio = ours.log_ratio(logps, old_logps, mask)
        loss = ours.clipped_surrogate(ratio, advantages, **_clip(params), dual_clip=params["clip_ratio_c"])
    return _result(loss, mask, params["loss_agg_mode"], logps)


VERL = {
    "vanilla": _vanilla,
    "gspo": _gspo,
    "sapo": _sapo,
    "cispo": _cispo,
    "gpg": _gpg,
    "geo_mean": _geo_mean,
    "clip_cov": _clip_cov,
    "kl_cov": _kl_cov,
    "bypass_mode": _bypass,
}


def trl(case: dict[str, Any]) -> dict[str, Any]:
    inputs, params = case["inputs"], case["params"]
    mask, logps = mask_of(inputs["completion_mask"]), leaf(inputs["log_prob"])
    old_logps = tensor(inputs["old_log_prob"]) if "old_log_prob" in inputs else logps.detach()
    loss = trl_policy_loss(
        case["loss_type"], params, logps, old_logps, inputs, mask, case.get("peer_version")
    )
    ratio = ours.log_ratio(logps, old_logps, mask, params["importance_sampling_level"], bound=math.inf)
    bounds = (params["epsilon_low"], params["epsilon_high"])
    clipped = ours.clip_fraction(ratio, tensor(inputs["advantages"]), mask, *bounds)
    is_per_token = params["importance_sampling_level"] == "token"  # TRL's other fraction is over rows
    metrics = {"clip_ratio/region_mean": clipped} if is_per_token else {}
    return {"loss": loss, "grad_log_prob": gradient(loss, logps), "metrics": metrics}


def trl_policy_loss(
    loss_type: str,
    params: dict,
    logps: Tensor,
    old_logps: Tensor,
    inputs: dict,
    mask: Tensor,
    version: str | None = None,
) -> Tensor:
    advantages = tensor(inputs["advantages"])
    ratio = ours.log_ratio(logps, old_logps, mask, params["importance_sampling_level"], bound=math.inf)
    if loss_type == "cispo":
        per_token = ours.cispo(ratio, logps, advantages, low=0.0, high=params["epsilon_high"])
    elif loss_type == "sapo":
        per_token = ours.sapo(ratio, advantages)
    else:
        clip = {"epsilon": params["epsilon_low"], "epsilon_high": params["epsilon_high"]}
        per_token = ours.clipped_surrogate(ratio, advantages, **clip, ratio_cap=params.get("delta"))
    if "importance_sampling_ratio" in inputs:
        per_token = per_token * tensor(inputs["importance_sampling_ratio"])
    if params.get("beta"):
        penalty = kl.k3(logps, tensor(inputs["ref_log_prob"]))
        penalty = penalty * ratio.exp() if params.get("use_bias_correction_kl") else penalty
        per_token = per_token + params["beta"] * penalty
    return _trl_mean(loss_type, per_token, mask, params, inputs, version)


def _trl_mean(
    loss_type: str, per_token: Tensor, mask: Tensor, params: dict, inputs: dict, version: str | None
) -> Tensor:
    """TRL keeps rows without tokens in its means, and divides by the accumulation steps itself."""
    modes = {
        "grpo": "seq_mean_token_mean",
        "sapo": "seq_mean_token_mean",
        "dr_grpo": "seq_mean_token_sum_norm",
    }
    mode = modes.get(loss_type, "token_mean")
    tokens = inputs.get("num_items_in_batch") if loss_type in ("dapo", "cispo") else None
    divisors = totals(mask, rows=mask.shape[0], tokens=tokens, length=params["max_completion_length"])
    loss = aggregate(per_token, mask, mode=mode, totals=divisors)
    if loss_type not in ("dapo", "cispo"):
        return loss / params.get("gradient_accumulation_steps", 1)
    if version == "TRL 1.16.0":
        steps = params["gradient_accumulation_steps"]
        return loss * params.get("steps_per_generation", steps) / steps
    return loss


def openrlhf(case: dict[str, Any]) -> dict[str, Any]:
    inputs, params = case["inputs"], case["params"]
    mask, logps = mask_of(inputs["response_mask"]), leaf(inputs["log_prob"])
    old_logps, advantages = tensor(inputs["old_log_prob"]), tensor(inputs["advantages"])
    clip = {"epsilon": params["clip_eps_low"], "epsilon_high": params["clip_eps_high"]}
    if params["policy_loss_type"] == "gspo":
        ratio = ours.log_ratio(logps, old_logps, mask, "sequence", bound=math.inf)
    else:
        ratio = ours.log_ratio(logps, old_logps, mask)
    loss = ours.clipped_surrogate(ratio, advantages, **clip, dual_clip=params.get("dual_clip"))
    result: dict[str, Any] = {
        "clip_ratio": ours.clip_fraction(ratio, advantages, mask, **clip),
        "ppo_kl": -masked_mean(ratio, mask),
    }
    if params.get("vllm_is_correction_type") is not None:
        rollout_logps = tensor(inputs["rollout_log_prob"])
        loss = loss * _openrlhf_weights(params, old_logps, rollout_logps, mask)
        result["vllm_kl"] = masked_mean(rollout_logps - old_logps, mask)
    token_level = params["token_level_loss"] and params["policy_loss_type"] != "gspo"
    loss = verl_mean(loss, mask, "token-mean" if token_level else "seq-mean-token-mean")
    return {**result, "loss": loss, "grad_log_prob": gradient(loss, logps)}


def _openrlhf_weights(params: dict, old_logps: Tensor, rollout_logps: Tensor, mask: Tensor) -> Tensor:
    low, high = params["threshold"]
    tokens = importance.mismatch(old_logps, rollout_logps, mask)
    if params["vllm_is_correction_type"] == "tis":
        return tokens.exp().clamp(low, high)
    level = {"icepop": "token", "seq-mask-tis": "geometric"}[params["vllm_is_correction_type"]]
    bounded = importance.mismatch(old_logps, rollout_logps, mask, level)
    return tokens.exp() * importance.is_within(bounded, upper=high, lower=low)


def value(case: dict[str, Any]) -> dict[str, Any]:
    inputs, params = case["inputs"], case["params"]
    mask, values = mask_of(inputs["response_mask"]), leaf(inputs["vpreds"])
    old, returns, clip = tensor(inputs["values"]), tensor(inputs["returns"]), params["cliprange_value"]
    loss = verl_mean(
        ours.value_loss(values, old, returns, cliprange_value=clip), mask, params["loss_agg_mode"]
    )
    result = {"vf_loss": loss, "grad_vpreds": gradient(loss, values)}
    if clip is not None:
        clipped = ours.is_value_clipped(values, old, returns, cliprange_value=clip)
        result["vf_clipfrac"] = masked_mean(clipped.float(), mask)
    return result
