"""A plug-in written from the table of events in README alone."""

import json
from pathlib import Path

import lightning as L


class EventLog(L.Callback):
    """Writes a line for each event: its name, and the shape or type of each entry of the payload.

    Args:
        path: the file.
    """

    def __init__(self, path):
        self.path = Path(path)

    def write(self, event, **payload):
        shapes = {
            name: list(value.shape) if hasattr(value, "shape") else type(value).__name__
            for name, value in payload.items()
        }
        with self.path.open("a") as file:
            file.write(json.dumps({"event": event, **shapes}) + "\n")

    def on_generation_prompts_selected(
        self, trainer, pl_module, *, generation_prompts, generation_prompt_text, **payload
    ):
        self.write("on_generation_prompts_selected", prompts=generation_prompts, text=generation_prompt_text)
        assert len(generation_prompts) == len(generation_prompt_text)
        assert all(isinstance(text, str) for text in generation_prompt_text)

    def on_generation_batch_built(
        self, trainer, pl_module, *, generate_every, steps_per_generation, rollout, **payload
    ):
        self.write("on_generation_batch_built", generate_every=generate_every, steps=steps_per_generation)
        assert generate_every % steps_per_generation == 0

    def on_rollout_scored(self, trainer, pl_module, *, rollout, **payload):
        self.write("on_rollout_scored", rewards=rollout.rewards)

    def on_teacher_context_built(
        self,
        trainer,
        pl_module,
        *,
        teacher_input_ids,
        teacher_attention_mask,
        completion_mask,
        self_distillation_mask,
        **payload,
    ):
        self.write(
            "on_teacher_context_built",
            teacher_input_ids=teacher_input_ids,
            teacher_attention_mask=teacher_attention_mask,
            completion_mask=completion_mask,
            self_distillation_mask=self_distillation_mask,
        )

    def on_self_distillation_batch_prepared(
        self,
        trainer,
        pl_module,
        *,
        prompt_ids,
        completion_ids,
        old_per_token_logps,
        teacher_input_ids,
        teacher_attention_mask,
        self_distillation_mask,
        **payload,
    ):
        self.write(
            "on_self_distillation_batch_prepared",
            prompt_ids=prompt_ids,
            completion_ids=completion_ids,
            old_per_token_logps=old_per_token_logps,
            teacher_input_ids=teacher_input_ids,
            teacher_attention_mask=teacher_attention_mask,
            self_distillation_mask=self_distillation_mask,
        )

    def on_update_end(self, trainer, pl_module, *, step, metrics, **payload):
        self.write("on_update_end", step=step)
        assert "train/loss" in metrics
