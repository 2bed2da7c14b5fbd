"""A small module with what callbacks may rely on, and a way to train it for a few steps."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from hydra import compose, initialize_config_dir
from torch import Tensor, nn

from lit_rl.batch import RolloutBatch
from lit_rl.hooks import emit
from lit_rl.timing import Clock

CONF = Path(__file__).resolve().parents[2] / "conf"

METRICS = {
    "train/loss": 0.5,
    "train/lr": 0.1,
    "train/grad_norm": 1.0,
    "rollout/reward": 0.25,
    "rollout/reward_std": 0.5,
    "rollout/zero_variance_frac": 0.0,
    "rollout/all_wrong_frac": 0.0,
    "rollout/truncated_frac": 0.0,
    "rollout/completion_len": 4.0,
    "rollout/tokens": 32.0,
    "rollout/loss_tokens": 32.0,
    "rollout/tokens_per_second": 100.0,
    "time/generate": 0.01,
    "time/score": 0.0,
    "time/teacher": 0.0,
    "time/update": 0.01,
}


class FakePart:
    """A moving part outside the parameters, such as an averaged teacher."""

    def __init__(self, is_moving: bool = True) -> None:
        self.value = torch.zeros(2)
        self.is_moving = is_moving

    def state_dict(self) -> dict[str, Tensor]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.value = state["value"]


class FakeRLModule(L.LightningModule):
    """Manual optimization over a linear policy; one optimizer step per iteration; metrics by script."""

    def __init__(self, script: Callable[[int], dict[str, float]] | None = None, width: int = 3) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.policy = nn.Linear(width, 1)
        self.script = script or (lambda step: {})
        self.seed = 7
        self.clock = Clock()
        self.ref: Any = None
        self.teacher: Any = FakePart()
        self.optimizer_steps = 0
        self.num_generations = 2
        self.metrics: dict[str, float] = {}
        self.last_rollout: RolloutBatch | None = None
        self.make_rollout: Callable[[int], RolloutBatch] | None = None
        self.val_accuracy: Callable[[int], float] = lambda step: 0.5
        self.seen: list[float] = []

    @property
    def stateful(self) -> dict[str, Any]:
        return {name: part for name, part in {"teacher": self.teacher}.items() if part is not None}

    def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Any]:
        optimizer = self.optimizers()
        self.seen.append(float(batch[0, 0]))
        with self.clock("update"):
            loss = (self.policy(batch) - 1).square().mean()
            self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        self.optimizer_steps += 1
        self.lr_schedulers().step()
        if self.teacher is not None:
            self.teacher.value += 0.1 * self.policy.weight.detach()[0, :2]
        step = self.trainer.global_step
        self.metrics = {**METRICS, **self.script(step)}
        self.log_dict(self.metrics)
        if self.make_rollout is not None:
            self.last_rollout = self.make_rollout(step)
        emit(self, "on_update_end", step=step, metrics=self.metrics)
        return {"loss": loss.detach(), "metrics": self.metrics}

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        with self.clock("validate"):
            pass

    def on_validation_epoch_end(self) -> None:
        value = self.val_accuracy(self.trainer.global_step)
        self.log_dict({"val/accuracy": value, "val/accuracy/easy": value, "val/reward": value})

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["lit_rl"] = {
            "optimizer_steps": self.optimizer_steps,
            "seconds": dict(self.clock.total),
            "roles": {name: part.state_dict() for name, part in self.stateful.items()},
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.optimizer_steps = checkpoint["lit_rl"]["optimizer_steps"]
        self.clock.total.update(checkpoint["lit_rl"]["seconds"])
        for name, state in checkpoint["lit_rl"]["roles"].items():
            self.stateful[name].load_state_dict(state)


class FakeLoader:
    """One batch per step of the run, each the number of its step; resumes where it was."""

    def __init__(self, steps: int, width: int) -> None:
        self.steps, self.width, self.served = steps, width, 0

    def __len__(self) -> int:
        return self.steps

    def __iter__(self):
        while self.served < self.steps:
            self.served += 1
            yield torch.full((2, self.width), float(self.served))

    def state_dict(self) -> dict[str, int]:
        return {"served": self.served}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.served = state["served"]


@pytest.fixture
def fake_module() -> type[FakeRLModule]:
    return FakeRLModule


@pytest.fixture
def fake_part() -> type[FakePart]:
    return FakePart


@pytest.fixture
def train(tmp_path) -> Callable[..., L.Trainer]:
    """A function that trains a module for some steps with callbacks; other arguments go to `Trainer`."""

    def run(
        module: FakeRLModule, callbacks: list, steps: int = 3, ckpt_path: Any = None, **arguments: Any
    ) -> L.Trainer:
        settings = {
            "max_steps": steps,
            "logger": False,
            "enable_progress_bar": False,
            "limit_val_batches": 0 if "val_check_interval" not in arguments else 1,
            **arguments,
        }
        trainer = L.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=1,
            num_sanity_val_steps=0,
            check_val_every_n_epoch=None,
            log_every_n_steps=1,
            enable_model_summary=False,
            enable_checkpointing=False,
            use_distributed_sampler=False,
            default_root_dir=tmp_path,
            callbacks=callbacks,
            **settings,
        )
        width = module.policy.in_features
        with suppress(KeyboardInterrupt):
            trainer.fit(module, FakeLoader(steps, width), FakeLoader(1, width), ckpt_path=ckpt_path)
        return trainer

    return run


@pytest.fixture
def composed():
    """A function that composes groups of conf/ without the rest of the configuration."""

    def compose_groups(*overrides: str):
        with initialize_config_dir(str(CONF), version_base="1.3"):
            return compose(overrides=["+run_dir=run", "+rollout={}", *overrides])

    return compose_groups
