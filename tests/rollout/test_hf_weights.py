"""Weights that change under the engine, and what it refuses."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import PreTrainedModel

from lit_rl.errors import ConfigError, DataError
from lit_rl.rollout.hf import HFEngine

from .tiny import (
    END,
    PAD,
    bound,
    completions,
    generate,
    gpt2,
    llama,
    numbers_as_text,
    plain_logps,
    prompts_of,
)


def with_lora(model: PreTrainedModel) -> nn.Module:
    policy = get_peft_model(model, LoraConfig(r=2, lora_alpha=8, target_modules=["q_proj", "down_proj"]))
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.3)
    return policy


def test_a_policy_with_lora_writes_with_its_adapters() -> None:
    plain = completions(generate(bound(llama()), temperature=0.0))
    policy = with_lora(llama())
    rows = generate(bound(policy), temperature=0.0)
    merged = policy.merge_and_unload()
    assert completions(rows) == completions(generate(bound(merged), temperature=0.0)) != plain


def test_a_shared_model_writes_with_new_weights_at_once() -> None:
    model = llama()
    engine = bound(model)
    before = completions(generate(engine, temperature=0.0))
    model.load_state_dict(llama(seed=1).state_dict())
    engine.sync_weights(iter(()), 3)
    assert engine.policy_version == 3
    after = completions(generate(engine, temperature=0.0))
    assert after == completions(generate(bound(llama(seed=1)), temperature=0.0)) != before


@pytest.mark.field("vllm/6")
@pytest.mark.parametrize("has_lora", [False, True])
def test_a_copy_in_another_dtype_writes_with_what_was_synced_last(has_lora: bool) -> None:
    policy = with_lora(llama()) if has_lora else llama()
    engine = HFEngine(dtype="float64")
    engine.bind(policy, end_token_ids=[END], pad_token_id=PAD, decode=numbers_as_text)
    assert engine.policy_version == -1
    before = completions(generate(engine))
    assert before == completions(generate(bound(policy)))
    other = llama(seed=1)
    (policy.get_base_model() if has_lora else policy).load_state_dict(other.state_dict(), strict=False)
    assert completions(generate(engine)) == before
    engine.sync_weights(other.named_parameters(), 1)
    rows = generate(engine)
    assert completions(rows) == completions(generate(bound(other)))
    assert rows.policy_version.unique().tolist() == [1]


def test_a_copy_in_bfloat16_reports_float32_log_probabilities() -> None:
    engine = HFEngine(dtype="bfloat16")
    model = llama()
    engine.bind(model, end_token_ids=[END], pad_token_id=PAD, decode=numbers_as_text)
    rows = generate(engine, G=4)
    assert rows.rollout_logps.dtype == torch.float32
    torch.testing.assert_close(rows.rollout_logps, plain_logps(model, rows), atol=0.5, rtol=0)
    assert next(model.parameters()).dtype == torch.float32


def test_weights_that_are_not_finite_stop_the_rollout_by_name() -> None:
    model = llama()
    engine = bound(model)
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    with pytest.raises(
        RuntimeError, match="logits of data row 0 are not finite at token 0; policy version 0"
    ):
        generate(engine)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "int8"}, r"rollout.engine.dtype must be one of auto, float32, .* \(found 'int8'\)"),
        ({"max_num_seqs": 0}, r"rollout.engine.max_num_seqs must be >= 1 \(found 0\)"),
        ({"cache_implementation": "offloaded"}, r"rollout.engine.cache_implementation must be null"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_a_model_is_there(settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        HFEngine(**settings)


def test_a_regex_is_refused_with_the_engines_that_can() -> None:
    with pytest.raises(
        ConfigError, match=r"guided_decoding_regex must be null with rollout=hf .*rollout=vllm"
    ):
        generate(bound(llama()), guided_decoding_regex="[0-9]+")


def test_completions_that_leave_the_learned_positions_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"max_completion_length must be <= 53 for a prompt of 11 tokens"):
        generate(bound(gpt2()), max_completion_length=54)


def test_a_prompt_without_tokens_is_refused_by_its_row() -> None:
    with pytest.raises(DataError, match="data row 9 has a prompt without tokens"):
        generate(bound(llama()), prompts_of([[3], []], [8, 9]))
