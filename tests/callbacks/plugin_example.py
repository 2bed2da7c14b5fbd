"""A plug-in in ten lines: any Lightning callback with a method named like an event of `lit_rl.hooks`."""

import json
from pathlib import Path
from typing import Any

import lightning as L


class TeacherContextLog(L.Callback):
    """Writes one line per step: how many rows had a teacher context, and how long the teacher's inputs are.

    Args:
        path: the file.
    """

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def on_teacher_context_built(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        *,
        teacher_attention_mask: Any,
        self_distillation_mask: Any,
        **payload: Any,
    ) -> None:
        if trainer.is_global_zero:
            row = {
                "step": trainer.global_step + 1,
                "rows_with_teacher": int(self_distillation_mask.sum()),
                "longest": int(teacher_attention_mask.sum(1).max()),
            }
            with self.path.open("a") as file:
                file.write(json.dumps(row) + "\n")
