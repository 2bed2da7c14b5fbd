"""Real training steps on stored rollouts, in one process or in each of several ranks."""

from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy
from tiny_parts import scored_rows
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


def embedded_chat() -> Chat:
    """The embedded tokenizer and its template."""
    tokenizer = AutoTokenizer.from_pretrained(resolve_model_path("embedded").folder_or_id)
    return Chat(tokenizer, chat_template_kwargs={}, max_prompt_length=None, truncation="error")


def rows_with_prompts(**sizes: Any) -> RolloutBatch:
    """`scored_rows` with a chat prompt in each row, as the teacher needs it; the engine's logps; baselines.

    Rewards and logps are float64, so that sums in another order stay within 1e-10.
    """
    batch = scored_rows(**sizes)
    assert batch.rewards is not None
    batch.rewards = batch.rewards.double()
    batch.columns = {
        "prompt": [[{"role": "user", "content": f"{row}+1=?"}] for row in batch.prompt_row.tolist()],
        "data_source": ["test"] * len(batch),
    }
    assert batch.completion_ids is not None
    noise = torch.randn(batch.completion_ids.shape, generator=torch.Generator().manual_seed(1))
    batch.rollout_logps = noise.double() / 2 - 4.85
    batch.baselines = (batch.prompt_row % 2).double()
    return batch


def fit(
    module: RLModule,
    batches: list[RolloutBatch],
    chat: Chat,
    callbacks: list[L.Callback] | None = None,
    ranks: int = 1,
) -> None:
    """One step for each batch.

    Args:
        module: what is trained.
        batches: of this rank.
        chat: tokenizer and template.
        callbacks: more of them.
        ranks: processes that train together; each calls this, with LOCAL_RANK in its environment.
    """
    trainer = L.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy="auto" if ranks == 1 else DDPStrategy(process_group_backend="gloo"),
        use_distributed_sampler=False,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks or [],
    )
    trainer.fit(module, datamodule=StoredRollouts(batches, chat))


def constant_rate(optimizer: torch.optim.Optimizer, total_steps: int) -> LambdaLR:
    """A schedule that stays at the peak."""
    return LambdaLR(optimizer, lambda step: 1.0)
