"""What test-time SDPO is compared with, at equal attempts and from the same weights."""

from typing import Any

import lightning as L
import torch

from lit_rl.algorithms.sdpo import SDPO
from lit_rl.batch import RolloutBatch, padded
from lit_rl.callbacks.answers import answered
from lit_rl.data.chat import Chat
from lit_rl.errors import DataError

WRONG = "That is wrong."
"""Said after a wrong attempt for which the verifier has no words."""


def best_of_k(trainer: L.Trainer, module: SDPO, prompts: RolloutBatch, max_attempts: int) -> int | None:
    """The first of independent samples that succeeds, from 1; None where none does."""
    rollout = answered(trainer, module, prompts, max_attempts, "search, best of k")
    assert rollout.rewards is not None
    return first(module.reprompt.is_success(rollout.rewards).tolist())


def successes(trainer: L.Trainer, module: SDPO, prompts: RolloutBatch, drawn: int) -> int:
    """How many of further samples succeed; they estimate the pass rate."""
    rollout = answered(trainer, module, prompts, drawn, "search, pass rate")
    assert rollout.rewards is not None
    return int(module.reprompt.is_success(rollout.rewards).sum())


def multi_turn(
    trainer: L.Trainer, module: SDPO, prompts: RolloutBatch, max_attempts: int, max_dialogue_len: int
) -> int | None:
    """The attempt that succeeds first in dialogues: the model sees its attempts and what was said about them.

    G dialogues run side by side, as SDPO's rounds have G attempts; an attempt's number counts rounds first.

    Args:
        trainer: its callbacks generate.
        module: the policy answers every turn.
        prompts: one row, of messages.
        max_attempts: attempts over all dialogues.
        max_dialogue_len: tokens of a dialogue; the oldest turns after the question are left out.

    Raises:
        DataError: the prompt is a string, which has no turns.
    """
    columns, size = prompts.repeat(module.num_generations).columns, module.num_generations
    question: Any = prompts.columns[trainer.datamodule.prompt_key][0]  # type: ignore[attr-defined]
    if isinstance(question, str):
        raise DataError(
            "Multi-turn revision needs prompts of messages (found a string); leave multi_turn out of "
            "callbacks.test_time_search.baselines."
        )
    turns: list[list[dict[str, str]]] = [[] for _ in range(size)]
    for number in range(max_attempts // size):
        ids = [dialogue_ids(module.chat, question, said, max_dialogue_len) for said in turns]
        prompt_ids, prompt_len = padded(ids, "left", module.chat.pad_token_id)
        rows = RolloutBatch(prompt_ids, prompt_len, torch.arange(size), columns)
        rollout = answered(trainer, module, rows, 1, f"search, turn {number}")
        assert rollout.rewards is not None and rollout.feedback is not None
        found = first(module.reprompt.is_success(rollout.rewards).tolist())
        if found is not None:
            return number * size + found
        samples = module.samples(rollout)
        for said, sample, remark in zip(turns, samples, rollout.feedback, strict=True):
            said.append({"role": "assistant", "content": sample.completion})
            said.append({"role": "user", "content": remark or WRONG})
    return None


def dialogue_ids(
    chat: Chat, question: list[dict[str, Any]], turns: list[dict[str, str]], max_dialogue_len: int
) -> list[int]:
    """The question and the newest turns that fit, as ids.

    Args:
        chat: renders.
        question: messages that always stay.
        turns: attempts and remarks in turn.
        max_dialogue_len: tokens; the question alone may be longer.
    """
    start = 0
    ids = chat.ids([*question, *turns])
    while len(ids) > max_dialogue_len and start < len(turns):
        start += 2
        ids = chat.ids([*question, *turns[start:]])
    return ids


def first(successes: list[bool]) -> int | None:
    """Place of the first success, from 1."""
    return successes.index(True) + 1 if True in successes else None
