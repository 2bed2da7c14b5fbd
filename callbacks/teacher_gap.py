"""TeacherGap: how much better the policy answers with the teacher's prompts than with its own."""

from typing import Any

import lightning as L

from lit_rl.algorithms.sdpo import SDPO
from lit_rl.batch import RolloutBatch
from lit_rl.callbacks.answers import answered
from lit_rl.distributed import gather_objects
from lit_rl.errors import ConfigError
from lit_rl.hooks import RLCallback
from lit_rl.objectives.routing import PromptGate, RunGate


class TeacherGap(RLCallback):
    """Compares the policy with the student's and with the teacher's prompt, and sets the gate of SDPO.

    Every n steps, before the step: the policy answers validation rows as in training, G completions each;
    from these the teacher's prompts are built as in training; from every such prompt the same policy draws
    one completion. Only prompts with a teacher's prompt count, each once. A self-teacher that does not answer
    better has nothing to teach, and collapse begins unnoticed (SRPO, arXiv 2604.02288, on the teacher's
    reliability; Huebotter et al., arXiv 2601.20802, section on self-teachers).

    | metric | meaning |
    | --- | --- |
    | val/teacher_gap | accuracy with the teacher's prompts minus accuracy with the student's |
    | val/teacher_gap/student, val/teacher_gap/teacher | the two accuracies |
    | val/teacher_gap/prompts | share of the rows that have a teacher's prompt |

    With algo.distillation.gate=run the gate follows val/teacher_gap. With gate=prompt the comparison is also
    made in every step on the step's own rows: for each prompt the group's pass rate against one completion
    per row that has a teacher; this costs a second generation. A gap of 0 closes; rows without any teacher's
    prompt say nothing.

    Args:
        every_n_steps: steps between two measurements on validation rows, the first before step 1.
        num_prompts: validation rows of each measurement, over all ranks; the first ones.

    Raises:
        ConfigError: a value is below 1, or no callback generates.
    """

    def __init__(self, every_n_steps: int = 20, num_prompts: int = 64) -> None:
        for name, value in (("every_n_steps", every_n_steps), ("num_prompts", num_prompts)):
            if value < 1:
                raise ConfigError(f"callbacks.teacher_gap.{name} must be >= 1 (found {value!r}).")
        self.every_n_steps, self.num_prompts = every_n_steps, num_prompts

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        module: Any = pl_module
        module.longest_other_prompt = max(module.longest_other_prompt, module.reprompt.max_reprompt_len)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step % self.every_n_steps:
            return
        module: Any = pl_module
        with module.clock("validate"):
            metrics = self.measure(trainer, module)
        if isinstance(module.gate, RunGate) and metrics["val/teacher_gap/prompts"] > 0:
            module.gate.gap = metrics["val/teacher_gap"]
        module.log_dict(metrics, logger=False)
        for logger in module.loggers:
            logger.log_metrics(metrics, step=trainer.global_step)

    def on_teacher_context_built(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        *,
        rollout: RolloutBatch,
        **payload: Any,
    ) -> None:
        module: Any = pl_module
        if isinstance(module.gate, PromptGate):
            accuracies = prompt_accuracies(trainer, module, rollout)
            module.gate.gaps = {row: teacher - student for row, (student, teacher) in accuracies.items()}

    def measure(self, trainer: L.Trainer, module: SDPO) -> dict[str, float]:
        """The metrics above, on validation rows. Collective."""
        found: dict[int, tuple[float, float]] = {}
        count, left = 0, -(-self.num_prompts // trainer.world_size)
        for batch in trainer.datamodule.val_dataloader():  # type: ignore[attr-defined]
            prompts = batch.select(slice(0, left - count))
            rollout = answered(trainer, module, prompts, module.num_generations, "teacher gap, student")
            module.fill_teacher_prompts(rollout)
            found |= prompt_accuracies(trainer, module, rollout)
            count += len(prompts)
            if count >= left:
                break
        parts = gather_objects((found, count))
        everywhere = {row: pair for of_rank, _ in parts for row, pair in of_rank.items()}
        pairs = [everywhere[row] for row in sorted(everywhere)]
        student, teacher = (
            sum(side) / max(len(pairs), 1) for side in zip(*(pairs or [(0.0, 0.0)]), strict=True)
        )
        return {
            "val/teacher_gap": teacher - student,
            "val/teacher_gap/student": student,
            "val/teacher_gap/teacher": teacher,
            "val/teacher_gap/prompts": len(pairs) / max(sum(number for _, number in parts), 1),
        }


def prompt_accuracies(
    trainer: L.Trainer, module: SDPO, rollout: RolloutBatch
) -> dict[int, tuple[float, float]]:
    """By data row: accuracy of its group, and with the teacher's prompts; rows that have none are left out.

    Args:
        trainer: its callbacks generate.
        module: holds the policy, which answers both.
        rollout: scored rows with the teacher's prompts filled in.
    """
    assert rollout.self_distillation_mask is not None and rollout.rewards is not None
    assert rollout.teacher_prompt_ids is not None and rollout.teacher_prompt_len is not None
    student = module.reprompt.is_success(rollout.rewards).view(-1, rollout.num_generations).double().mean(1)
    index = rollout.self_distillation_mask.nonzero().flatten()
    if not len(index):
        return {}
    taught = rollout.select(index)
    prompts = RolloutBatch(
        prompt_ids=rollout.teacher_prompt_ids[index],
        prompt_len=rollout.teacher_prompt_len[index],
        # a stream of noise for each row, not for each prompt
        prompt_row=taught.prompt_row * rollout.num_generations + index % rollout.num_generations,
        columns=taught.columns,
        images=taught.teacher_images,
    )
    written = answered(trainer, module, prompts, 1, "teacher gap, teacher")
    assert written.rewards is not None
    is_right = module.reprompt.is_success(written.rewards).tolist()
    groups: dict[int, list[bool]] = {}
    for group, right in zip((index // rollout.num_generations).tolist(), is_right, strict=True):
        groups.setdefault(group, []).append(right)
    rows = rollout.prompt_row[:: rollout.num_generations].tolist()
    return {rows[g]: (float(student[g]), sum(right) / len(right)) for g, right in groups.items()}
