"""A prompt computed once for its rows scores, and learns, what rows by themselves do."""

import pytest
import torch
from tiny_models import VOCAB, make_rows, tiny_gpt2, tiny_llama, tiny_lora
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    MambaConfig,
    MistralConfig,
    Qwen2MoeConfig,
    Qwen3Config,
)

from lit_rl.errors import ConfigError
from lit_rl.models.flat_attention import SHARED, UNPADDED, set_layout_, shares_prefixes
from lit_rl.models.kernels import Kernels, lay_out_
from lit_rl.models.load import load_policy
from lit_rl.models.score import Rows, score
from lit_rl.models.shared_prefix import flat_rows

SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "initializer_range": 0.3,
}
PROMPTS, GROUP = (9, 5, 13), 4
COMPLETIONS = (6, 2, 0, 4, 3, 1, 5, 2, 7, 1, 1, 4)


def from_config(config, **arguments):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, **arguments)


def exact(model):
    """The model in float64 with norms that compute in it too (transformers' round to float32)."""
    for name, module in list(model.named_modules()):
        if type(module).__name__.endswith("RMSNorm"):
            norm = nn.RMSNorm(tuple(module.weight.shape), eps=1e-6)
            model.get_submodule(name.rpartition(".")[0]).__setattr__(name.rpartition(".")[2], norm)
    return model.double()


def grouped(prompts=PROMPTS, completions=COMPLETIONS, group=GROUP) -> Rows:
    """`group` ragged rows per prompt; the second and the last prompt end alike."""
    rows = make_rows([length for length in prompts for _ in range(group)], completions, extra=(2, 3))
    first = torch.arange(len(rows.prompt_len)) // group * group
    return rows._replace(prompt_ids=rows.prompt_ids[first])


def learned(model, rows, layout):
    """Scores, entropies, and gradients of a random sum of the scores."""
    set_layout_(model, layout)
    model.zero_grad()
    scores = score(model, rows, temperature=0.7, with_entropy=True)
    weights = torch.randn(scores.logps.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (scores.logps * weights + scores.entropy).sum().backward()
    return [*map(torch.detach, scores)], [p.grad.clone() for p in model.parameters() if p.grad is not None]


def assert_equal(model, rows, tolerance=1e-10):
    alone, alone_gradients = learned(model, rows, None)
    for layout in (SHARED, UNPADDED):
        together, gradients = learned(model, rows, layout)
        torch.testing.assert_close(together, alone, atol=tolerance, rtol=tolerance)
        assert len(gradients) == len(alone_gradients) > 0
        for ours, plain in zip(gradients, alone_gradients, strict=True):
            atol = tolerance * float(plain.abs().max() + 1)
            torch.testing.assert_close(ours, plain, atol=atol, rtol=tolerance)


ARCHITECTURES = {
    "llama": tiny_llama,
    "gpt2": tiny_gpt2,
    "adapters": lambda: tiny_lora(tiny_llama(), b_std=0.2),
    "windows": lambda: from_config(MistralConfig(**SHAPE, sliding_window=4)),
    "windows and full": lambda: from_config(
        Gemma3TextConfig(
            **SHAPE,
            sliding_window=4,
            query_pre_attn_scalar=16,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        )
    ),
    "query norms": lambda: from_config(Qwen3Config(**SHAPE)),
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_shared_prompts_give_the_scores_and_gradients_of_rows_by_themselves(name):
    assert_equal(exact(ARCHITECTURES[name]()).eval(), grouped())


def test_eager_attention_with_capped_scores_is_followed():
    """Its softmax rounds to float32 by itself."""
    config = Gemma2Config(**SHAPE, sliding_window=4, query_pre_attn_scalar=16, attn_logit_softcapping=1.0)
    model = from_config(config, attn_implementation="eager")
    assert_equal(exact(model).eval(), grouped(), tolerance=1e-5)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_recomputes_with_the_same_layout(reentrant):
    model = exact(tiny_llama()).train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    assert_equal(model, grouped())


@pytest.mark.parametrize(
    ("prompts", "completions", "group"),
    [
        ((4, 7), (3, 5), 1),
        ((6,), (1, 1, 1), 3),
        ((6, 2), (0, 0, 3, 0), 2),
        ((2,), (30, 1, 28), 3),
        ((40,), (3, 2, 3, 1, 2, 3, 2, 3), 8),
    ],
    ids=["groups of one", "single tokens", "empty rows", "long completions", "one bundle"],
)
def test_any_shape_of_groups(prompts, completions, group):
    assert_equal(exact(tiny_llama()).eval(), grouped(prompts, completions, group))


def test_order_and_cut_of_the_rows_do_not_matter():
    model, rows = exact(tiny_llama()).eval(), grouped()
    set_layout_(model, SHARED)
    whole = score(model, rows).logps
    order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(0))
    for part in order.split(5):
        cut = score(model, Rows(*(field[part] for field in rows[:4]))).logps
        torch.testing.assert_close(cut, whole[part], atol=1e-10, rtol=0)


def test_each_prompt_and_each_token_that_predicts_another_passes_the_layers_once():
    model = tiny_llama().eval()
    set_layout_(model, SHARED)
    seen = []
    model.model.layers[0].mlp.register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    score(model, grouped())
    assert seen == [(1, sum(PROMPTS) + sum(n - 1 for n in COMPLETIONS if n), 64)]


def test_a_prompt_s_keys_are_copied_per_bundle_and_a_bundle_wastes_at_most_half_the_prompt():
    rows = flat_rows(*grouped((40,), (9,) * 8, 8)[:4])
    assert rows.bundles.token.shape == (4, 16) and rows.prompts.token.shape == (1, 40)
    assert flat_rows(*grouped((4,), (9,) * 8, 8)[:4]).bundles.token.shape == (8, 8)


def test_layers_keep_a_bundle_s_keys_once_for_the_heads_that_share_them_and_one_mask_for_all():
    model, kept = from_config(Qwen3Config(**SHAPE)), []
    set_layout_(model, SHARED)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda t: t):
        score(model, grouped((40,), (9,) * 8, 8))
    keys = [tensor for tensor in kept if tensor.shape[::2] == (4, 40 + 16)]
    masks = [tensor for tensor in kept if tensor.dim() == 4 and tensor.shape[-1] == 40 + 16]
    assert len(keys) == 6 and {tensor.shape[1] for tensor in keys} == {SHAPE["num_key_value_heads"]}
    assert len(masks) == 3 and len({tensor.untyped_storage().data_ptr() for tensor in masks}) == 1


