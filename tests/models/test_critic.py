"""ValueModel: a number for each completion token, from the position that predicts it."""

from collections.abc import Callable

import pytest
import torch

from lit_rl.batch import RolloutBatch
from lit_rl.errors import ConfigError
from lit_rl.models.critic import ValueModel, critic_words, load_critic, vocabulary_size
from lit_rl.models.load import LoRA
from lit_rl.models.score import Rows


def rows_of(batch: RolloutBatch) -> Rows:
    return Rows(batch.prompt_ids, batch.prompt_len, batch.completion_ids, batch.completion_len)


def with_random_head(model: ValueModel) -> ValueModel:
    torch.manual_seed(1)
    torch.nn.init.normal_(model.head.weight)
    torch.nn.init.constant_(model.head.bias, 0.5)
    return model


@pytest.fixture
def critic(tiny_policy: Callable) -> ValueModel:
    return with_random_head(ValueModel(tiny_policy(dtype=torch.float64)))


@pytest.mark.field("num/13")
def test_a_value_is_made_of_what_came_before_its_token(critic: ValueModel, make_batch: Callable) -> None:
    """One row at a time, without padding: the hidden state in front of each token through the head."""
    batch = make_batch()
    values = critic(rows_of(batch))
    for row in range(len(batch)):
        prompt = batch.prompt_ids[row, -batch.prompt_len[row] :]
        completion = batch.completion_ids[row, : batch.completion_len[row]]
        ids = torch.cat([prompt, completion])[None]
        hidden = critic.backbone.model(input_ids=ids).last_hidden_state[0]
        ahead = hidden[len(prompt) - 1 : -1] @ critic.head.weight[0] + critic.head.bias
        torch.testing.assert_close(values[row, : len(completion)], ahead, rtol=0, atol=1e-10)
        assert not values[row, len(completion) :].any()


def test_the_last_token_is_not_seen(critic: ValueModel, make_batch: Callable) -> None:
    batch = make_batch(ragged=False)
    before = critic(rows_of(batch))
    batch.completion_ids[:, -1] = 5
    assert torch.equal(before, critic(rows_of(batch)))
    batch.completion_ids[:, -2] = 5
    assert not torch.equal(before[:, -1], critic(rows_of(batch))[:, -1])


def test_values_start_at_zero_and_all_weights_but_the_old_head_train(tiny_policy: Callable) -> None:
    model = ValueModel(tiny_policy())
    rows = Rows(torch.tensor([[7, 8]]), torch.tensor([2]), torch.tensor([[9]]), torch.tensor([1]))
    assert not model(rows).any()
    assert not any("lm_head" in name for name, _ in model.named_parameters())
    assert vocabulary_size(model) == vocabulary_size(tiny_policy())


def test_half_precision_weights_have_a_head_in_float32(tiny_policy: Callable, make_batch: Callable) -> None:
    model = with_random_head(ValueModel(tiny_policy(dtype=torch.bfloat16)))
    assert model.head.weight.dtype == model(rows_of(make_batch())).dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(rows_of(make_batch())).dtype == torch.float32


def test_a_critic_loads_as_a_policy_does(make_batch: Callable) -> None:
    """From the same keys, adapters included; the value head trains beside them."""
    critic = load_critic(path="embedded", lora=LoRA(lora_rank=2))
    trained = {name for name, parameter in critic.named_parameters() if parameter.requires_grad}
    assert {"head.weight", "head.bias"} < trained
    assert all("lora_" in name or name.startswith("head.") for name in trained)


def test_a_mistake_names_the_critic_s_key() -> None:
    with pytest.raises(ConfigError, match=r"^algo\.critic\.model\.dtype must be"):
        load_critic(dtype="float8")
    text = "model.path '/a/model.safetensors' and base_model.x"
    assert critic_words(text) == "algo.critic.model.path '/a/model.safetensors' and base_model.x"
