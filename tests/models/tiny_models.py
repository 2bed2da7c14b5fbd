"""Tiny models from configurations, and ragged rows for them."""

import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from lit_rl.models.score import Rows

VOCAB = 50


def tiny_llama(**overrides):
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.3,
        "tie_word_embeddings": True,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "bos_token_id": None,
        **overrides,
    }
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(LlamaConfig(**settings))


def tiny_gpt2(**overrides):
    settings = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, **overrides}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        GPT2Config(eos_token_id=1, pad_token_id=0, bos_token_id=1, initializer_range=0.3, **settings)
    )
    with torch.no_grad():  # learned positions that matter
        model.transformer.wpe.weight.normal_()
    return model


def tiny_lora(model, *, seed: int = 1, b_std: float = 0.0, **settings):
    from peft import LoraConfig, get_peft_model

    settings = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", **settings}
    torch.manual_seed(seed)
    policy = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings))
    if b_std:
        with torch.no_grad():
            for name, parameter in policy.named_parameters():
                if "lora_B" in name or "lora_embedding_A" in name:
                    parameter.normal_(std=b_std)
    return policy


def make_rows(prompt_lens, completion_lens, *, extra=(0, 0), seed=0, fill=-100) -> Rows:
    """Ragged rows; `extra` columns of padding beyond the longest ones, filled with `fill`."""
    generator = torch.Generator().manual_seed(seed)
    width_s, width_t = max(prompt_lens) + extra[0], max(completion_lens) + extra[1]
    prompts = torch.full((len(prompt_lens), width_s), fill)
    completions = torch.full((len(prompt_lens), width_t), fill)
    for row, (s, t) in enumerate(zip(prompt_lens, completion_lens, strict=True)):
        ids = torch.randint(2, VOCAB, (s + t,), generator=generator)
        prompts[row, width_s - s :] = ids[:s]
        completions[row, :t] = ids[s:]
    return Rows(prompts, torch.tensor(prompt_lens), completions, torch.tensor(completion_lens))


def row_of(rows: Rows, b: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompt and completion ids of row b without padding."""
    s, t = int(rows.prompt_len[b]), int(rows.completion_len[b])
    return rows.prompt_ids[b, rows.prompt_ids.shape[1] - s :], rows.completion_ids[b, :t]
