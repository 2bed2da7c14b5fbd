"""The teacher of a row with images sees them too."""

import pytest
import tiny_vlm
import torch

from lit_rl.algorithms.samples import samples_of
from lit_rl.algorithms.student_scores import teacher_rows
from lit_rl.algorithms.teacher_context import fill_in_, teacher_contexts
from lit_rl.batch import padded
from lit_rl.data.image_chat import ImageChat
from lit_rl.data.parquet import MemoryRows
from lit_rl.data.prompts import PromptCollate
from lit_rl.data.reader import PromptReader
from lit_rl.images import ImageTensors, around_other_ids
from lit_rl.models.score import score
from lit_rl.objectives.reprompt import Reprompt

DATA = type("Columns", (), {"prompt_key": "prompt", "data_source_key": "s", "reward_model_key": "r"})
TEXTS = ["right", "false", "right", "wrong", "right", "no"]


def rollout(chat: ImageChat, *, with_parts: bool):
    """Three prompts with one picture, none, and one, two completions each, the first of them right."""
    rows = tiny_vlm.image_rows(3, every=2)
    if with_parts:
        for row in rows:
            (message,) = row["prompt"]
            parts = [{"type": "text", "text": text} for text in message["content"].split("<image>")]
            message["content"] = [parts[0], *[{"type": "image"}] * (len(parts) - 1), *parts[1:]]
    read = PromptReader(chat, "prompt", "images")
    batch = PromptCollate(MemoryRows(rows, "rows"), read)([0, 1, 2]).repeat(2)
    ids = [chat.tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    batch.completion_ids, batch.completion_len = padded(ids, "right")
    batch.completion_mask = batch.token_mask
    batch.finish_reason, batch.rewards = ["stop"] * 6, torch.tensor([1.0, 0, 1, 0, 1, 0])
    return batch


@pytest.mark.parametrize("family", ["llava", "idefics"])
@pytest.mark.parametrize("with_parts", [False, True])
def test_a_teacher_reads_what_the_processor_writes(family: str, with_parts: bool) -> None:
    processor = {"llava": tiny_vlm.llava_processor, "idefics": tiny_vlm.idefics_processor}[family]()
    chat, model = ImageChat(processor), tiny_vlm.FAMILIES[family]()
    batch, reprompt = rollout(chat, with_parts=with_parts), Reprompt()
    contexts = teacher_contexts(
        batch, samples_of(batch, chat, DATA), reprompt, chat,
        feedback_key="f", numbers=[0.0] * 6, image_key="images",
    )  # fmt: skip
    fill_in_(batch, contexts.prompts, 0)
    assert batch.self_distillation_mask is not None and batch.teacher_images is not None
    assert batch.self_distillation_mask.tolist() == [False, True] * 3
    assert batch.teacher_prompt_ids is not None and batch.teacher_prompt_len is not None
    with torch.no_grad():
        logps = score(model, teacher_rows(batch)).logps
    for b in (1, 5):
        place = "<image>" if batch.images[b] is not None else ""
        text = reprompt.reprompt_template.format(
            prompt=f"what{place} {b // 2}?",
            solution=reprompt.solution_template.format(successful_previous_attempt="right"),
            feedback="",
        )
        inputs = processor(
            text=[f"<|user|>{text}<|end|><|assistant|>"], images=[[tiny_vlm.picture(10 * (b // 2))]],
            return_tensors="pt",
        )  # fmt: skip
        own = batch.teacher_prompt_ids[b, -int(batch.teacher_prompt_len[b]) :]
        assert own.tolist() == inputs.pop("input_ids")[0].tolist()
        done, start = int(batch.completion_len[b]), len(own) - 1
        ids = torch.cat([own, batch.completion_ids[b, :done]])[None]
        inputs["attention_mask"] = torch.ones_like(ids)
        with torch.no_grad():
            every = model(input_ids=ids, **inputs).logits[0, start : start + done].log_softmax(-1)
        expected = every.gather(1, batch.completion_ids[b, :done, None])[:, 0]
        torch.testing.assert_close(logps[b, :done], expected, rtol=1e-6, atol=1e-6)
        assert batch.teacher_images[b]["pixel_values"] is batch.images[b - 1]["pixel_values"]


def test_numbers_of_tokens_follow_the_images() -> None:
    kinds = torch.tensor([0, 1, 1, 0])
    images = ImageTensors({"mm_token_type_ids": kinds, "pixel_values": torch.zeros(1)})
    found = around_other_ids(images, [5, 9, 9, 6], [4, 5, 9, 9, 4, 6])
    assert found is not None and found["mm_token_type_ids"].tolist() == [0, 0, 1, 1, 0, 0]
    assert found["pixel_values"] is images["pixel_values"] and around_other_ids(None, [1], [2]) is None
