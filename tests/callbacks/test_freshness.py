"""Every completion is written with the policy as it is: weights go to the engine when they changed, and then
only.

The engine here is a real one that keeps a second set of weights, the HF engine in float64.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from lit_rl import GRPO, PromptDataModule, Sampling, load_policy
from lit_rl.batch import RolloutBatch
from lit_rl.callbacks.rollout import RolloutGeneration
from lit_rl.hooks import RLCallback
from lit_rl.models.roles import named_base_tensors
from lit_rl.rollout.hf import HFEngine

ROWS = [{"prompt": f"{a}+{a + 1}="} for a in range(10, 30)]


class WatchedEngine(HFEngine):
    """A copy in float64 that compares itself with the policy before it writes."""

    def __init__(self) -> None:
        super().__init__(dtype="float64")
        self.syncs: list[int] = []
        self.writes: list[int] = []
        self.is_awake = True
        self.policy: nn.Module | None = None

    def bind(self, policy: nn.Module, **settings: Any) -> None:
        self.policy = policy
        super().bind(policy, **settings)

    def sync_weights(self, named_tensors: Any, version: int) -> None:
        assert self.is_awake
        self.syncs.append(version)
        super().sync_weights(named_tensors, version)

    def generate(self, prompts: RolloutBatch, **settings: Any) -> RolloutBatch:
        assert self.is_awake and self.policy is not None
        own = dict(self._model.named_parameters(remove_duplicate=False))
        for name, tensor in named_base_tensors(self.policy):
            assert torch.equal(own[name], tensor.double()), name
        self.writes.append(self.policy_version)
        return super().generate(prompts, **settings)

    def sleep(self) -> None:
        self.is_awake = False

    def wake_weights(self) -> None:
        self.is_awake = True

    def wake(self) -> None:
        self.is_awake = True


class Seen(RLCallback):
    """The metrics of each step."""

    def __init__(self) -> None:
        self.metrics: list[dict[str, float]] = []

    def on_update_end(self, trainer: Any, pl_module: Any, *, step: int, metrics: Any, **payload: Any) -> None:
        self.metrics.append(dict(metrics))


def policy_of(kind: str) -> nn.Module:
    policy = load_policy("embedded")
    assert policy.config.tie_word_embeddings
    if kind == "lora":
        return get_peft_model(policy, LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    return policy


def by_place(completions: list[str], **columns: Any) -> list[float]:
    return [float(i % 2) for i in range(len(completions))]


def module(policy: nn.Module, reward: Callable = by_place, **settings: Any) -> GRPO:
    sampling = Sampling(max_completion_length=3)
    return GRPO(policy=policy, reward=[reward], num_generations=4, sampling=sampling, **settings)


def fit(
    model: GRPO,
    engine: WatchedEngine,
    steps: int,
    *more: L.Callback,
    ckpt: Path | None = None,
    **settings: Any,
) -> L.Trainer:
    data = PromptDataModule(train_files=ROWS, val_files=ROWS[:2], train_batch_size=2, max_prompt_length=32)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=steps,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=[RolloutGeneration(engine), *more],
        **quiet | settings,
    )
    trainer.fit(model, datamodule=data, ckpt_path=ckpt)
    return trainer


@pytest.mark.parametrize("kind", ["tied", "lora"])
def test_at_start_and_after_every_update_the_engine_has_the_policy(kind: str) -> None:
    engine, seen = WatchedEngine(), Seen()
    fit(module(policy_of(kind)), engine, 3, seen, limit_val_batches=0)
    assert engine.syncs == engine.writes == [0, 1, 2], "one sync for each changed version"
    assert [metrics["rollout/stale_tokens"] for metrics in seen.metrics] == [0.0] * 3
    assert seen.metrics[0]["rollout/logp_gap_max"] < 1e-4, "step 1 is checked"
    assert abs(seen.metrics[0]["rollout/logp_gap_kl"]) < 1e-6


def test_several_updates_in_a_step_are_one_sync() -> None:
    engine = WatchedEngine()
    fit(module(policy_of("tied"), num_iterations=3), engine, 2, limit_val_batches=0)
    assert engine.syncs == [0, 3]


def test_validation_writes_with_the_policy_of_the_moment_and_leaves_nothing_to_sync() -> None:
    engine = WatchedEngine()
    fit(module(policy_of("tied")), engine, 2, val_check_interval=1, check_val_every_n_epoch=None)
    assert engine.writes == [0, 1, 1, 2], "train, validate, train, validate"
    assert engine.syncs == [0, 1, 2]


def test_a_step_that_changes_nothing_syncs_nothing() -> None:
    """A gradient that is not finite leaves its update out, and with it the version."""
    engine = WatchedEngine()

    class Broken(GRPO):
        def loss(self, micro_batch: RolloutBatch, totals: Any) -> torch.Tensor:
            loss = super().loss(micro_batch, totals)
            return loss * float("nan") if self.step == 1 else loss

    sampling = Sampling(max_completion_length=3)
    model = Broken(
        policy=policy_of("tied"),
        reward=[by_place],
        num_generations=4,
        sampling=sampling,
        on_nonfinite="skip",
    )
    fit(model, engine, 4, limit_val_batches=0)
    assert engine.writes == [0, 1, 1, 2] and engine.syncs == [0, 1, 2]


@pytest.mark.parametrize("kind", ["tied", "lora"])
def test_a_resumed_run_begins_with_the_weights_of_the_checkpoint(kind: str, tmp_path: Path) -> None:
    first = fit(module(policy_of(kind)), WatchedEngine(), 2, limit_val_batches=0)
    first.save_checkpoint(tmp_path / "two.ckpt")
    engine = WatchedEngine()
    fit(module(policy_of(kind)), engine, 4, limit_val_batches=0, ckpt=tmp_path / "two.ckpt")
    assert engine.syncs == engine.writes == [2, 3]


def test_an_engine_that_was_closed_holds_nothing() -> None:
    """After a run the policy may have changed without a version, as when the best weights are taken."""
    engine, model = WatchedEngine(), module(policy_of("tied"))
    trainer = fit(model, engine, 1, val_check_interval=1, check_val_every_n_epoch=None)
    with torch.no_grad():
        model.policy.get_input_embeddings().weight.mul_(1.5)
    trainer.validate(model, datamodule=trainer.datamodule, verbose=False)
    assert engine.syncs == [0, 1, 1]


def test_stale_tokens_are_counted() -> None:
    class Stuck(WatchedEngine):
        def generate(self, prompts: RolloutBatch, **settings: Any) -> RolloutBatch:
            rows = super().generate(prompts, **settings)
            assert rows.policy_version is not None
            rows.policy_version[0] -= 1
            return rows

    seen = Seen()
    fit(module(policy_of("tied")), Stuck(), 1, seen, limit_val_batches=0)
    metrics = seen.metrics[0]
    assert 0 < metrics["rollout/stale_tokens"] < metrics["rollout/tokens"]
