"""SDPO's options: routing of failed rows, weights of prompts, and a gate for the teacher."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lit_rl.algorithms.grpo import GRPO
from lit_rl.algorithms.sdpo import SDPO
from lit_rl.batch import RolloutBatch
from lit_rl.objectives.batch_plan import BatchPlan
from lit_rl.objectives.distillation import Distillation
from lit_rl.rollout.sampling import Sampling

WEIGHT = 0.25


@pytest.fixture
def sdpo(tiny_policy: Callable, plain_sgd: dict) -> Callable[..., SDPO]:
    def build(**settings: Any) -> SDPO:
        own = {"batch": settings.pop("batch", None), "max_grad_norm": 0.0}
        base = {"sampling": Sampling(max_completion_length=6), "num_generations": 4, **own, **plain_sgd}
        return SDPO(policy=tiny_policy(torch.float64), distillation=Distillation(**settings), **base)

    return build


@pytest.fixture
def tiny_policy(tiny_policy: Callable) -> Callable:
    """The two-layer model in the given dtype."""
    return lambda dtype=torch.float64: tiny_policy(dtype=dtype)


def mixed(with_prompts: Callable) -> RolloutBatch:
    """Group 0: rows 1 and 3 succeed; group 1: none; group 2: row 8 alone."""
    batch = with_prompts()
    batch.rewards = torch.zeros(12)
    batch.rewards[[1, 3, 8]] = 1.0
    return batch


def change(module: SDPO | GRPO, start: torch.nn.Module) -> torch.Tensor:
    """What a step at rate 1 subtracted from the weights: its gradient."""
    pairs = zip(start.parameters(), module.policy.parameters(), strict=True)
    return torch.cat([(a - b).detach().flatten() for a, b in pairs])


def test_routing_adds_distillation_of_failures_to_the_policy_gradient_of_the_rest(
    sdpo: Callable, train: Callable, tiny_policy: Callable, plain_sgd: dict, with_prompts: Callable
) -> None:
    """Against two runs that know one loss each, on the rows that are theirs."""
    failed_with_teacher = [0, 2, 9, 10, 11]
    rest = [1, 3, 4, 5, 6, 7, 8]
    routed = change(
        train(sdpo(distillation_weight=WEIGHT, rows="failed"), [mixed(with_prompts)]), tiny_policy()
    )
    distilled = mixed(with_prompts)
    keep = torch.zeros(12, dtype=torch.bool)
    keep[failed_with_teacher] = True
    distilled.completion_mask = distilled.completion_mask & keep[:, None]
    distillation = change(train(sdpo(), [distilled]), tiny_policy())

    rewarded = mixed(with_prompts)
    rewarded.completion_mask = rewarded.completion_mask & ~keep[:, None]
    settings = {"sampling": Sampling(max_completion_length=6), "num_generations": 4, "max_grad_norm": 0.0}
    grpo = train(GRPO(policy=tiny_policy(), **settings, **plain_sgd), [rewarded])
    policy_gradient = change(grpo, tiny_policy())
    assert sorted(failed_with_teacher + rest) == list(range(12))
    torch.testing.assert_close(routed, WEIGHT * distillation + (1 - WEIGHT) * policy_gradient)


@pytest.mark.parametrize(
    "settings",
    [
        {"distillation_weight": WEIGHT, "rows": "failed"},
        {"prompt_weight": "sqrt_pq"},
        {"distillation_weight": WEIGHT, "rows": "failed", "prompt_weight": "sqrt_pq"},
    ],
)
def test_the_cut_into_micro_batches_changes_nothing(
    settings: dict, sdpo: Callable, train: Callable, tiny_policy: Callable, with_prompts: Callable
) -> None:
    whole = change(train(sdpo(**settings), [mixed(with_prompts)]), tiny_policy())
    cut = sdpo(**settings, batch=BatchPlan(micro_batch_size=5))
    torch.testing.assert_close(change(train(cut, [mixed(with_prompts)]), tiny_policy()), whole)


def test_prompt_weights_scale_the_distillation_of_each_group(
    sdpo: Callable, train: Callable, tiny_policy: Callable, with_prompts: Callable
) -> None:
    """Weights 3 sqrt(pq) / sum over the groups; p = 1/2, 0, 1/4."""
    raw = torch.tensor([0.5, 0.0, 3**0.5 / 4], dtype=torch.float64)
    weights = (3 * raw / raw.sum()).tolist()
    parts = []
    tokens = []
    for group in range(3):
        batch = mixed(with_prompts)
        of_group = torch.arange(12) // 4 == group
        batch.completion_mask = batch.completion_mask & of_group[:, None]
        module = train(sdpo(), [batch])
        mask = module.last_rollout.completion_mask & module.last_rollout.self_distillation_mask[:, None]
        tokens.append(int(mask.sum()))
        parts.append(change(module, tiny_policy()))
    expected = sum(w * n * g for w, n, g in zip(weights, tokens, parts, strict=True)) / sum(tokens)
    found = change(train(sdpo(prompt_weight="sqrt_pq"), [mixed(with_prompts)]), tiny_policy())
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


def test_a_closed_gate_leaves_the_policy_loss_alone(
    sdpo: Callable, train: Callable, tiny_policy: Callable, with_prompts: Callable
) -> None:
    """Routed, a closed gate is GRPO on all rows, times its share of the loss."""
    module = sdpo(distillation_weight=WEIGHT, rows="failed", gate="run")
    module.gate.gap = 0.0
    closed = change(train(module, [mixed(with_prompts)]), tiny_policy())
    plain = change(train(sdpo(distillation_weight=0.0), [mixed(with_prompts)]), tiny_policy())
    torch.testing.assert_close(closed, (1 - WEIGHT) * plain)
    assert module.metrics["sdpo/distilled_frac"] == 0 and module.metrics["sdpo/reprompted_frac"] > 0


def test_a_prompt_gate_leaves_out_its_prompts_only(
    sdpo: Callable, train: Callable, with_prompts: Callable
) -> None:
    module = sdpo(gate="prompt")
    module.gate.gaps = {0: -0.5, 2: 0.5}
    train(module, [mixed(with_prompts)])
    assert module.last_rollout.self_distillation_mask.nonzero().flatten().tolist() == [9, 10, 11]


def test_the_run_gate_is_in_the_state_of_the_module_and_the_prompt_gate_is_not(sdpo: Callable) -> None:
    assert "gate" in sdpo(gate="run").stateful
    assert "gate" not in sdpo(gate="prompt").stateful and "gate" not in sdpo().stateful