def test_rows_that_share_nothing_stay_in_the_plain_form():
    assert flat_rows(*make_rows((5, 5, 5), (4, 4, 4))[:4]) is None


def test_outside_a_flat_pass_the_model_is_what_it_was():
    ids = torch.arange(2, 20).view(2, 9)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    for model in (tiny_llama(), from_config(Qwen3Config(**SHAPE), attn_implementation="eager")):
        before = model.eval()(input_ids=ids, attention_mask=mask).logits
        set_layout_(model, SHARED)
        assert torch.equal(model(input_ids=ids, attention_mask=mask).logits, before)


@pytest.mark.parametrize(
    "config",
    [
        MistralConfig(**SHAPE, sliding_window=4),
        Gemma2Config(**SHAPE, query_pre_attn_scalar=16),
        Qwen2MoeConfig(**SHAPE, num_experts=4, moe_intermediate_size=8, shared_expert_intermediate_size=8),
    ],
    ids=lambda config: config.model_type,
)
def test_common_architectures_share(config):
    model = from_config(config).train()
    assert lay_out_(model, SHARED) is None
    assert shares_prefixes(model) and model.training


def test_a_model_whose_layers_mix_neighbours_stays_as_it_was():
    model = from_config(MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=1, state_size=4))
    assert "MambaForCausalLM" in lay_out_(model, SHARED)
    assert not shares_prefixes(model) and model.training


def test_masks_that_the_architecture_makes_by_itself_are_found_out():
    model = tiny_llama()
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, kwargs: (args, {**kwargs, "attention_mask": None}), with_kwargs=True
        )
    assert "LlamaForCausalLM does not take flat rows" in lay_out_(model, SHARED)


def test_dropout_keeps_rows_apart():
    assert "dropout is on" in lay_out_(tiny_llama(attention_dropout=0.1), SHARED)
    assert "dropout is on" in lay_out_(tiny_lora(tiny_llama(), lora_dropout=0.1), SHARED)


def test_policies_share_unless_told_otherwise():
    assert shares_prefixes(load_policy())
    assert not shares_prefixes(load_policy(kernels=Kernels(share_prefix=False)))


def test_rows_without_padding_pass_the_layers_one_after_another():
    model, rows = load_policy(kernels=Kernels(share_prefix=False, use_remove_padding=True)), grouped()
    seen = []
    model.model.layers[0].mlp.register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    score(model, rows)
    tokens = sum(int(p) + int(c) - 1 for p, c in zip(rows.prompt_len, rows.completion_len, strict=True) if c)
    assert seen[-1][:2] == (1, tokens) and not shares_prefixes(model)


def test_a_model_that_cannot_leave_padding_out_is_refused():
    model = from_config(MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=1, state_size=4))
    with pytest.raises(
        ConfigError, match=r"use_remove_padding must be false for this model.*MambaForCausalLM"
    ):
        Kernels(share_prefix=False, use_remove_padding=True).apply_(model)


def test_bfloat16_is_within_its_rounding():
    model, rows = tiny_llama().bfloat16().eval(), grouped()
    alone = score(model, rows).logps
    assert lay_out_(model, SHARED) is None
    together = score(model, rows).logps
    assert (together - alone).abs().max() < 0.3 and (together - alone).abs().mean() < 0.02
