"""Tiny models of two kinds of positions, ragged prompts, an engine bound to a model, and plain scoring."""

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from lit_rl.batch import RolloutBatch, padded
from lit_rl.rollout.hf import HFEngine
from lit_rl.rollout.sampling import Sampling

VOCABULARY = 40
END, PAD = 1, 0


def llama(seed: int = 0, **settings) -> LlamaForCausalLM:
    """Two layers, rotary positions, grouped keys."""
    torch.manual_seed(seed)
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
        "tie_word_embeddings": True,
        "pad_token_id": PAD,
        "bos_token_id": None,
        "eos_token_id": END,
    }
    return LlamaForCausalLM(LlamaConfig(**(shape | settings)))


def gpt2(seed: int = 0, dropout: float = 0.0) -> GPT2LMHeadModel:
    """Two layers, learned positions."""
    torch.manual_seed(seed)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=64,
            n_embd=32,
            n_layer=2,
            n_head=2,
            initializer_range=0.3,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
            resid_pdrop=dropout,
            bos_token_id=None,
            eos_token_id=END,
        )
    )


def numbers_as_text(ids: list[int]) -> str:
    """A stand-in for a tokenizer: `[3, 11]` is "3 11 "."""
    return "".join(f"{token} " for token in ids)


def prompts_of(rows: list[list[int]], prompt_rows: list[int] | None = None) -> RolloutBatch:
    """Prompts, left-padded with an id that no model knows: padding is never read."""
    ids, lengths = padded(rows, "left", fill=10_000)
    return RolloutBatch(ids, lengths, torch.tensor(prompt_rows or range(len(rows))))


def bound(model: nn.Module, **settings) -> HFEngine:
    """An engine that holds version 0 of the model."""
    engine = HFEngine(**settings)
    engine.bind(model, end_token_ids=[END], pad_token_id=PAD, decode=numbers_as_text)
    engine.sync_weights([], 0)
    return engine


def plain_logps(model: PreTrainedModel, rows: RolloutBatch, temperature: float = 1.0) -> Tensor:
    """(B, T) log-probabilities of the completions, one unpadded row after the other."""
    assert rows.completion_ids is not None and rows.completion_len is not None
    out = torch.zeros(rows.completion_ids.shape)
    model.eval()
    for b in range(len(rows)):
        prompt = rows.prompt_ids[b, rows.prompt_ids.shape[1] - int(rows.prompt_len[b]) :]
        completion = rows.completion_ids[b, : int(rows.completion_len[b])]
        with torch.no_grad():
            logits = model(torch.cat([prompt, completion])[None]).logits[0, len(prompt) - 1 : -1]
        logps = (logits.double() / temperature).log_softmax(-1)
        out[b, : len(completion)] = logps.gather(-1, completion[:, None])[:, 0]
    return out


RAGGED = [[5, 9, 3], [7, 2, 8, 4, 6, 11, 30, 22, 9, 17, 5], [12, 31, 8, 8, 25]]


def generate(
    engine: HFEngine,
    rows: list[list[int]] | RolloutBatch = RAGGED,
    G: int = 1,
    seed: int = 0,
    step: int = 0,
    **settings,
) -> RolloutBatch:
    prompts = rows if isinstance(rows, RolloutBatch) else prompts_of(rows)
    sampling = Sampling(**({"max_completion_length": 12} | settings))
    return engine.generate(prompts, num_generations=G, sampling=sampling, seed=seed, step=step)


def completions(rows: RolloutBatch) -> list[list[int]]:
    assert rows.completion_ids is not None and rows.completion_len is not None
    return [
        ids[:n].tolist() for ids, n in zip(rows.completion_ids, rows.completion_len.tolist(), strict=True)
    ]
