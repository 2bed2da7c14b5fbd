"""Real training steps on stored rollouts: a Lightning trainer, SGD at rate 1, so a step's change is its
gradient.
"""

from collections.abc import Callable
from functools import partial

import lightning as L
import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import AutoTokenizer

from lit_rl.algorithms.base import RLModule
from lit_rl.batch import RolloutBatch
from lit_rl.data.chat import Chat
from lit_rl.paths import resolve_model_path


class StoredRollouts(L.LightningDataModule):
    """A datamodule whose batches carry their completions."""

    prompt_key, data_source_key = "prompt", "data_source"
    reward_model_key, privileged_context_key = "reward_model", "privileged_context"

    def __init__(self, batches: list[RolloutBatch], chat: Chat) -> None:
        super().__init__()
        self.batches, self.chat = batches, chat

    def total_steps(self, max_steps: int) -> int:
        return len(self.batches)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.batches, batch_size=None)  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def chat() -> Chat:
    """The embedded tokenizer and its template."""
    tokenizer = AutoTokenizer.from_pretrained(resolve_model_path("embedded").folder_or_id)
    return Chat(tokenizer, chat_template_kwargs={}, max_prompt_length=None, truncation="error")


@pytest.fixture
def with_prompts(make_batch: Callable[..., RolloutBatch]) -> Callable[..., RolloutBatch]:
    """`make_batch` with a chat prompt in each row, as the teacher needs it; and the engine's logps."""

    def build(**sizes: int) -> RolloutBatch:
        batch = make_batch(**sizes)
        batch.columns = {
            "prompt": [[{"role": "user", "content": f"{row}+1=?"}] for row in batch.prompt_row.tolist()],
            "data_source": ["test"] * len(batch),
        }
        noise = torch.randn(batch.completion_ids.shape, generator=torch.Generator().manual_seed(1))
        batch.rollout_logps = noise.double() / 2 - 4.85
        return batch

    return build


@pytest.fixture
def train(chat: Chat) -> Callable[..., RLModule]:
    """A function that trains a module on stored rollouts, one step each, and returns it."""

    def run(
        module: RLModule, batches: list[RolloutBatch], callbacks: list[L.Callback] | None = None
    ) -> RLModule:
        trainer = L.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=callbacks or [],
        )
        trainer.fit(module, datamodule=StoredRollouts(batches, chat))
        return module

    return run


@pytest.fixture
def plain_sgd() -> dict[str, Callable]:
    """Optimizer and scheduler arguments of a module: rate 1, constant."""
    return {"optimizer": partial(torch.optim.SGD, lr=1.0), "scheduler": constant_rate}


def constant_rate(optimizer: torch.optim.Optimizer, total_steps: int) -> LambdaLR:
    """A schedule that stays at the peak."""
    return LambdaLR(optimizer, lambda step: 1.0)
