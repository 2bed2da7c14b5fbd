"""Scores equal the full forward pass of one row alone, whatever lies around the row."""

import pytest
import torch
from tiny_models import make_rows, row_of, tiny_gpt2, tiny_llama, tiny_lora
from transformers import AutoModelForCausalLM, CohereConfig, Gemma2Config, GraniteConfig

from lit_rl.errors import ConfigError
from lit_rl.models.score import Rows, check_head, completion_hidden, head_of, score


@pytest.fixture
def llama():
    return tiny_llama()


PROMPTS, COMPLETIONS = (3, 11, 5, 1), (6, 2, 0, 4)


def naive_logps(model, rows, temperature=1.0):
    """(B, T) by one full forward pass per row, without padding."""
    out = []
    for b in range(len(rows.prompt_len)):
        prompt, completion = row_of(rows, b)
        logits = model(input_ids=torch.cat([prompt, completion])[None]).logits[0].float() / temperature
        logps = logits.log_softmax(-1)[len(prompt) - 1 : -1] if len(completion) else logits[:0]
        logps = logps.gather(1, completion[:, None])[:, 0]
        out.append(torch.nn.functional.pad(logps, (0, rows.completion_ids.shape[1] - len(completion))))
    return torch.stack(out)


@pytest.mark.field("gen/1")
@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2])
def test_batched_scores_equal_full_passes_of_single_rows_with_gradients(make):
    model, rows = make().eval(), make_rows(PROMPTS, COMPLETIONS, extra=(2, 3))
    weights = torch.randn(rows.completion_ids.shape, generator=torch.Generator().manual_seed(1))
    gradients = []
    for logps in (score(model, rows, temperature=0.7).logps, naive_logps(model, rows, 0.7)):
        model.zero_grad()
        (logps * weights).sum().backward()
        gradients.append((logps.detach(), [p.grad.clone() for p in model.parameters()]))
    (ours, our_grads), (naive, naive_grads) = gradients
    torch.testing.assert_close(ours, naive, atol=1e-5, rtol=1e-5)
    for ours, naive in zip(our_grads, naive_grads, strict=True):
        torch.testing.assert_close(ours, naive, atol=1e-5 * float(naive.abs().max() + 1), rtol=1e-4)


@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2])
def test_padding_widths_batch_mates_and_row_order_do_not_matter(make):
    model = make().double().eval()
    rows = make_rows(PROMPTS, COMPLETIONS)
    reference = score(model, rows).logps
    wide = score(model, make_rows(PROMPTS, COMPLETIONS, extra=(7, 9), fill=3)).logps
    torch.testing.assert_close(wide[:, : reference.shape[1]], reference, atol=1e-10, rtol=0)
    assert wide.shape[1] == reference.shape[1] + 9 and not wide[:, reference.shape[1] :].any()
    order = torch.tensor([2, 0, 3, 1])
    torch.testing.assert_close(
        score(model, Rows(*(field[order] for field in rows[:4]))).logps, reference[order], atol=1e-10, rtol=0
    )
    for b in range(len(PROMPTS)):
        alone = score(model, Rows(*(field[b : b + 1] for field in rows[:4]))).logps
        torch.testing.assert_close(alone[0], reference[b], atol=1e-10, rtol=0)


def test_entropies_are_those_of_the_tempered_distributions(llama):
    rows = make_rows((4,), (3,))
    prompt, completion = row_of(rows, 0)
    logits = llama(input_ids=torch.cat([prompt, completion])[None]).logits[0, len(prompt) - 1 : -1] / 0.5
    expected = torch.distributions.Categorical(logits=logits).entropy()
    entropy = score(llama, rows, temperature=0.5, with_entropy=True).entropy
    torch.testing.assert_close(entropy[0], expected, atol=1e-5, rtol=1e-5)
    assert score(llama, rows).entropy is None


@pytest.mark.field("mem/2")
def test_only_positions_that_predict_completion_tokens_reach_the_head(llama):
    rows = make_rows((100, 90), (10, 4))
    assert completion_hidden(llama, rows).shape == (14, 64)


def test_rows_without_completions_score_nothing_and_still_backward(llama):
    rows = make_rows((3, 2), (0, 0), extra=(0, 2))
    logps = score(llama, rows).logps
    assert logps.shape == (2, 2) and not logps.any()
    logps.sum().backward()
    assert score(llama, make_rows((3,), (0,))).logps.shape == (1, 0)
    empty = Rows(*(field[:0] for field in rows[:4]))
    assert score(llama, empty).logps.shape == (0, 2)


def test_a_completion_without_a_prompt_is_refused(llama):
    with pytest.raises(AssertionError, match="without a prompt"):
        score(llama, make_rows((0, 3), (2, 2)))


@pytest.mark.parametrize("train", [True, False])
def test_gradient_checkpointing_changes_no_score_and_no_gradient(train):
    rows, results = make_rows(PROMPTS, COMPLETIONS), []
    for checkpointing in (False, True):
        model = tiny_llama().train(train)
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        logps = score(model, rows).logps
        logps.sum().backward()
        results.append([logps.detach(), *(p.grad for p in model.parameters())])
    for plain, recomputed in zip(*results, strict=True):
        torch.testing.assert_close(recomputed, plain, atol=1e-6, rtol=1e-6)


def test_no_grad_scores_have_no_graph(llama):
    with torch.no_grad():
        assert not score(llama, make_rows((3,), (2,))).logps.requires_grad


@pytest.mark.parametrize("target_modules", ["all-linear", ["q_proj", "lm_head"]])
def test_adapters_count_in_scores_and_get_gradients(target_modules):
    policy = tiny_lora(tiny_llama(tie_word_embeddings=False), b_std=0.2, target_modules=target_modules).eval()
    rows = make_rows(PROMPTS, COMPLETIONS)
    logps = score(policy, rows).logps
    torch.testing.assert_close(logps, naive_logps(policy, rows), atol=2e-5, rtol=1e-5)
    logps.sum().backward()
    trained = [p for p in policy.parameters() if p.requires_grad]
    assert trained and all(p.grad is not None and p.grad.any() for p in trained)
    with policy.disable_adapter():
        assert (score(policy, rows).logps - logps).abs().max() > 1e-2


SHAPE = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "initializer_range": 0.3,
}


@pytest.mark.parametrize(
    "config",
    [
        CohereConfig(**SHAPE, logit_scale=0.3),
        GraniteConfig(**SHAPE, logits_scaling=4.0, embedding_multiplier=2.0),
        Gemma2Config(**SHAPE, final_logit_softcapping=2.0, query_pre_attn_scalar=16),
    ],
    ids=lambda config: config.model_type,
)
def test_heads_that_scale_or_cap_their_logits_are_followed(config):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    check_head(model)
    head = head_of(model)
    assert head.multiplier != 1 or head.softcap is not None
    rows = make_rows(PROMPTS, COMPLETIONS)
    torch.testing.assert_close(score(model, rows).logps, naive_logps(model, rows), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_check_head_refuses_logits_that_the_head_does_not_explain(dtype):
    model = tiny_llama().to(dtype).train()
    check_head(model)
    assert model.training
    model.lm_head.register_forward_hook(lambda module, inputs, output: output * 1.5)
    with pytest.raises(ConfigError, match="LlamaForCausalLM"):
        check_head(model)


def test_bfloat16_scores_are_float32():
    logps = score(tiny_llama().bfloat16(), make_rows((3,), (2,))).logps
    assert logps.dtype == torch.float32
