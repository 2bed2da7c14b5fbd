"""When an engine that shares the trainer's memory is asleep, and in which order it wakes."""

from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch

from lit_rl import GRPO, PromptDataModule, Sampling, load_policy
from lit_rl.callbacks.rollout import RolloutGeneration
from lit_rl.rollout.hf import HFEngine
from lit_rl.rollout.vllm_colocate import VLLMColocate

ROWS = [{"prompt": f"{a}+{a + 1}="} for a in range(10, 30)]


def by_place(completions: list[str], **columns: Any) -> list[float]:
    return [float(i % 2) for i in range(len(completions))]


class RecordingEngine(HFEngine):
    """The HF engine in a copy of its own, and what it was asked to do, in order."""

    def __init__(self, calls: list[str]) -> None:
        super().__init__(dtype="float64")
        self.calls = calls

    def __getattribute__(self, name: str) -> Any:
        if name in ("wake_weights", "sync_weights", "wake", "generate", "sleep"):
            object.__getattribute__(self, "calls").append(name)
        return object.__getattribute__(self, name)


class RecordedSGD(torch.optim.SGD):
    calls: list[str]

    def step(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append("update")
        return super().step(*args, **kwargs)


@pytest.mark.field("mem/4")
def test_it_wakes_in_parts_and_sleeps_before_every_update() -> None:
    calls: list[str] = []

    def optimizer(parameters: Any) -> RecordedSGD:
        made = RecordedSGD(parameters, lr=1.0)
        made.calls = calls
        return made

    model = GRPO(
        policy=load_policy("embedded"), reward=[by_place], num_generations=4,
        sampling=Sampling(max_completion_length=3), optimizer=optimizer,
    )  # fmt: skip
    data = PromptDataModule(train_files=ROWS, val_files=ROWS[:2], train_batch_size=2, max_prompt_length=32)
    trainer = L.Trainer(
        accelerator="cpu", max_steps=2, num_sanity_val_steps=0, val_check_interval=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[RolloutGeneration(RecordingEngine(calls))],
    )  # fmt: skip
    trainer.fit(model, datamodule=data)
    changed = ["wake_weights", "sync_weights", "wake", "generate", "sleep"]
    train, validate = [*changed, "update"], changed
    unchanged = ["wake", "generate", "sleep", "update"]
    assert calls == [*train, *validate, *unchanged, *validate]


@pytest.mark.field("mem/4")
def test_vllm_frees_the_trainers_cache_then_wakes_its_weights_then_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a recorder in place of vLLM, whose sleep frees nothing on a CPU."""
    calls: list[str] = []
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: calls.append("free caches"))
    engine = VLLMColocate(free_cache_engine=False)
    engine.free_cache_engine = True
    engine._llm = SimpleNamespace(
        sleep=lambda level: calls.append("sleep"), wake_up=lambda tags: calls.append(f"wake {' '.join(tags)}")
    )
    engine.wake()
    engine.sleep()
    engine.sleep()
    engine.wake_weights()
    calls.append("update weights")
    engine.wake()
    engine.wake()
    assert calls == ["sleep", "free caches", "wake weights", "update weights", "wake kv_cache"]
