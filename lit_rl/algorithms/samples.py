"""The rows of a rollout as reward functions and teachers see them: text and columns."""

from typing import Any

from lit_rl.batch import RolloutBatch
from lit_rl.data.chat import Chat
from lit_rl.rewards.base import Sample


def samples_of(rollout: RolloutBatch, chat: Chat, data: Any) -> list[Sample]:
    """One sample per row.

    Args:
        rollout: rows with completions.
        chat: decodes them.
        data: the datamodule, which knows the columns of prompt, source and reference answer.
    """
    assert rollout.completion_ids is not None and rollout.completion_len is not None
    assert rollout.finish_reason is not None
    lengths, prompt_lengths = rollout.completion_len.tolist(), rollout.prompt_len.tolist()
    ids = [row[:n] for row, n in zip(rollout.completion_ids.tolist(), lengths, strict=True)]
    width = rollout.prompt_ids.shape[1]
    prompts = [row[width - n :] for row, n in zip(rollout.prompt_ids.tolist(), prompt_lengths, strict=True)]
    talks = rollout.conversations or [None] * len(rollout)
    columns = [{name: values[i] for name, values in rollout.columns.items()} for i in range(len(rollout))]
    return [
        Sample(
            prompt=values.get(data.prompt_key) if talk is None or talk.prompt is None else talk.prompt,
            completion=chat.decode(tokens),
            completion_ids=tokens,
            columns=values,
            finish_reason=reason,
            prompt_ids=prompt,
            row=row,
            data_source_key=data.data_source_key,
            reward_model_key=data.reward_model_key,
            messages=[] if talk is None else talk.messages,
            environment_reward=None if talk is None else talk.reward,
        )
        for tokens, values, reason, prompt, row, talk in zip(
            ids, columns, rollout.finish_reason, prompts, rollout.prompt_row.tolist(), talks, strict=True
        )
    ]
