"""The trainer counts iterations, whatever the number of optimizer steps in each."""

from collections.abc import Callable

import lightning as L
import pytest
import torch

from lit_rl.algorithms.grpo import GRPO
from lit_rl.batch import RolloutBatch
from lit_rl.hooks import RLCallback
from lit_rl.objectives.batch_plan import BatchPlan
from lit_rl.rollout.sampling import Sampling


class Record(RLCallback):
    """Keeps what each event brought."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, int]] = []
        self.metrics: list[dict[str, float]] = []

    def on_update_end(self, trainer: L.Trainer, pl_module: L.LightningModule, **payload) -> None:
        self.steps.append((payload["step"], pl_module.optimizer_steps))
        self.metrics.append(payload["metrics"])


@pytest.fixture
def grpo(tiny_policy: Callable, plain_sgd: dict) -> Callable[..., GRPO]:
    def build(**settings: object) -> GRPO:
        return GRPO(
            policy=tiny_policy(),
            sampling=Sampling(max_completion_length=6),
            num_generations=4,
            **{**plain_sgd, **settings},
        )

    return build


def test_a_step_is_one_iteration(grpo: Callable, train: Callable, with_prompts: Callable) -> None:
    record = Record()
    module = grpo(num_iterations=2, batch=BatchPlan(optimizer_batch_size=6))
    train(module, [with_prompts(seed=s) for s in range(3)], [record])
    assert record.steps == [(0 + 1, 4), (1 + 1, 8), (2 + 1, 12)]
    assert module.trainer.global_step == 3


def test_the_rate_of_iteration_i_is_schedule_of_i_plus_one(
    grpo: Callable, train: Callable, with_prompts: Callable
) -> None:
    from functools import partial

    from lit_rl.schedule import WarmupDecay

    record = Record()
    schedule = partial(WarmupDecay, lr_scheduler_type="constant", lr_warmup_steps=4)
    module = grpo(scheduler=schedule, num_iterations=2, batch=BatchPlan(micro_batch_size=2))
    train(module, [with_prompts(seed=s) for s in range(5)], [record])
    assert [m["train/lr"] for m in record.metrics] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])


@pytest.mark.field("cfg/4")
@pytest.mark.parametrize("size", [12, 3])
def test_the_gradient_is_clipped_once_per_update(
    size: int, grpo: Callable, tiny_policy: Callable, train: Callable, with_prompts: Callable
) -> None:
    record = Record()
    batch = with_prompts()
    batch.rewards = batch.rewards * 1e4
    from lit_rl.objectives.advantage import Advantage

    module = grpo(
        advantage=Advantage(scale_rewards="none"), max_grad_norm=1.0, batch=BatchPlan(micro_batch_size=size)
    )
    train(module, [batch], [record])
    start = tiny_policy()
    moved = torch.cat(
        [(a - b).flatten() for a, b in zip(module.policy.parameters(), start.parameters(), strict=True)]
    )
    assert record.metrics[0]["train/grad_norm"] > 100
    assert float(moved.detach().norm()) == pytest.approx(1.0, abs=1e-4)


@pytest.mark.field("num/14")
def test_a_nan_gradient_stops_and_leaves_the_weights(
    grpo: Callable, tiny_policy: Callable, train: Callable, with_prompts: Callable
) -> None:
    batch = with_prompts()
    batch.old_logps = torch.full(batch.completion_ids.shape, float("nan"))
    module = grpo()
    with pytest.raises(FloatingPointError, match="step 1"):
        train(module, [batch])
    for a, b in zip(module.policy.parameters(), tiny_policy().parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.field("num/14")
def test_a_nan_update_is_left_out_and_counted_when_asked(
    grpo: Callable, train: Callable, with_prompts: Callable
) -> None:
    bad, record = with_prompts(), Record()
    bad.old_logps = torch.full(bad.completion_ids.shape, float("nan"))
    module = train(grpo(on_nonfinite="skip"), [bad, with_prompts(seed=1)], [record])
    assert [m["train/skipped_updates"] for m in record.metrics] == [1.0, 0.0]
    assert module.optimizer_steps == 1 and module.trainer.global_step == 2
    assert all(p.isfinite().all() for p in module.policy.parameters())


@pytest.mark.field("log/1")
def test_a_zero_loss_tells_health_from_nothing_to_learn(
    grpo: Callable, train: Callable, with_prompts: Callable
) -> None:
    flat, record = with_prompts(), Record()
    flat.rewards = torch.ones_like(flat.rewards)
    healthy = with_prompts(ragged=False)
    healthy.rewards = torch.tensor([1.0, 0.0] * 6)
    train(grpo(), [healthy, flat], [record])
    first, second = record.metrics
    assert first["train/loss"] == pytest.approx(0, abs=1e-6) and first["train/grad_norm"] > 0
    assert first["rollout/zero_variance_frac"] == 0
    assert second["train/loss"] == 0 and second["train/grad_norm"] == 0
    assert second["rollout/zero_variance_frac"] == 1


@pytest.mark.field("log/4")
def test_means_are_over_tokens_and_rows_not_over_micro_batches(
    grpo: Callable, train: Callable, make_batch: Callable[..., RolloutBatch], with_prompts: Callable
) -> None:
    batch, record = with_prompts(P=1, G=4, T=10, ragged=False), Record()
    batch.completion_len = torch.tensor([2, 2, 2, 10])
    batch.completion_mask = batch.token_mask
    train(grpo(batch=BatchPlan(micro_batch_size=3)), [batch], [record])
    whole = Record()
    train(grpo(batch=BatchPlan(micro_batch_size=4)), [batch], [whole])
    assert record.metrics[0]["rollout/completion_len"] == 4.0
    assert record.metrics[0]["train/entropy"] == pytest.approx(whole.metrics[0]["train/entropy"], abs=1e-6)


@pytest.mark.field("log/5")
def test_reward_health_of_a_hand_made_batch(grpo: Callable, train: Callable, with_prompts: Callable) -> None:
    batch, record = with_prompts(P=3, G=4), Record()
    batch.rewards = torch.tensor([1.0, 1, 1, 1, 0, 0, 0, 0, 1, 0, 1, 0])
    train(grpo(), [batch], [record])
    metrics = record.metrics[0]
    names = ("zero_variance_frac", "all_right_frac", "all_wrong_frac")
    assert [metrics[f"rollout/{name}"] for name in names] == pytest.approx([2 / 3, 1 / 3, 1 / 3])


@pytest.mark.field("rew/3")
def test_a_row_without_a_reward_enters_no_loss(
    grpo: Callable, train: Callable, with_prompts: Callable
) -> None:
    batch, record = with_prompts(P=1, G=4), Record()
    batch.rewards = torch.tensor([1.0, 0.0, 1.0, float("nan")])
    module = train(grpo(), [batch], [record])
    assert record.metrics[0]["rollout/loss_tokens"] == int(batch.completion_len[:3].sum())
    assert record.metrics[0]["rollout/reward"] == pytest.approx(2 / 3)
    assert all(p.isfinite().all() for p in module.policy.parameters())
