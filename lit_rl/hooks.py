"""Events beyond Lightning's own, with their payloads, and the one way to raise them.

A plug-in is any `lightning.Callback` with a method named like an event; subclassing `RLCallback` only adds
type checking and help. Payload goes by keyword, on every rank, in callback order; return values are ignored.
Handlers should end in `**payload`, so that payloads can grow.
"""

from pathlib import Path
from typing import Any

import lightning as L
from torch import Tensor

from lit_rl.batch import RolloutBatch


class RLCallback(L.Callback):
    """Every event as a typed method that does nothing."""

    def on_generation_prompts_selected(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        *,
        generation_prompts: list[Any],
        generation_prompt_text: list[str],
        **payload: Any,
    ) -> None:
        """The prompts of a rollout are chosen, nothing is generated yet (source: TRL SDPO's public code).

        Args:
            generation_prompts: P prompts as the data has them, messages or text.
            generation_prompt_text: the same as the model reads them, special tokens included.
        """

    def on_generation_batch_built(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        *,
        generate_every: int,
        steps_per_generation: int,
        rollout: RolloutBatch,
        **payload: Any,
    ) -> None:
        """A new rollout was generated (source: TRL SDPO, callbacks).

        Args:
            generate_every: micro-batches between two generations, all iterations over the rollout included.
            steps_per_generation: micro-batches in one pass over the rollout.
            rollout: the rows, before they are scored.
        """

    def on_rollout_scored(
        self, trainer: L.Trainer, pl_module: L.LightningModule, *, rollout: RolloutBatch, **payload: Any
    ) -> None:
        """Rewards and feedback are filled in."""

    def on_self_distillation_batch_prepared(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        *,
        prompt_ids: Tensor,
        completion_ids: Tensor,
        old_per_token_logps: Tensor | None = None,
        teacher_input_ids: Tensor,
        teacher_attention_mask: Tensor,
        self_distillation_mask: Tensor,
        **payload: Any,
    ) -> None:
        """A self-distillation batch is ready (source: TRL SDPO, callbacks; teacher inputs as in its code).

        Args:
            prompt_ids: (B, S) long. The student's prompts.
            completion_ids: (B, T) long.
            old_per_token_logps: (B, T) float, where the importance ratio has its inputs; else None.
            teacher_input_ids, teacher_attention_mask, self_distillation_mask: as in
                `on_teacher_context_built`.
        """

    def on_teacher_context_built(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        *,
        teacher_input_ids: Tensor,
        teacher_attention_mask: Tensor,
        completion_mask: Tensor,
        self_distillation_mask: Tensor,
        rollout: RolloutBatch,
        **payload: Any,
    ) -> None:
        """The teacher's inputs are built (source: TRL SDPO, callbacks; `rollout` is ours).

        Args:
            teacher_input_ids: (B, S' + T) long. Teacher prompt, then the student's completion.
            teacher_attention_mask: (B, S' + T) long, 1 at real tokens.
            completion_mask: (B, T) bool. Tokens that count.
            self_distillation_mask: (B,) bool. Rows that have a teacher context.
            rollout: the scored rows with the teacher's prompts, before some are left out of the distillation.
        """

    def on_update_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        *,
        step: int,
        metrics: dict[str, float],
        **payload: Any,
    ) -> None:
        """The step's updates are done and the teacher has been synced.

        Args:
            step: iterations done, this one included.
            metrics: the step's metrics by name, over all ranks.
        """

    def on_checkpoint_saved(
        self, trainer: L.Trainer, pl_module: L.LightningModule, *, folder: Path, step: int, **payload: Any
    ) -> None:
        """A checkpoint is complete, here and in the remote folder if there is one. On ranks that wrote it.

        Args:
            folder: of the checkpoint.
            step: iterations done when its contents were taken; training may have gone on.
        """


EVENTS = tuple(name for name in vars(RLCallback) if name.startswith("on_"))


def emit(pl_module: L.LightningModule, event: str, **payload: Any) -> None:
    """Call the event's method on each callback of the trainer that has one.

    Lightning's own dispatcher would raise on a callback without the method.
    """
    assert event in EVENTS, event
    trainer = pl_module.trainer
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        handler = getattr(callback, event, None)
        if callable(handler):
            with trainer.profiler.profile(f"[Callback]{callback.state_key}.{event}"):  # type: ignore[attr-defined]
                handler(trainer, pl_module, **payload)
