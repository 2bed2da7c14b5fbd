"""Which entries of a recorded array bind us: not those at padding, nor those after a schedule's end."""

from typing import Any

import torch

MASKS = {"advantages_verl": "response_mask", "advantages_openrlhf": "action_mask", "masked_stats": "mask"}
AT_TOKENS = ("advantages", "returns", "unwhitened_advantages", "masked_whiten", "masked_whiten_no_shift")


def binding(kind: str, case: dict[str, Any], key: str, value: Any) -> Any:
    """The recorded value with padding zeroed, or cut after the last step.

    At padding the peers carry or whiten whatever stands there, ours is zero. After the last step a cosine of
    verl and transformers rises again, ours stays at the minimum.
    """
    if kind in MASKS and key in AT_TOKENS:
        mask = torch.tensor(case["inputs"][MASKS[kind]], dtype=torch.float64)
        return (torch.tensor(value, dtype=torch.float64) * mask).tolist()
    if kind == "lr_schedules" and is_cosine_of_verl_or_transformers(case):
        return value[: case["params"]["num_training_steps"] + 1]
    return value


def is_cosine_of_verl_or_transformers(case: dict[str, Any]) -> bool:
    return case["peer"] != "Megatron-core" and case["schedule"].startswith("cosine")
