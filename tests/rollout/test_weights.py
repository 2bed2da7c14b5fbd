import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from lit_rl.rollout.weights import merged_copy, refresh_

from .tiny import llama


def with_lora(model: nn.Module) -> nn.Module:
    policy = get_peft_model(model, LoraConfig(r=2, lora_alpha=8, target_modules=["q_proj", "down_proj"]))
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.3)
    return policy


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_a_copy_has_the_dtype_the_merged_weights_and_no_gradients() -> None:
    base = llama()
    policy = with_lora(base)
    before = weights(policy)
    copied = merged_copy(policy, torch.float64)
    assert type(copied) is type(base)
    assert {p.dtype for p in copied.parameters()} == {torch.float64}
    assert not any(p.requires_grad for p in copied.parameters())
    ids = torch.tensor([[3, 4, 5]])
    torch.testing.assert_close(copied(ids).logits.float(), policy.eval()(ids).logits, atol=1e-5, rtol=1e-5)
    assert all(torch.equal(before[name], tensor) for name, tensor in policy.state_dict().items())


def test_rotary_frequencies_keep_their_precision() -> None:
    model = llama()
    copied = merged_copy(model, torch.bfloat16)
    assert torch.equal(copied.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)


@pytest.mark.field("vllm/3")
@pytest.mark.parametrize("is_tied", [True, False])
def test_a_refresh_reaches_both_ends_of_tied_and_untied_models(is_tied: bool) -> None:
    model = llama(tie_word_embeddings=is_tied)
    copied = merged_copy(model, torch.float64)
    storage = copied.lm_head.weight.data_ptr()
    with torch.no_grad():
        model.model.embed_tokens.weight.add_(0.1)
    refresh_(copied, model.named_parameters())
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(copied.get_parameter(name).float(), model.get_parameter(name))
    assert copied.lm_head.weight.data_ptr() == storage


def test_names_that_are_unknown_or_missing_are_an_error() -> None:
    model = llama()
    copied = merged_copy(model, torch.float64)
    with pytest.raises(RuntimeError, match=r"no weight named 'base_model.x'"):
        refresh_(copied, [("base_model.x", torch.zeros(1))])
    some = list(model.named_parameters())[:-1]
    with pytest.raises(RuntimeError, match=r"1 weights .* were not synced, 'model.norm.weight' first"):
        refresh_(copied, some)
