"""From a recorded case to a call of ours: `run(kind, case)`, one kind per file of cases.

An adapter translates settings and composes public functions; where a peer differs by a documented constant
(which rows enter a mean, the bound of a clamp) it passes that constant. It computes nothing itself that is
compared.
"""

from collections.abc import Callable
from typing import Any

import golden_advantages
import golden_basics
import golden_contexts
import golden_corrections
import golden_losses
import golden_sdpo

ADAPTERS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "advantages_openrlhf": golden_advantages.openrlhf,
    "advantages_trl": golden_advantages.trl,
    "advantages_verl": golden_advantages.verl,
    "ema_update": golden_basics.ema_update,
    "entropy_logprobs": golden_basics.entropy_logprobs,
    "gsm8k_reward": golden_contexts.gsm8k,
    "kl_controllers": golden_basics.kl_controllers,
    "kl_penalty": golden_basics.kl_penalty,
    "loss_aggregation": golden_losses.aggregation,
    "lr_schedules": golden_basics.lr_schedules,
    "masked_stats": golden_basics.masked_stats,
    "policy_loss_openrlhf": golden_losses.openrlhf,
    "policy_loss_trl": golden_losses.trl,
    "policy_loss_verl": golden_losses.verl,
    "rollout_correction_slime": golden_corrections.slime,
    "rollout_correction_trl": golden_corrections.trl,
    "rollout_correction_verl": golden_corrections.verl,
    "rollout_correction_verl_0_6_1": golden_corrections.verl_0_6_1,
    "sdpo_divergence": golden_sdpo.divergence,
    "sdpo_loss_official": golden_sdpo.official,
    "sdpo_loss_trl": golden_sdpo.trl,
    "sdpo_teacher_context_official": golden_contexts.teacher_context,
    "sdpo_teacher_context_trl": golden_contexts.teacher_context,
    "value_loss": golden_losses.value,
}


def run(kind: str, case: dict[str, Any]) -> dict[str, Any]:
    """Our values under the names of the case's `expected`; a name that we do not offer is absent.

    Args:
        kind: stem of the file of cases.
        case: one case as recorded.

    Returns:
        tensors, numbers, or containers of them; `{"raises": name}` when ours refuses the case.
    """
    try:
        return ADAPTERS[kind](case)
    except ValueError as error:
        return {"raises": type(error).__name__}
