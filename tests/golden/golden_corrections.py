"""Adapters: rollout correction of verl, verl 0.6.1, TRL and slime."""

from typing import Any

import torch
from golden_parts import mask_of, tensor
from torch import Tensor

from lit_rl.functional import importance as ours
from lit_rl.functional import kl
from lit_rl.functional.masking import masked_mean

VERL_RULES = {"token_k1": "token", "seq_sum_k1": "sequence", "seq_mean_k1": "geometric"}


def _inputs(case: dict[str, Any], training: str = "old_log_prob") -> tuple[Tensor, Tensor, Tensor]:
    inputs = case["inputs"]
    return tensor(inputs[training]), tensor(inputs["rollout_log_prob"]), mask_of(inputs["response_mask"])


def _truncated(params: dict, logps: Tensor, rollout_logps: Tensor, mask: Tensor) -> Tensor | None:
    if params.get("rollout_is") is None:
        return None
    settings = {"level": params["rollout_is"], "upper": params["rollout_is_threshold"]}
    weights = ours.rollout_correction(logps, rollout_logps, mask, **settings).weights
    if not params.get("rollout_is_batch_normalize"):
        return weights
    if params["rollout_is"] == "token":
        return ours.normalized_weights(weights, mask)
    per_row = weights.amax(-1, keepdim=True)  # a row's counted tokens share its weight
    return ours.normalized_weights(per_row, mask) * mask


def verl(case: dict[str, Any]) -> dict[str, Any]:
    params, (logps, rollout_logps, mask) = case["params"], _inputs(case)
    kept = mask.clone()
    if params.get("rollout_rs"):
        bounds = [float(b) for b in params["rollout_rs_threshold"].split("_")]
        low, high = bounds if len(bounds) == 2 else (1 / bounds[0], bounds[0])
        mirrored = {"upper": 1 / low, "lower": 1 / high}
        level = VERL_RULES[params["rollout_rs"]]
        kept = ours.rollout_correction(logps, rollout_logps, mask, level=level, mode="mask", **mirrored).mask
    metrics = _gap_metrics(logps, rollout_logps, mask)
    return {
        "rollout_is_weights": _truncated(params, logps, rollout_logps, mask),
        "modified_response_mask": kept,
        "metrics": metrics,
    }


def _gap_metrics(logps: Tensor, rollout_logps: Tensor, mask: Tensor) -> dict[str, Tensor]:
    return {
        "rollout_corr/kl": masked_mean(kl.k1(rollout_logps, logps), mask),
        "rollout_corr/training_log_ppl": -masked_mean(logps, mask, dim=-1).mean(),
        "rollout_corr/rollout_log_ppl": -masked_mean(rollout_logps, mask, dim=-1).mean(),
    }


def verl_0_6_1(case: dict[str, Any]) -> dict[str, Any]:
    params, (logps, rollout_logps, mask) = case["params"], _inputs(case)
    kept = mask
    if params.get("rollout_rs"):
        bounds = {"upper": params["rollout_rs_threshold"], "lower": params.get("rollout_rs_threshold_lower")}
        level = params["rollout_rs"]
        kept = ours.rollout_correction(logps, rollout_logps, mask, level=level, mode="mask", **bounds).mask
    veto = params.get("rollout_token_veto_threshold")
    if veto is not None:
        kept = kept & ours.rollout_correction(logps, rollout_logps, mask, mode="none", veto=veto).mask
    return {
        "rollout_is_weights": _truncated(params, logps, rollout_logps, mask),
        "modified_response_mask": kept,
        "metrics": _gap_metrics(logps, rollout_logps, mask),
    }


def trl(case: dict[str, Any]) -> dict[str, Any]:
    """TRL's ratio is 1, or the row's, at padding, and 0 where mask mode rejects; ours are 0 and the mask."""
    params, (logps, rollout_logps, mask) = case["params"], _inputs(case)
    level, mode = params["mode"].split("_")
    log_ratio = ours.mismatch(logps, rollout_logps, mask, level)
    ratio, low = log_ratio.exp(), 0.0 if params["clip_min"] is None else params["clip_min"]
    if mode == "truncate":
        return {"ratio": ratio.clamp(low, params["clip_max"])}
    return {"ratio": ratio * ours.is_within(log_ratio, upper=params["clip_max"], lower=low)}


def slime(case: dict[str, Any]) -> dict[str, Any]:
    params, (logps, rollout_logps, mask) = case["params"], _inputs(case, "train_log_prob")
    level, mode, upper = params["tis_level"], params["tis_mode"], params["tis_upper_bound"]
    lower = params.get("tis_lower_bound")
    log_ratio = ours.mismatch(logps, rollout_logps, mask, level)
    kept = mask
    if mode == "clip":
        ratio = log_ratio.exp().clamp(1 / upper if lower is None else lower, upper)
        weights = torch.where(mask, ratio.expand(mask.shape), torch.zeros_like(logps))
    else:
        bounds = {"upper": upper, "lower": lower if mode == "mask" else None}
        correction = ours.rollout_correction(logps, rollout_logps, mask, level=level, mode=mode, **bounds)
        weights, kept = correction.weights, correction.mask
    if params.get("use_rs"):
        kept = kept & _slime_rejection(params, logps, rollout_logps, mask)
    if params.get("tis_batch_normalize"):
        weights = _slime_normalized(weights, mask, level)
    return {"weights": weights, "modified_response_mask": kept}


def _slime_rejection(params: dict, logps: Tensor, rollout_logps: Tensor, mask: Tensor) -> Tensor:
    upper, lower = params["rs_upper_bound"], params["rs_lower_bound"]
    bounds = {"upper": params["tis_upper_bound"] if upper is None else upper, "lower": lower}
    veto, level = params["rs_veto_threshold"], params["rs_level"]
    return ours.rollout_correction(
        logps, rollout_logps, mask, level=level, mode="mask", **bounds, veto=veto
    ).mask


def _slime_normalized(weights: Tensor, mask: Tensor, level: str) -> Tensor:
    if level == "token":
        return ours.normalized_weights(weights, mask)
    return ours.normalized_weights(weights.amax(-1, keepdim=True), mask) * mask
