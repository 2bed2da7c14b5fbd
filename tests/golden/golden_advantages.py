"""Adapters: advantages of verl, TRL and OpenRLHF."""

from collections.abc import Callable
from typing import Any

import torch
from golden_parts import mask_of, tensor
from torch import Tensor

from lit_rl.functional import advantages as ours
from lit_rl.functional import kl
from lit_rl.functional.masking import masked_whiten


def by_group(rewards: Tensor, index: list[Any], function: Callable[..., Tensor], *others: Tensor) -> Tensor:
    """(B,): the function on each group of one label as (1, G); groups may differ in size."""
    result = torch.zeros_like(rewards)
    for label in dict.fromkeys(index):
        rows = torch.tensor([i for i, other in enumerate(index) if other == label])
        result[rows] = function(rewards[rows].unsqueeze(0), *(o[rows].unsqueeze(0) for o in others)).squeeze(
            0
        )
    return result


def padded_groups(rewards: Tensor, index: list[Any]) -> tuple[Tensor, Tensor]:
    """(P, G) rewards, NaN where a group is smaller than G; and the (B,) flat position of each row."""
    labels = list(dict.fromkeys(index))
    width = max(index.count(label) for label in labels)
    groups = torch.full((len(labels), width), torch.nan, dtype=rewards.dtype)
    used, positions = dict.fromkeys(labels, 0), []
    for row, label in enumerate(index):
        groups[labels.index(label), used[label]] = rewards[row]
        positions.append(labels.index(label) * width + used[label])
        used[label] += 1
    return groups, torch.tensor(positions)


def verl(case: dict[str, Any]) -> dict[str, Any]:
    inputs, params = case["inputs"], case["params"]
    mask, token_rewards = mask_of(inputs["response_mask"]), tensor(inputs["token_level_rewards"])
    return VERL[case["estimator"]](inputs, params, token_rewards, mask)


def _on_tokens(per_row: Tensor, mask: Tensor) -> dict[str, Any]:
    spread = per_row.unsqueeze(-1) * mask
    return {"advantages": spread, "returns": spread}


def _grpo(inputs: dict, params: dict, rewards: Tensor, mask: Tensor) -> dict[str, Any]:
    scale = "group" if params["norm_adv_by_std_in_grpo"] else "none"

    def estimator(group: Tensor) -> Tensor:
        return ours.group_advantages(group, scale=scale, std_epsilon=params["epsilon"])

    return _on_tokens(by_group(rewards.sum(-1), inputs["index"], estimator), mask)


def _passk(inputs: dict, params: dict, rewards: Tensor, mask: Tensor) -> dict[str, Any]:
    scale = "group" if params["norm_adv_by_std_in_grpo"] else "none"

    def estimator(group: Tensor) -> Tensor:
        return ours.grpo_passk(group, scale=scale, std_epsilon=params["epsilon"])

    return _on_tokens(by_group(rewards.sum(-1), inputs["index"], estimator), mask)


def _rloo(inputs: dict, params: dict, rewards: Tensor, mask: Tensor) -> dict[str, Any]:
    return _on_tokens(by_group(rewards.sum(-1), inputs["index"], ours.rloo), mask)


def _opo(inputs: dict, params: dict, rewards: Tensor, mask: Tensor) -> dict[str, Any]:
    return _on_tokens(by_group(rewards.sum(-1), inputs["index"], ours.opo, mask.sum(-1)), mask)


def _gpg(inputs: dict, params: dict, rewards: Tensor, mask: Tensor) -> dict[str, Any]:
    groups, positions = padded_groups(rewards.sum(-1), inputs["index"])
    return _on_tokens(ours.gpg(groups, f_norm=params["f_norm"]).flatten()[positions], mask)


def _plus_plus(inputs: dict, params: dict, rewards: Tensor, mask: Tensor) -> dict[str, Any]:
    gamma = params["gamma"]
    advantages = ours.reinforce_plus_plus(rewards, mask, gamma=gamma)
    returns = ours.discounted_returns(rewards, mask, gamma=gamma, across_gaps=False)
    return {"advantages": advantages, "returns": returns}


def _plus_plus_baseline(inputs: dict, params: dict, rewards: Tensor, mask: Tensor) -> dict[str, Any]:
    groups, positions = padded_groups(rewards.sum(-1), inputs["index"])
    if bool(groups.isnan().any()):  # groups of several sizes: centred one by one, then given as groups of one
        centred = by_group(rewards.sum(-1), inputs["index"], lambda r: ours.group_advantages(r, scale="none"))
        advantages = ours.reinforce_plus_plus_baseline(centred.unsqueeze(-1), mask)
    else:
        by_row = torch.zeros_like(mask)
        by_row[positions] = mask
        advantages = ours.reinforce_plus_plus_baseline(groups, by_row)[positions]
    return {"advantages": advantages, "returns": advantages}


