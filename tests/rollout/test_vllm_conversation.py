"""A conversation written by vLLM is one that the policy gives the same probabilities."""

from functools import partial

import pytest

from lit_rl import load_policy
from lit_rl.data.chat import Chat, load_tokenizer
from lit_rl.models.roles import named_base_tensors
from lit_rl.rollout.sampling import Sampling
from lit_rl.rollout.vllm_colocate import VLLMColocate

from .test_conversation import QUESTIONS, conversations, prompts_of
from .tiny import plain_logps


@pytest.mark.vllm
def test_vllm_writes_conversations_with_the_policy_s_probabilities() -> None:
    policy, chat = load_policy("embedded"), Chat(load_tokenizer("embedded"))
    engine = VLLMColocate(gpu_memory_utilization=0.1, max_num_seqs=32)
    engine.bind(
        policy, end_token_ids=[1], pad_token_id=0, decode=chat.decode, tokenizer=chat.tokenizer, max_tokens=96
    )
    try:
        engine.sync_weights(named_base_tensors(policy), 0)
        talk, prompts = conversations(chat, room=96), prompts_of(chat, QUESTIONS)
        sampling = Sampling(max_completion_length=40, temperature=0.9)
        write = partial(engine.generate, seed=3, step=1)
        rows = talk(prompts, write, num_generations=4, sampling=sampling)
        again = talk(prompts, write, num_generations=4, sampling=sampling)
    finally:
        engine.close()
    assert {1, 3} <= {talk.turns for talk in rows.conversations}
    gap = (plain_logps(policy, rows, temperature=0.9) - rows.rollout_logps)[rows.completion_mask]
    assert gap.abs().max() < 1e-4
    assert not rows.rollout_logps[rows.foreign_mask].any()
    assert rows.completion_ids.equal(again.completion_ids)
