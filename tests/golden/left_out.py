"""What of the recorded cases is not compared, and why. Whatever is not here is compared."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Case = dict[str, Any]


@dataclass(frozen=True)
class CaseRule:
    """Whole cases of a kind.

    Args:
        kind: stem of the file.
        where: true for the cases meant.
        reason: one sentence.
    """

    kind: str
    where: Callable[[Case], bool]
    reason: str


@dataclass(frozen=True)
class KeyRule:
    """One recorded value of the cases of a kind, the others being compared."""

    kind: str
    key: str
    reason: str


def _id_has(*parts: str) -> Callable[[Case], bool]:
    return lambda case: all(part in case["id"].split("/") for part in parts)


def _is(name: str, *values: Any) -> Callable[[Case], bool]:
    return lambda case: case.get(name, case.get("params", {}).get(name)) in values


def _both(first: Callable[[Case], bool], second: Callable[[Case], bool]) -> Callable[[Case], bool]:
    return lambda case: first(case) and second(case)


def _rules_beyond_k1(case: Case) -> bool:
    return any(not rule.endswith("_k1") for rule in (case["params"].get("rollout_rs") or "x_k1").split(","))


def _normalizes_with_empty_row(case: Case) -> bool:
    params = case["params"]
    normalizes = params.get("rollout_is_batch_normalize") or params.get("tis_batch_normalize")
    return bool(normalizes) and "allmasked_row" in case["id"]


CASES = [
    CaseRule(
        "sdpo_teacher_context_trl",
        _id_has("think_double_removed"),
        "Removed thinking takes the white space after it along, as the authors' code does.",
    ),
    CaseRule(
        "sdpo_teacher_context_official",
        _id_has("think_double_removed"),
        "What is left after removed thinking is stripped at both ends.",
    ),
    CaseRule(
        "sdpo_teacher_context_trl",
        _id_has("use_successful_off_no_feedback"),
        "A teacher that could never see anything is refused.",
    ),
    CaseRule(
        "advantages_verl",
        _is("estimator", "optimal_token_baseline", "tir_optimal_token_baseline"),
        "The optimal token baseline is not offered.",
    ),
    CaseRule(
        "advantages_verl",
        _both(_is("estimator", "rloo_vectorized"), lambda case: "singleton" in case["id"]),
        "The peer's two forms disagree on groups of one; ours keeps the reward, as its plain form.",
    ),
    CaseRule(
        "advantages_verl",
        _both(_is("estimator", "gpg"), _id_has("with_singleton")),
        "Groups of several sizes, one of them a single row, are no (P, G) rewards of one factor.",
    ),
    CaseRule(
        "advantages_verl",
        _both(_is("estimator", "grpo_vectorized"), _id_has("tiny_spread")),
        "The vectorised form floors the variance at 1e-6; the plain form and ours do not.",
    ),
    CaseRule(
        "advantages_verl",
        lambda case: case["id"] == "gae/one_valid_token",
        "The peer refuses to whiten a single value; ours returns zeros.",
    ),
    CaseRule(
        "advantages_trl",
        _both(_is("trainer", "SDPOTrainer"), _is("scale_rewards", "none")),
        "TRL's SDPO trainer divides by 1 + 1e-4 when it does not scale; ours does not divide.",
    ),
    CaseRule(
        "advantages_trl",
        _both(_is("trainer", "GRPOTrainer"), _is("num_generations", 1)),
        "TRL gives 0 to groups of one; ours keeps the reward, and the configuration refuses them.",
    ),
    CaseRule(
        "kl_penalty",
        _both(_is("kind", "full"), _is("peer", "verl")),
        "Records only that the peer cannot run it; the exact KL is compared with torch.distributions.",
    ),
    CaseRule(
        "lr_schedules",
        _is("schedule", "cosine_with_restarts", "polynomial", "inverse_sqrt"),
        "Schedules of transformers that are not offered; our inverse square root is Megatron's.",
    ),
    CaseRule(
        "policy_loss_trl",
        _is("loss_type", "luspo", "vespo"),
        "The losses luspo and vespo are not offered.",
    ),
    CaseRule(
        "policy_loss_trl",
        lambda case: case["params"].get("off_policy_mask_threshold") is not None,
        "The off-policy sequence mask is not offered.",
    ),
    CaseRule(
        "policy_loss_trl",
        lambda case: case["params"].get("top_entropy_quantile") is not None,
        "The entropy mask is not offered.",
    ),
    CaseRule(
        "policy_loss_trl",
        lambda case: "extreme" in case["id"] and case["params"]["beta"] > 0,
        "TRL's k3 overflows where ours is clamped.",
    ),
    CaseRule(
        "policy_loss_verl",
        _both(_is("loss_mode", "bypass_mode"), _rules_beyond_k1),
        "Rejection by k2 and k3 statistics is not offered; bounds are on the ratio.",
    ),
    CaseRule(
        "rollout_correction_verl",
        _rules_beyond_k1,
        "Rejection by k2 and k3 statistics is not offered; bounds are on the ratio.",
    ),
    CaseRule(
        "rollout_correction_verl_0_6_1",
        _both(_is("rollout_is", "sequence"), _normalizes_with_empty_row),
        "Normalised by the mean over all rows, empty ones included; ours is over rows with counted tokens.",
    ),
    CaseRule(
        "rollout_correction_slime",
        _both(_is("tis_level", "sequence"), _normalizes_with_empty_row),
        "Normalised by the mean over all rows, empty ones included; ours is over rows with counted tokens.",
    ),
    CaseRule(
        "sdpo_loss_official",
        lambda case: "raises" in case["expected"],
        "The peer refuses a missing old log-probability, a ratio of 1 here, and another alpha with the "
        "sampled token, which the configuration refuses.",
    ),
    CaseRule(
        "sdpo_loss_official",
        lambda case: case["expected"].get("peer_result") == "nan",
        "The peer's mean over no active row is not a number; ours is 0 (see tests/functional).",
    ),
    CaseRule(
        "sdpo_loss_trl",
        lambda case: "raises" in case["expected"],
        "Combinations that the configuration refuses, not the pure functions.",
    ),
]

OTHER_PARTS = {
    "seqlen_balance": "Partitions by token count are no tensor function; the batch plan packs rows.",
}
"""Kinds that are left out as a whole."""

KEYS = [
    KeyRule(
        "kl_penalty", "peer_raises", "Says that the peer cannot run it; the intended numbers are compared."
    ),
    KeyRule("entropy_logprobs", "sum_pi_squared", "Needed by the optimal token baseline only, not offered."),
    KeyRule(
        "masked_stats", "masked_var_unbiased_raises", "The peer refuses fewer than two values; ours gives 0."
    ),
    KeyRule(
        "sdpo_teacher_context_trl", "metrics", "Fractions under other names, compared in the step's tests."
    ),
    KeyRule("sdpo_teacher_context_official", "metrics", "As for the other peer."),
    KeyRule(
        "sdpo_teacher_context_official",
        "default_template_text_fingerprint",
        "Its default templates differ from the documented ones in white space.",
    ),
    KeyRule("rollout_correction_slime", "per_token_metrics", "Diagnostics of the peer that are not offered."),
    KeyRule("rollout_correction_trl", "metrics", "Diagnostics of the peer over its own padding convention."),
]
"""Values left out. Names in `metrics` that an adapter does not return are skipped: they are the peers'."""


def case_reason(kind: str, case: Case) -> str | None:
    """Why this case is left out, None if it is compared."""
    if kind in OTHER_PARTS:
        return OTHER_PARTS[kind]
    return next((rule.reason for rule in CASES if rule.kind == kind and rule.where(case)), None)


def key_reason(kind: str, key: str) -> str | None:
    """Why this recorded value is left out, None if it is compared."""
    return next((rule.reason for rule in KEYS if (rule.kind, rule.key) == (kind, key)), None)