def _remax(inputs: dict, params: dict, rewards: Tensor, mask: Tensor) -> dict[str, Any]:
    advantages = ours.remax(rewards, mask, tensor(inputs["reward_baselines"]))
    return {"advantages": advantages, "returns": ours.discounted_returns(rewards, mask)}


def _gae(inputs: dict, params: dict, rewards: Tensor, mask: Tensor) -> dict[str, Any]:
    settings = {"gamma": params["gamma"], "lam": params["lam"]}
    values = tensor(inputs["values"])
    credit = ours.gae(rewards, values, mask, **settings)
    plain = ours.gae(rewards, values, mask, **settings, whiten=False)
    return {
        "advantages": credit.advantages,
        "returns": credit.returns,
        "unwhitened_advantages": plain.advantages,
    }


VERL = {
    "grpo": _grpo,
    "grpo_vectorized": _grpo,
    "grpo_passk": _passk,
    "rloo": _rloo,
    "rloo_vectorized": _rloo,
    "opo": _opo,
    "gpg": _gpg,
    "reinforce_plus_plus": _plus_plus,
    "reinforce_plus_plus_baseline": _plus_plus_baseline,
    "remax": _remax,
    "gae": _gae,
}


def trl(case: dict[str, Any]) -> dict[str, Any]:
    inputs, params = case["inputs"], case["params"]
    if case["trainer"] == "SDPOTrainer":
        rewards = tensor(inputs["rewards"]).view(-1, params["num_generations"])
        return {"advantages": _trl_scaled(rewards, params["scale_rewards"]).flatten()}
    per_func = tensor(inputs["rewards_per_func"]).masked_fill(mask_of(inputs["missing"]), torch.nan)
    weights = tensor(params["reward_weights"])
    rewards = (per_func * weights).nansum(-1).masked_fill(per_func.isnan().all(-1), torch.nan)
    groups = rewards.view(-1, params["num_generations"])
    if params["multi_objective_aggregation"] == "normalize_then_sum":
        per_group = per_func.view(*groups.shape, -1)
        advantages = ours.summed_after_normalizing(per_group, weights, std_epsilon=1e-4)
        return {"advantages": advantages.flatten()}
    return {
        "advantages": _trl_scaled(groups, params["scale_rewards"]).flatten(),
        "is_std_zero": _trl_flag(groups, params["scale_rewards"]),
    }


def _trl_flag(groups: Tensor, scale: str) -> Tensor:
    """The spread of what the rewards are divided by: the batch as one group, or each group."""
    compared = groups.reshape(1, -1) if scale == "batch" else groups
    return ours.is_zero_variance(compared).repeat_interleave(compared.shape[1])


def _trl_scaled(groups: Tensor, scale: str) -> Tensor:
    return ours.group_advantages(groups, scale=scale, std_epsilon=1e-4)


def openrlhf(case: dict[str, Any]) -> dict[str, Any]:
    inputs, params = case["inputs"], case["params"]
    mask, rewards = mask_of(inputs["action_mask"]), tensor(inputs["rewards"])
    groups = rewards.view(-1, params["n_samples_per_prompt"])
    shaped = OPENRLHF_SHAPING.get(case["estimator"], lambda r: r)(groups).flatten()
    shaped = shaped.clamp(*params["reward_clip_range"])
    token_rewards = ours.terminal_rewards(shaped, _last_position(mask) + 1, mask.shape[1])
    token_rewards = kl.kl_in_reward(token_rewards, tensor(inputs["kl"]), mask, coef=params["kl_coef"])
    if case["estimator"] == "gae":
        settings = {"gamma": params["gamma"], "lam": params["lam"], "whiten": False}
        credit = ours.gae(token_rewards, tensor(inputs["values"]), mask, **settings)
        advantages = masked_whiten(credit.advantages, mask, unbiased=False)  # theirs is the biased variance
        return {"advantages": advantages, "returns": credit.returns}
    returns = ours.discounted_returns(token_rewards, mask, gamma=params["gamma"])
    if case["estimator"] in ("reinforce", "reinforce_baseline"):
        return {"advantages": masked_whiten(returns, mask, unbiased=False), "returns": returns}
    return {"advantages": returns, "returns": returns}


def _last_position(mask: Tensor) -> Tensor:
    positions = torch.arange(mask.shape[1]).expand(mask.shape)
    return torch.where(mask, positions, torch.full_like(positions, -1)).amax(-1)


OPENRLHF_SHAPING: dict[str, Callable[[Tensor], Tensor]] = {
    "rloo": ours.rloo,
    "reinforce_baseline": lambda r: ours.group_advantages(r, scale="none"),
    "dr_grpo": lambda r: ours.group_advantages(r, scale="none"),
    "group_norm": lambda r: ours.group_advantages(r, scale="group", std_epsilon=1e-9),
}
