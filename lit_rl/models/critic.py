"""The critic: a model of its own with a value head, one number for each completion token."""

import functools
import re
from typing import Any

import torch
from torch import Tensor, nn

from lit_rl.batch import length_mask
from lit_rl.errors import ConfigError
from lit_rl.models.load import load_policy
from lit_rl.models.score import Rows, completion_hidden
from lit_rl.models.weights import base_of

KEY = "algo.critic.model"
_POLICY_KEY = re.compile(r"(?<![\w./])model\.(?=[a-z])")


class ValueModel(nn.Module):
    """A language model whose output head gives way to a linear map to one number.

    The head starts at zero, so that every first value is 0 whatever the seed, and in float32 or better.

    Args:
        backbone: a Hugging Face causal language model, or a PEFT model around one. It is taken over: its
            output head is removed.
    """

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        base = base_of(backbone)
        width = base.get_output_embeddings().weight.shape[1]
        base.set_output_embeddings(nn.Identity())
        self.backbone = backbone
        self.head = nn.Linear(width, 1, dtype=torch.promote_types(base.dtype, torch.float32))
        for parameter in self.head.parameters():
            nn.init.zeros_(parameter)

    def forward(self, rows: Rows) -> Tensor:
        """What each token is expected to earn from there on, estimated before it is emitted.

        Args:
            rows: prompts and completions of B rows.

        Returns:
            (B, T) float32 or better; 0 at padding.
        """
        is_token = length_mask(rows.completion_len, rows.completion_ids.shape[1])  # (B, T)
        hidden = completion_hidden(self.backbone, rows)  # (N, H)
        with torch.autocast(hidden.device.type, enabled=False):
            values = self.head(hidden.to(self.head.weight.dtype)).squeeze(-1)  # (N,)
        return values.new_zeros(is_token.shape).masked_scatter(is_token, values)


def vocabulary_size(model: nn.Module) -> int:
    """Tokens that a policy or critic can read."""
    return base_of(getattr(model, "backbone", model)).get_input_embeddings().weight.shape[0]


@functools.wraps(load_policy, assigned=("__doc__", "__annotations__"))
def load_critic(*arguments: Any, **settings: Any) -> nn.Module:
    """`load_policy` with a value head, and messages that name the critic's keys."""
    try:
        return ValueModel(load_policy(*arguments, **settings))
    except ConfigError as error:
        raise ConfigError(critic_words(str(error))) from error


def critic_words(text: str) -> str:
    """A message about `model.*` as one about the critic's keys."""
    return _POLICY_KEY.sub(f"{KEY}.", text)
