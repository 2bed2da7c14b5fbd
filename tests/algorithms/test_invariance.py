"""A step's gradient does not depend on how its rows are cut, padded or ordered."""

from collections.abc import Callable

import pytest
import torch

from lit_rl.algorithms.base import RLModule
from lit_rl.algorithms.grpo import GRPO
from lit_rl.algorithms.sdpo import SDPO
from lit_rl.algorithms.sft import SFT
from lit_rl.batch import RolloutBatch
from lit_rl.objectives.batch_plan import BatchPlan
from lit_rl.objectives.distillation import Distillation
from lit_rl.objectives.kl import KL
from lit_rl.objectives.policy import ClippedSurrogate
from lit_rl.rollout.sampling import Sampling

SAMPLING = Sampling(max_completion_length=6, temperature=0.7)


def grpo(loss_type: str, level: str = "token", **more: object) -> Callable[..., RLModule]:
    loss = ClippedSurrogate(loss_type=loss_type, importance_sampling_level=level, entropy_coeff=0.01)  # type: ignore[arg-type]

    def build(**base: object) -> RLModule:
        return GRPO(policy_loss=loss, kl=KL(beta=0.1), sampling=SAMPLING, num_generations=4, **more, **base)

    return build


def sdpo(weight: float = 1.0, **settings: object) -> Callable[..., RLModule]:
    distillation = Distillation(distillation_weight=weight, **settings)  # type: ignore[arg-type]

    def build(**base: object) -> RLModule:
        return SDPO(distillation=distillation, sampling=SAMPLING, num_generations=4, **base)

    return build


CASES = {
    "sft": lambda **base: SFT(**base),
    "grpo": grpo("grpo"),
    "dapo": grpo("dapo"),
    "dr_grpo": grpo("dr_grpo"),
    "seq_mean_token_sum": grpo("seq_mean_token_sum"),
    "gspo": grpo("grpo", level="sequence"),
    "two_iterations": grpo("dapo", num_iterations=2),
    "sdpo_sampled": sdpo(),
    "sdpo_full": sdpo(distillation_mode="full_logits", distillation_alpha=0.5),
    "sdpo_topk": sdpo(distillation_mode="topk_logits", distillation_topk=5, distillation_add_tail=True),
    "sdpo_mixed": sdpo(0.5),
    "sdpo_active_rows": sdpo(distillation_divisor="active_rows"),
    "sdpo_all_rows": sdpo(distillation_divisor="all_rows"),
}


def cut(size: int) -> BatchPlan:
    return BatchPlan(micro_batch_size=size)


@pytest.fixture
def weights_after(
    tiny_policy: Callable, train: Callable, plain_sgd: dict
) -> Callable[..., list[torch.Tensor]]:
    def run(build: Callable[..., RLModule], batch: RolloutBatch, plan: BatchPlan) -> list[torch.Tensor]:
        policy = tiny_policy(dtype=torch.float64)
        module = build(policy=policy, batch=plan, max_grad_norm=0.0, **plain_sgd)
        train(module, [batch])
        return [p.detach().clone() for p in policy.parameters()]

    return run


def assert_equal(a: list[torch.Tensor], b: list[torch.Tensor], tolerance: float = 1e-10) -> None:
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", CASES)
def test_micro_batches_give_the_full_batch_gradient(
    name: str, weights_after: Callable, with_prompts: Callable
) -> None:
    whole = weights_after(CASES[name], with_prompts(), cut(12))
    start = weights_after(CASES[name], with_prompts(seed=1), cut(12))
    assert any((a - b).abs().max() > 1e-6 for a, b in zip(whole, start, strict=True)), (
        "the step moved nothing"
    )
    for plan in (cut(1), cut(3), cut(7), BatchPlan(micro_batch_size=None, micro_batch_tokens=25)):
        assert_equal(whole, weights_after(CASES[name], with_prompts(), plan))


@pytest.mark.parametrize("name", ["grpo", "sft", "sdpo_sampled"])
def test_padding_is_never_read(name: str, weights_after: Callable, with_prompts: Callable) -> None:
    whole = weights_after(CASES[name], with_prompts(), cut(5))
    batch = with_prompts()
    junk = torch.full((len(batch), 3), 77)
    batch.prompt_ids = torch.cat([junk, batch.prompt_ids], 1)
    batch.completion_ids = torch.cat([batch.completion_ids, junk], 1)
    batch.completion_mask = torch.cat([batch.completion_mask, junk == 0], 1)
    assert_equal(whole, weights_after(CASES[name], batch, cut(5)))


def test_bnpo_depends_on_the_cut_as_documented(weights_after: Callable, with_prompts: Callable) -> None:
    whole = weights_after(grpo("bnpo"), with_prompts(), cut(12))
    pieces = weights_after(grpo("bnpo"), with_prompts(), cut(3))
    assert max((a - b).abs().max() for a, b in zip(whole, pieces, strict=True)) > 1e-6


@pytest.mark.field("num/2")
@pytest.mark.parametrize("name", ["grpo", "dapo", "dr_grpo", "seq_mean_token_sum", "gspo", "sft"])
def test_a_batch_without_counted_tokens_changes_nothing(
    name: str, weights_after: Callable, tiny_policy: Callable, with_prompts: Callable
) -> None:
    batch = with_prompts()
    batch.completion_mask = torch.zeros_like(batch.completion_mask)
    after = weights_after(CASES[name], batch, cut(5))
    assert_equal(after, list(tiny_policy(dtype=torch.float64).parameters()), tolerance=0.0)


class EveryRow(GRPO):
    """GRPO that passes every row, whatever its advantage."""

    def rows_in_loss(self, rows: RolloutBatch) -> RolloutBatch:
        return rows


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
def test_leaving_out_rows_without_credit_changes_nothing(
    loss_type: str, weights_after: Callable, with_prompts: Callable
) -> None:
    batch = with_prompts()
    batch.rewards[:4] = 1.0  # a group without spread
    loss = ClippedSurrogate(loss_type=loss_type)  # type: ignore[arg-type]
    ways = [
        lambda way=way, **base: way(policy_loss=loss, sampling=SAMPLING, num_generations=4, **base)
        for way in (GRPO, EveryRow)
    ]
    assert_equal(*(weights_after(build, batch, cut(5)) for build in ways))
