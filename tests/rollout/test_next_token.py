import copy

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lit_rl.errors import ConfigError
from lit_rl.rollout.next_token import NextToken, decoding

from .tiny import llama

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")


def flags(model: nn.Module) -> list[tuple[bool, bool | None]]:
    return [(m.training, getattr(m, "gradient_checkpointing", None)) for m in model.modules()]


def mixed_model() -> nn.Module:
    """Training, checkpointed, one layer in evaluation mode, one layer not checkpointed."""
    model = llama().train()
    model.gradient_checkpointing_enable()
    model.model.layers[0].eval()
    model.model.layers[1].gradient_checkpointing = False
    return model


@pytest.mark.field("gen/4")
def test_every_flag_is_as_before_after_decoding() -> None:
    model = mixed_model()
    before = flags(model)
    with decoding(model):
        assert not any(training or checkpointed for training, checkpointed in flags(model))
        assert not torch.is_grad_enabled()
    assert flags(model) == before
    assert torch.is_grad_enabled()


def test_every_flag_is_as_before_when_decoding_fails() -> None:
    model = mixed_model()
    before = flags(model)
    with pytest.raises(KeyError), decoding(model):
        raise KeyError
    assert flags(model) == before


def test_older_models_get_their_cache_by_its_older_name() -> None:
    class Older(nn.Module):
        """Takes `past_key_values`, gives no choice of positions or logits."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = llama()
            self.config = self.inner.config

        def forward(self, input_ids, attention_mask=None, past_key_values=None, use_cache=None):
            return self.inner(input_ids, attention_mask, cache=past_key_values, use_cache=use_cache)

    older = Older().eval()
    ids, mask = torch.tensor([[5, 6, 7]]), torch.ones(1, 3, dtype=torch.bool)
    results = []
    for model in (older, copy.deepcopy(older.inner)):
        next_token = NextToken(model)
        with next_token.reading(4):
            next_token(ids[:, :2], torch.tensor([[0, 1]]), mask[:, :2])
            results.append(next_token(ids[:, 2:], torch.tensor([[2]]), mask))
    torch.testing.assert_close(*results)


def test_a_model_without_a_cache_is_refused_by_name() -> None:
    class Plain(nn.Module):
        def forward(self, input_ids):
            return input_ids

    with pytest.raises(ConfigError, match="holds a Plain, whose forward takes no key-value cache"):
        NextToken(Plain())


def test_reading_prompts_multiplies_by_the_head_once() -> None:
    """As a batch of matrix products it would copy the head's weights for each prompt."""
    next_token = NextToken(llama().eval().requires_grad_(False))  # as an engine's copy
    ids, mask = torch.arange(2, 14).view(3, 4), torch.ones(3, 4, dtype=torch.bool)
    positions = torch.arange(4).expand(3, 4)
    with torch.no_grad(), next_token.reading(5), FlopCounterMode(display=False) as counter:
        next_token(ids, positions, mask)
    assert torch.ops.aten.mm in counter.get_flop_counts()["Global"]
    assert torch.ops.aten.bmm not in counter.get_flop_counts()["Global"]
