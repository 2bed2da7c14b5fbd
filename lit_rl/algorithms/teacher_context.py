"""Teacher contexts: whose success and which feedback each row's teacher is shown, and the prompt it becomes.

| metric | formula |
| --- | --- |
| `sdpo/success_frac` | rows that succeeded / rows |
| `sdpo/success_group_frac` | groups with a success / groups |
| `sdpo/demonstration_frac` | rows whose teacher is shown a success / rows |
| `sdpo/feedback_available_frac` | rows with feedback / rows; with `include_environment_feedback` |
| `sdpo/feedback_used_frac` | rows whose teacher is shown feedback / rows; as above |
| `sdpo/reprompted_frac` | rows that have a teacher / rows |
| `sdpo/cut_frac` | rows of which something was cut away at `max_reprompt_len` / rows |
| `sdpo/too_long_frac` | rows without a teacher because the question alone is too long / rows |
| `sdpo/teacher_prompt_len` | tokens of the teacher's prompts / rows that have a teacher |
"""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_rl.batch import RolloutBatch, length_mask, padded
from lit_rl.data.chat import Chat
from lit_rl.data.image_chat import ImageChat, ShownImages
from lit_rl.data.images import places_in, with_places
from lit_rl.images import around_other_ids
from lit_rl.metrics import MetricSums
from lit_rl.objectives.reprompt import Reprompt, TeacherPrompt
from lit_rl.rewards.base import Sample


class TeacherContexts(NamedTuple):
    """What the teachers of B rows are shown.

    Attributes:
        success: B times whether the row succeeded.
        feedback: B times text, or None.
        prompts: B of them; those of rows without a teacher are empty.
    """

    success: list[bool]
    feedback: list[str | None]
    prompts: list[TeacherPrompt]


def teacher_contexts(
    rollout: RolloutBatch,
    samples: Sequence[Sample],
    reprompt: Reprompt,
    chat: Chat,
    *,
    feedback_key: str,
    numbers: Sequence[float],
    image_key: str | None = None,
) -> TeacherContexts:
    """The context of each row: successes are sought in the row's own group, which is whole on one rank.

    Args:
        rollout: scored rows.
        samples: the same rows as text.
        reprompt: what is shown.
        chat: renders prompts.
        feedback_key: column with static feedback, of any type.
        numbers: B in [0, 1), for a demonstration by chance.
        image_key: column with images, where the rows have some; a row's teacher sees them as well.
    """
    assert rollout.rewards is not None
    success = reprompt.is_success(rollout.rewards).tolist()
    texts = [reprompt.demonstration_text(sample.completion) for sample in samples]
    chosen = reprompt.demonstrations(success, texts, rollout.num_generations, numbers)
    said = rollout.feedback or [None] * len(samples)
    feedback = [
        reprompt.feedback(by_reward, _as_text(sample.columns.get(feedback_key)))
        for by_reward, sample in zip(said, samples, strict=True)
    ]
    prompts = [
        TeacherPrompt()
        if is_success and reprompt.skip_successful_rows
        else reprompt.teacher_prompt(*own, None if i is None else texts[i], text)
        for is_success, own, i, text in zip(
            success, _renderers(samples, chat, image_key), chosen, feedback, strict=True
        )
    ]
    return TeacherContexts(success, feedback, prompts)


def _renderers(samples: Sequence[Sample], chat: Chat, image_key: str | None) -> list[tuple[Any, Any]]:
    """What renders each row's teacher prompt, and the prompt that it is made of."""
    if image_key is None or not isinstance(chat, ImageChat):
        return [(chat, sample.prompt) for sample in samples]
    by_row: dict[int | None, tuple[Any, Any]] = {}
    for sample in samples:
        if sample.row in by_row:
            continue
        prompt: Any = with_places(sample.prompt)
        by_row[sample.row] = (chat, prompt)
        if places_in(prompt):
            shown = ShownImages(chat, prompt, sample.columns[image_key], sample.prompt_ids)
            by_row[sample.row] = (shown, prompt)
    return [by_row[sample.row] for sample in samples]


def _as_text(value: Any) -> str | None:
    """A column's value as feedback: text as it stands, anything else as JSON."""
    return (
        value
        if value is None or isinstance(value, str)
        else json.dumps(value, ensure_ascii=False, default=str)
    )


def fill_in_(rollout: RolloutBatch, prompts: Sequence[TeacherPrompt], pad_token_id: int) -> None:
    """Write the teacher's prompts and `self_distillation_mask`; a row without one keeps its own prompt."""
    device = rollout.prompt_ids.device
    own = [
        ids[len(ids) - n :]
        for ids, n in zip(rollout.prompt_ids.tolist(), rollout.prompt_len.tolist(), strict=True)
    ]
    filled = [prompt.ids or mine for prompt, mine in zip(prompts, own, strict=True)]
    ids, lengths = padded(filled, "left", pad_token_id)
    rollout.teacher_prompt_ids, rollout.teacher_prompt_len = ids.to(device), lengths.to(device)
    rollout.self_distillation_mask = torch.tensor([p.ids is not None for p in prompts], device=device)
    if rollout.images is not None:
        rows = zip(rollout.images, own, filled, strict=True)
        rollout.teacher_images = [around_other_ids(images, mine, theirs) for images, mine, theirs in rows]


def teacher_inputs(rollout: RolloutBatch) -> tuple[Tensor, Tensor]:
    """(B, S' + T) ids that the teacher reads, and (B, S' + T) long, 1 at real tokens."""
    assert rollout.teacher_prompt_ids is not None and rollout.teacher_prompt_len is not None
    assert rollout.completion_ids is not None
    width = rollout.teacher_prompt_ids.shape[1]
    prompt_mask = length_mask(rollout.teacher_prompt_len, width).flip(1)
    return (
        torch.cat([rollout.teacher_prompt_ids, rollout.completion_ids], 1),
        torch.cat([prompt_mask, rollout.token_mask], 1).long(),
    )


def add_context_metrics(
    sums: MetricSums, contexts: TeacherContexts, num_generations: int, *, has_feedback: bool
) -> None:
    """Count successes and contexts.

    Args:
        sums: where they go.
        contexts: of this rank's rows.
        num_generations: G.
        has_feedback: whether feedback is on.
    """
    success, prompts = contexts.success, contexts.prompts
    rows = len(success)
    groups = [any(success[i : i + num_generations]) for i in range(0, rows, num_generations)]
    taught = [prompt.ids for prompt in prompts if prompt.ids is not None]
    sums.add("sdpo/success_frac", sum(success), rows)
    sums.add("sdpo/success_group_frac", sum(groups), len(groups))
    sums.add("sdpo/demonstration_frac", sum(prompt.has_demonstration for prompt in prompts), rows)
    if has_feedback:
        sums.add("sdpo/feedback_available_frac", sum(text is not None for text in contexts.feedback), rows)
        sums.add("sdpo/feedback_used_frac", sum(prompt.has_feedback for prompt in prompts), rows)
    sums.add("sdpo/reprompted_frac", len(taught), rows)
    sums.add("sdpo/cut_frac", sum(prompt.is_cut for prompt in prompts), rows)
    sums.add("sdpo/too_long_frac", sum(prompt.is_too_long for prompt in prompts), rows)
    sums.add("sdpo/teacher_prompt_len", sum(len(ids) for ids in taught), len(taught))
