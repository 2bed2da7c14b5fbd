"""What fixtures hand out, as plain functions, so that a second process can make the same."""

from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from lit_rl.batch import RolloutBatch, length_mask
from lit_rl.paths import resolve_model_path

VOCABULARY = 103  # as the embedded tokenizer has


def tiny_policy(seed: int = 0, dtype: torch.dtype = torch.float32, layers: int = 2) -> LlamaForCausalLM:
    """A seeded Llama."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.2,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config).to(dtype)


def scored_rows(
    P: int = 3, G: int = 4, S: int = 7, T: int = 6, seed: int = 0, ragged: bool = True
) -> RolloutBatch:
    """Rows with rewards, ragged by default: P prompts, G completions each."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    prompt_len = draw(2, S + 1, (P,)) if ragged else torch.full((P,), S)
    prompts = RolloutBatch(
        prompt_ids=draw(6, VOCABULARY, (P, S)), prompt_len=prompt_len, prompt_row=torch.arange(P)
    )
    batch = prompts.repeat(G)
    B = P * G
    batch.completion_ids = draw(6, VOCABULARY, (B, T))
    batch.completion_len = draw(1, T + 1, (B,)) if ragged else torch.full((B,), T)
    batch.completion_mask = length_mask(batch.completion_len, T)
    batch.finish_reason = ["stop"] * B
    batch.rewards = draw(0, 2, (B,)).float()
    batch.rewards_per_func = batch.rewards[:, None]
    return batch


def tiny_reward_model(
    folder: Path, *, labels: int = 1, pad: int = 1, template: str | None = None, padding_side: str = "left"
) -> Path:
    """A folder with a seeded sequence classifier, saved by transformers, and the embedded tokenizer.

    Args:
        folder: is made.
        labels: of the classifier.
        pad: padding id; 1 is the end token too.
        template: another chat template.
        padding_side: of the tokenizer.
    """
    tokenizer = AutoTokenizer.from_pretrained(resolve_model_path("embedded").folder_or_id)
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(pad)
    tokenizer.padding_side = padding_side
    if template is not None:
        tokenizer.chat_template = template
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.2,
        num_labels=labels,
        pad_token_id=pad,
        eos_token_id=1,
        bos_token_id=None,
    )
    LlamaForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
