"""Whole steps in situations where users of comparable tools got NaN, silence, or a loss that is not 0."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from stored_rollouts import constant_rate, rows_with_prompts
from tiny_parts import VOCABULARY, tiny_policy
from transformers import GPT2Config, GPT2LMHeadModel

from lit_rl.algorithms.grpo import GRPO
from lit_rl.hooks import RLCallback
from lit_rl.models.load import load_policy
from lit_rl.objectives.kl import KL
from lit_rl.objectives.policy import AGGREGATION, ClippedSurrogate
from lit_rl.rollout.sampling import Sampling


class Record(RLCallback):
    """Keeps the metrics of each step."""

    def __init__(self) -> None:
        self.metrics: list[dict[str, float]] = []

    def on_update_end(self, trainer: L.Trainer, pl_module: L.LightningModule, **payload: Any) -> None:
        self.metrics.append(payload["metrics"])


def grpo(**settings: Any) -> GRPO:
    defaults = {
        "optimizer": partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.0),
        "scheduler": constant_rate,
        "sampling": Sampling(max_completion_length=6),
        "num_generations": 4,
    }
    return GRPO(**{**defaults, **settings})


def weights(module: GRPO) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in module.policy.parameters()]


@pytest.mark.field("num/2")
@pytest.mark.parametrize("loss_type", AGGREGATION)
def test_a_step_of_cut_rows_only_is_a_step_that_changes_nothing(loss_type: str, train: Callable) -> None:
    batch, record = rows_with_prompts(), Record()
    batch.finish_reason = ["length"] * len(batch)
    loss = ClippedSurrogate(loss_type=loss_type)  # type: ignore[arg-type]
    module = grpo(policy=tiny_policy(), policy_loss=loss, mask_truncated_completions=True)
    before = weights(module)
    train(module, [batch], [record])
    assert record.metrics[0]["train/loss"] == record.metrics[0]["train/grad_norm"] == 0.0
    assert record.metrics[0]["rollout/loss_tokens"] == 0 < record.metrics[0]["rollout/tokens"]
    assert all(torch.equal(a, b) for a, b in zip(before, weights(module), strict=True))
    assert module.trainer.global_step == 1


@pytest.mark.field("num/8")
def test_a_model_with_dropout_starts_at_a_kl_of_0_and_a_ratio_of_1(tmp_path: Path, train: Callable) -> None:
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=64, n_embd=16, n_layer=2, n_head=2,
        attn_pdrop=0.1, embd_pdrop=0.1, resid_pdrop=0.1, bos_token_id=1, eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    record = Record()
    loss = ClippedSurrogate(epsilon=1e-5)  # a ratio further from 1 than that is clipped
    module = grpo(policy=load_policy(str(tmp_path)), policy_loss=loss, kl=KL(beta=0.1, kl_loss_type="abs"))
    train(module, [rows_with_prompts()], [record])
    assert abs(record.metrics[0]["train/kl"]) < 1e-6
    assert record.metrics[0]["train/clip_frac"] == 0.0
    assert module.policy.training


@pytest.mark.field("num/14")
@pytest.mark.parametrize("on_nonfinite", ["error", "skip"])
def test_a_nan_in_the_gradient_of_step_2_never_reaches_the_weights(
    on_nonfinite: str, train: Callable
) -> None:
    module, record = grpo(policy=tiny_policy(), on_nonfinite=on_nonfinite), Record()
    first = next(module.policy.parameters())
    first.register_hook(lambda g: torch.full_like(g, torch.nan) if module.trainer.global_step == 1 else g)
    batches = [rows_with_prompts(seed=seed) for seed in (0, 2, 3)]
    if on_nonfinite == "error":
        with pytest.raises(FloatingPointError, match="gradient norm the policy's nan at step 2"):
            train(module, batches, [record])
        assert module.optimizer_steps == 1
    else:
        train(module, batches, [record])
        assert [m["train/skipped_updates"] for m in record.metrics] == [0.0, 1.0, 0.0]
    assert all(parameter.isfinite().all() for parameter in module.policy.parameters())


@pytest.mark.field("num/14")
def test_a_nan_reward_is_a_row_that_nobody_scored(train: Callable) -> None:
    """It counts in no loss and no baseline: as if the group had been without it."""
    batch, record = rows_with_prompts(), Record()
    assert batch.rewards is not None
    batch.rewards[1] = torch.nan
    module = train(grpo(policy=tiny_policy()), [batch, rows_with_prompts()], [record])
    tokens = [metrics["rollout/loss_tokens"] for metrics in record.metrics]
    assert tokens[1] - tokens[0] == int(batch.completion_len[1])  # type: ignore[index]
    assert all(parameter.isfinite().all() for parameter in module.policy.parameters())
