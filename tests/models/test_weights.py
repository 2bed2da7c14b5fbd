"""What leaves the policy, for an engine or a folder, is the base model with its adapters added."""

import pytest
import torch
from tiny_models import make_rows, tiny_gpt2, tiny_llama, tiny_lora
from transformers import AutoModelForCausalLM, AutoTokenizer

from lit_rl.errors import ConfigError
from lit_rl.models.export import save_hf
from lit_rl.models.load import load_policy
from lit_rl.models.score import score
from lit_rl.models.weights import base_of, base_tensors, dense_copy, named_base_tensors, shared_copy


class RecordingEngine:
    """Keeps its own copy of every name that it is sent."""

    def __init__(self):
        self.tensors = {}

    def sync(self, policy):
        self.tensors = {name: tensor.clone() for name, tensor in named_base_tensors(policy)}


@pytest.mark.field("vllm/1")
@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2])
def test_an_engine_gets_merged_weights_under_base_names_and_the_policy_stays_bit_equal(make):
    names = [name for name, _ in make().named_parameters(remove_duplicate=False)]
    policy = tiny_lora(make(), b_std=0.2, fan_in_fan_out=make is tiny_gpt2)
    before = {name: p.clone() for name, p in policy.named_parameters()}
    engine = RecordingEngine()
    engine.sync(policy)
    first = engine.tensors
    for _ in range(50):
        engine.sync(policy)
        assert all(torch.equal(engine.tensors[name], first[name]) for name in first)
    assert sorted(first) == sorted(names)
    for name, p in policy.named_parameters():
        assert torch.equal(p, before[name])
    merged = policy.merge_and_unload().state_dict()
    for name, tensor in first.items():
        torch.testing.assert_close(tensor, merged[name], atol=1e-6, rtol=0)


@pytest.mark.field("vllm/3")
@pytest.mark.parametrize("tied", [True, False])
def test_tied_weights_are_sent_under_both_names(tied):
    policy, engine = tiny_llama(tie_word_embeddings=tied), RecordingEngine()
    engine.sync(policy)
    with torch.no_grad():
        policy.model.embed_tokens.weight += 0.1
    count = len(engine.tensors)
    engine.sync(policy)
    assert len(engine.tensors) == count
    assert torch.equal(engine.tensors["model.embed_tokens.weight"], policy.model.embed_tokens.weight)
    assert torch.equal(engine.tensors["lm_head.weight"], policy.lm_head.weight)


@pytest.mark.field("vllm/2")
def test_a_quantized_base_is_refused():
    policy = tiny_llama()
    policy.is_quantized, policy.quantization_method = True, "bitsandbytes"
    with pytest.raises(
        ConfigError, match=r"not quantized \(found LlamaForCausalLM, quantized by bitsandbytes"
    ):
        list(named_base_tensors(policy))


def test_only_what_trains_is_marked_as_moving():
    moving = {t.name for t in base_tensors(tiny_lora(tiny_llama(), target_modules=["q_proj"])) if t.is_moving}
    assert moving == {f"model.layers.{i}.self_attn.q_proj.weight" for i in range(2)}
    assert all(t.is_moving for t in base_tensors(tiny_llama()))


def test_merged_weights_keep_the_dtype_and_are_rounded_once():
    policy = tiny_lora(tiny_llama().bfloat16(), b_std=0.2)
    layer = base_of(policy).model.layers[0].self_attn.q_proj
    exact = layer.base_layer.weight.float() + layer.get_delta_weight("default")
    sent = dict(named_base_tensors(policy))["model.layers.0.self_attn.q_proj.weight"]
    assert torch.equal(sent, exact.bfloat16())


def test_a_dense_copy_computes_what_the_policy_computes_and_shares_what_is_frozen():
    policy = tiny_lora(tiny_llama(), b_std=0.2)
    twin, rows = dense_copy(policy), make_rows((3, 5), (6, 4))
    torch.testing.assert_close(score(twin, rows).logps, score(policy, rows).logps, atol=2e-5, rtol=1e-5)
    assert twin.model.embed_tokens.weight is base_of(policy).model.embed_tokens.weight
    assert not any("lora" in name for name, _ in twin.named_parameters())
    assert not any(p.requires_grad for p in twin.parameters()) and not twin.training
    assert any(p.requires_grad for p in policy.parameters())


def test_copies_take_no_gradients_along_and_leave_them_in_place():
    policy = tiny_llama()
    score(policy, make_rows((3,), (2,))).logps.sum().backward()
    gradient = policy.lm_head.weight.grad.clone()
    assert all(p.grad is None for p in shared_copy(policy).parameters())
    assert torch.equal(policy.lm_head.weight.grad, gradient)


@pytest.mark.parametrize("adapters", [False, True])
def test_an_exported_folder_loads_and_generates(tmp_path, adapters):
    tokenizer = AutoTokenizer.from_pretrained(embedded_folder())
    policy = tiny_llama(vocab_size=len(tokenizer))
    policy = tiny_lora(policy, b_std=0.2) if adapters else policy
    save_hf(policy, tokenizer, tmp_path / "out")
    assert list((tmp_path / "out").glob("*.safetensors"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    rows = make_rows((3, 5), (6, 4))
    torch.testing.assert_close(score(loaded, rows).logps, score(policy, rows).logps, atol=2e-5, rtol=1e-5)
    again = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert again.chat_template == tokenizer.chat_template
    assert tokenizer.eos_token_id in loaded.generation_config.eos_token_id
    ids = again("12+3", return_tensors="pt").input_ids
    written = loaded.generate(ids, max_new_tokens=3, do_sample=False)
    assert ids.shape[1] < written.shape[1] <= ids.shape[1] + 3


def test_an_exported_adapter_is_a_model_path(tmp_path):
    tiny_llama().save_pretrained(tmp_path / "base")
    policy = tiny_lora(load_policy(str(tmp_path / "base")), b_std=0.2)
    save_hf(policy, AutoTokenizer.from_pretrained(embedded_folder()), tmp_path / "adapter", merge=False)
    assert not (tmp_path / "adapter" / "model.safetensors").exists()
    rows = make_rows((3, 5), (6, 4))
    loaded = load_policy(str(tmp_path / "adapter"))
    torch.testing.assert_close(score(loaded, rows).logps, score(policy, rows).logps, atol=0, rtol=0)


def embedded_folder() -> str:
    from lit_rl.paths import resolve_model_path

    return resolve_model_path("embedded").folder_or_id
