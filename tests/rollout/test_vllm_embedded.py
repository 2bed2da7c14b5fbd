"""vLLM in process with the embedded model and its tokenizer: grammars, stop strings, adapters alone."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoTokenizer

from lit_rl import load_policy
from lit_rl.batch import RolloutBatch
from lit_rl.errors import ConfigError
from lit_rl.models.roles import named_base_tensors
from lit_rl.paths import resolve_model_path
from lit_rl.rollout.vllm_adapter import AdapterFolder
from lit_rl.rollout.vllm_colocate import VLLMColocate

from .tiny import bound, completions, generate, plain_logps, prompts_of

TOKENIZER = AutoTokenizer.from_pretrained(resolve_model_path("embedded").folder_or_id)
PROMPTS = [TOKENIZER.encode(text) for text in ("12+34=", "7-5=", "95+8=")]


def with_adapters() -> Any:
    torch.manual_seed(0)
    lora = LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "v_proj", "down_proj"])
    policy = get_peft_model(load_policy("embedded"), lora)
    moved(policy, 0)
    return policy


def moved(policy: nn.Module, seed: int) -> None:
    """Other adapters."""
    torch.manual_seed(seed)
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.2)


@pytest.fixture(scope="module")
def case() -> Iterator[tuple[Any, VLLMColocate]]:
    policy = with_adapters()
    engine = VLLMColocate(gpu_memory_utilization=0.1, max_num_seqs=64, lora_as_adapter=True)
    engine.bind(
        policy,
        end_token_ids=[TOKENIZER.eos_token_id],
        pad_token_id=0,
        decode=TOKENIZER.decode,
        tokenizer=TOKENIZER,
        max_tokens=64,
    )
    yield policy, engine
    engine.close()


def texts(rows: RolloutBatch) -> list[str]:
    return [TOKENIZER.decode(ids, skip_special_tokens=True) for ids in completions(rows)]


@pytest.mark.vllm
def test_adapters_by_themselves_write_what_merged_weights_would(case) -> None:
    policy, engine = case
    prompts = prompts_of(PROMPTS)
    written = []
    for version in (1, 2, 3):
        moved(policy, version)
        engine.sync_weights(named_base_tensors(policy), version)
        greedy = generate(engine, prompts, temperature=0.0, ignore_eos=True)
        assert completions(greedy) == completions(
            generate(bound(policy), prompts, temperature=0.0, ignore_eos=True)
        )
        drawn = generate(engine, prompts, G=4, temperature=0.7)
        expected = plain_logps(policy, drawn, temperature=0.7)
        torch.testing.assert_close(drawn.rollout_logps, expected, atol=1e-4, rtol=0)
        written.append(completions(greedy))
    assert written[0] != written[1] != written[2]
    trained = {name for name, parameter in policy.named_parameters() if parameter.requires_grad}
    assert trained and all(".lora_" in name for name in trained), "the policy is left as it was"
    with pytest.raises(ConfigError, match="lora_as_adapter must be false where the engine scores"):
        engine.score(drawn)


@pytest.mark.vllm
def test_completions_follow_a_regular_expression(case) -> None:
    policy, engine = case
    engine.sync_weights(named_base_tensors(policy), 10)
    rows = generate(engine, prompts_of(PROMPTS), G=8, temperature=1.5, guided_decoding_regex="[0-9]{2,3}")
    assert all(re.fullmatch("[0-9]{2,3}", text) for text in texts(rows)) and len(set(texts(rows))) > 3
    assert rows.rollout_logps is None, "those would be of the grammar's distribution"


@pytest.mark.vllm
def test_a_stop_string_ends_a_completion(case) -> None:
    policy, engine = case
    engine.sync_weights(named_base_tensors(policy), 20)
    rows = generate(engine, prompts_of(PROMPTS), G=8, temperature=1.5, stop=["1"], ignore_eos=True)
    ended = [text for text, reason in zip(texts(rows), rows.finish_reason, strict=True) if reason == "stop"]
    assert ended and all(text.endswith("1") and text.count("1") == 1 for text in ended)


@pytest.mark.vllm
def test_entries_of_generation_kwargs_win(case) -> None:
    policy, engine = case
    engine.sync_weights(named_base_tensors(policy), 30)
    end = TOKENIZER.eos_token_id
    kwargs = {"min_tokens": 6, "max_tokens": 7, "allowed_token_ids": [*PROMPTS[0][:3], end]}
    rows = generate(engine, prompts_of(PROMPTS), G=8, temperature=1.5, generation_kwargs=kwargs)
    assert set(rows.completion_len.tolist()) <= {6, 7}
    assert {token for ids in completions(rows) for token in ids} <= {*PROMPTS[0][:3], end}


def test_what_vllm_cannot_take_as_an_adapter_is_refused(tmp_path) -> None:
    policy = with_adapters()
    assert AdapterFolder(policy, tmp_path).arguments == {"enable_lora": True, "max_lora_rank": 8}
    policy.get_base_model().get_input_embeddings().weight.requires_grad_(True)
    with pytest.raises(ConfigError, match=r"lora_as_adapter must be false .*embed_tokens.weight trains"):
        AdapterFolder(policy, tmp_path)
    with pytest.raises(ConfigError, match=r"lora_as_adapter needs LoRA adapters"):
        AdapterFolder(load_policy("embedded"), tmp_path)
