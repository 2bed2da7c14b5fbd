"""A real vLLM in this process writes what the policy of the last sync would; the trainer stays as it was."""

import os
from collections.abc import Iterator

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaForCausalLM

from lit_rl.models.roles import named_base_tensors
from lit_rl.rollout.vllm_colocate import VLLMColocate

from .tiny import (
    END,
    PAD,
    RAGGED,
    bound,
    completions,
    generate,
    llama,
    numbers_as_text,
    plain_logps,
    prompts_of,
)

pytestmark = pytest.mark.vllm

SHAPE = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}  # vLLM takes heads of 64
PROMPTS = [*RAGGED, list(range(2, 38)) * 2]


def perturbed(model: nn.Module, seed: int) -> nn.Module:
    """The same model in place, every weight moved."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def case(request: pytest.FixtureRequest) -> Iterator[tuple[LlamaForCausalLM, VLLMColocate]]:
    model = llama(tie_word_embeddings=request.param, **SHAPE)
    engine = VLLMColocate(gpu_memory_utilization=0.15, max_num_seqs=64)
    engine.bind(model, end_token_ids=[END], pad_token_id=PAD, decode=numbers_as_text, max_tokens=128)
    yield model, engine
    engine.close()


@pytest.mark.field("vllm/3")
@pytest.mark.field("vllm/6")
def test_after_every_sync_it_writes_with_the_new_weights(case) -> None:
    """Stale heads, half-sent groups and a surviving prefix cache would all show here."""
    model, engine = case
    for version in range(1, 4):
        perturbed(model, version)
        engine.sync_weights(named_base_tensors(model), version)
        greedy = generate(engine, PROMPTS, temperature=0.0, ignore_eos=True)
        assert completions(greedy) == completions(_by_transformers(model)), version
        drawn = generate(engine, PROMPTS, G=4, temperature=0.7)
        assert drawn.policy_version.unique().tolist() == [version]
        expected = plain_logps(model, drawn, temperature=0.7)
        torch.testing.assert_close(drawn.rollout_logps, expected, atol=1e-4, rtol=0)


@pytest.fixture
def narrow() -> Iterator[VLLMColocate]:
    """Reads two of the prompts at once, and a part of a third."""
    engine = VLLMColocate(gpu_memory_utilization=0.3, max_num_seqs=8, max_num_batched_tokens=160)
    model = llama(**SHAPE)
    engine.bind(model, end_token_ids=[END], pad_token_id=PAD, decode=numbers_as_text, max_tokens=100)
    engine.sync_weights(named_base_tensors(model), 0)
    yield engine
    engine.close()


def test_more_prompts_than_are_read_at_once_wait(narrow: VLLMColocate) -> None:
    """A seeded request whose prompt is read in two passes kills the engine on a CPU."""
    prompts = [[n] + list(range(2, 38)) * 2 for n in range(2, 10)]
    rows = generate(narrow, prompts, G=2, ignore_eos=True)
    assert rows.completion_len.tolist() == [12] * 16


@pytest.mark.parametrize("left_out", ["q_proj", "lm_head"])
def test_an_update_that_leaves_weights_out_is_seen(case, left_out: str) -> None:
    model, engine = case
    has_head = any("lm_head" in name for name, _ in named_base_tensors(model))
    assert has_head, "tied weights come under each name"
    engine.sync_weights(named_base_tensors(model), 10)
    part = [(name, tensor) for name, tensor in named_base_tensors(model) if left_out not in name]
    with pytest.raises(RuntimeError, match="an update must bring all"):
        engine.sync_weights(part, 11)
    engine.sync_weights(named_base_tensors(model), 12)
    greedy = generate(engine, PROMPTS, temperature=0.0, ignore_eos=True)
    assert completions(greedy) == completions(_by_transformers(model))


@pytest.mark.field("vllm/1")
def test_adapters_arrive_merged(case) -> None:
    model, engine = case
    torch.manual_seed(0)
    policy = get_peft_model(model, LoraConfig(r=2, lora_alpha=8, target_modules=["q_proj", "down_proj"]))
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.3)
    engine.sync_weights(named_base_tensors(policy), 20)
    greedy = generate(engine, PROMPTS, temperature=0.0, ignore_eos=True)
    assert completions(greedy) == completions(_by_transformers(policy))
    policy.unload()


@pytest.mark.field("vllm/7")
def test_draws_depend_on_seed_step_row_and_generation_alone(case) -> None:
    model, engine = case
    engine.sync_weights(named_base_tensors(model), 30)
    first = completions(generate(engine, PROMPTS, G=4, seed=1))
    assert first == completions(generate(engine, PROMPTS, G=4, seed=1))
    assert first != completions(generate(engine, PROMPTS, G=4, seed=2))
    assert first != completions(generate(engine, PROMPTS, G=4, seed=1, step=1))
    assert len({tuple(row) for row in first[:4]}) > 1, "a group has several samples"
    assert first[:4] == completions(generate(engine, PROMPTS[:1], G=4, seed=1)), "alone or in a batch"


def test_ends_and_limits_are_ours(case) -> None:
    model, engine = case
    engine.sync_weights(named_base_tensors(model), 40)
    rows = generate(engine, PROMPTS, G=8, temperature=2.0, max_completion_length=20)
    assert set(rows.finish_reason) == {"stop", "length"}
    for ids, reason in zip(completions(rows), rows.finish_reason, strict=True):
        assert (END in ids) == (reason == "stop") and END not in ids[:-1]
        assert reason == "stop" or len(ids) == 20
    other = generate(engine, PROMPTS, G=8, temperature=2.0, ignore_eos=True, stop_token_ids=[7])
    assert all(7 not in ids[:-1] for ids in completions(other))
    assert any(END in ids[:-1] for ids in completions(other))


@pytest.mark.parametrize("topk", [0, 25])
def test_given_tokens_are_scored_under_another_prompt(case, topk: int) -> None:
    model, engine = case
    engine.sync_weights(named_base_tensors(model), 45)
    rows = generate(engine, PROMPTS, G=2, temperature=1.3)
    other = prompts_of(PROMPTS[::-1]).repeat(2)
    rows.prompt_ids, rows.prompt_len = other.prompt_ids, other.prompt_len
    found, expected = engine.score(rows, topk=topk), bound(model).score(rows, topk=topk)
    torch.testing.assert_close(found.logps, expected.logps, atol=1e-4, rtol=0)
    torch.testing.assert_close(found.top_logps, expected.top_logps, atol=1e-4, rtol=0)
    is_token = rows.token_mask[..., None].expand(found.top_ids.shape)
    assert (found.top_ids == expected.top_ids)[is_token].float().mean() > 0.98 if topk else True


def test_cut_sampling_reports_no_log_probabilities(case) -> None:
    model, engine = case
    engine.sync_weights(named_base_tensors(model), 50)
    assert generate(engine, PROMPTS, top_k=3).rollout_logps is None


def test_the_trainer_is_left_as_it_was(case) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    assert torch.get_num_threads() == 2, "set_num_threads still works"
    torch.set_num_threads(threads)
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in os.environ and "LD_PRELOAD" not in os.environ
    assert torch.is_grad_enabled() and torch.get_default_dtype() == torch.float32


def _by_transformers(model: nn.Module):
    from lit_rl.rollout.hf import HFEngine

    engine = HFEngine()
    engine.bind(model, end_token_ids=[END], pad_token_id=PAD, decode=numbers_as_text)
    engine.sync_weights([], 0)
    return generate(engine, PROMPTS, temperature=0.0, ignore_eos=True)
