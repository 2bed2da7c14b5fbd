"""Kinds of models beside plain attention: tokens and logps agree with transformers, padding or not."""

from collections.abc import Callable

import pytest
import torch
import transformers as tf

from lit_rl.rollout.sampling import Sampling

from .tiny import END, PAD, RAGGED, VOCABULARY, bound, plain_logps, prompts_of

TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": PAD, "bos_token_id": None, "eos_token_id": END}
SHAPE = TOKENS | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
STATE_SPACE = TOKENS | {"hidden_size": 32, "num_hidden_layers": 2, "initializer_range": 0.3}
ALIBI = TOKENS | {"hidden_size": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.3}

KINDS: dict[str, Callable[[], tf.PreTrainedModel]] = {
    "sliding window": lambda: tf.MistralForCausalLM(tf.MistralConfig(**SHAPE, sliding_window=4)),
    "mixed windows": lambda: tf.Gemma2ForCausalLM(tf.Gemma2Config(**SHAPE, head_dim=8, sliding_window=4)),
    "experts": lambda: tf.MixtralForCausalLM(tf.MixtralConfig(**SHAPE, num_local_experts=4)),
    "ALiBi": lambda: tf.BloomForCausalLM(tf.BloomConfig(**ALIBI)),
    "convolutions": lambda: tf.Lfm2ForCausalLM(
        tf.Lfm2Config(**SHAPE, layer_types=["conv", "full_attention"])
    ),
    "state space": lambda: tf.MambaForCausalLM(tf.MambaConfig(**STATE_SPACE)),
}


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model_is_written_with_correctly(kind: str, cache: str | None) -> None:
    torch.manual_seed(0)
    model = KINDS[kind]().eval()
    engine = bound(model, cache_implementation=cache)
    greedy = Sampling(temperature=0.0, max_completion_length=12)
    rows = engine.generate(prompts_of(RAGGED), num_generations=1, sampling=greedy, seed=0, step=0)
    config = tf.GenerationConfig(do_sample=False, max_new_tokens=12, eos_token_id=END, pad_token_id=PAD)
    for b, prompt in enumerate(RAGGED):
        expected = model.generate(torch.tensor([prompt]), generation_config=config)[0, len(prompt) :]
        assert rows.completion_ids[b, : rows.completion_len[b]].tolist() == expected.tolist()

    sampled = Sampling(max_completion_length=20)
    for at_once in (24, 5):
        engine = bound(model, cache_implementation=cache, max_num_seqs=at_once)
        rows = engine.generate(prompts_of(RAGGED), num_generations=8, sampling=sampled, seed=0, step=0)
        torch.testing.assert_close(rows.rollout_logps, plain_logps(model, rows), atol=2e-5, rtol=0)
