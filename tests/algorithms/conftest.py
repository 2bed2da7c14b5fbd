"""Real training steps on stored rollouts: a Lightning trainer, SGD at rate 1, so a step's change is its
gradient.
"""

from collections.abc import Callable
from functools import partial

import lightning as L
import pytest
import torch
from stored_rollouts import constant_rate, embedded_chat, fit, rows_with_prompts

from lit_rl.algorithms.base import RLModule
from lit_rl.batch import RolloutBatch
from lit_rl.data.chat import Chat


@pytest.fixture(scope="session")
def chat() -> Chat:
    """The embedded tokenizer and its template."""
    return embedded_chat()


@pytest.fixture
def with_prompts() -> Callable[..., RolloutBatch]:
    """`make_batch` with a chat prompt in each row, as the teacher needs it; and the engine's logps."""
    return rows_with_prompts


@pytest.fixture
def train(chat: Chat) -> Callable[..., RLModule]:
    """A function that trains a module on stored rollouts, one step each, and returns it."""

    def run(
        module: RLModule, batches: list[RolloutBatch], callbacks: list[L.Callback] | None = None
    ) -> RLModule:
        fit(module, batches, chat, callbacks)
        return module

    return run


@pytest.fixture
def plain_sgd() -> dict[str, Callable]:
    """Optimizer and scheduler arguments of a module: rate 1, constant."""
    return {"optimizer": partial(torch.optim.SGD, lr=1.0), "scheduler": constant_rate}
