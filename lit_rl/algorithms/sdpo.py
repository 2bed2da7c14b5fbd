"""SDPO: self-distillation policy optimization.

The policy is its own teacher: shown a success of the same group, or the environment's feedback, it scores the
student's completion again, token by token, and the student moves toward that. A sparse reward becomes a dense
signal without a second network. Differs from GRPO in `prepare` (teacher contexts), `loss` (divergence to the
teacher, mixed with GRPO's by `distillation_weight`) and `sync` (the teacher follows). Huebotter et al.,
"Reinforcement Learning via Self-Distillation"; parameters and events as in TRL's SDPOTrainer.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_rl.algorithms.grpo import GRPO
from lit_rl.algorithms.state import Stateful
from lit_rl.batch import RolloutBatch, length_mask, padded
from lit_rl.functional.distillation import sampled_token_loss
from lit_rl.functional.masking import Totals
from lit_rl.hooks import emit
from lit_rl.models.parameters import logps_dtype
from lit_rl.models.score import Rows, completion_hidden, head_of, score
from lit_rl.objectives.distillation import Distillation
from lit_rl.objectives.reprompt import Reprompt
from lit_rl.objectives.routing import PromptGate, RunGate, TeacherGate, pass_rate_weights
from lit_rl.objectives.teacher import Teacher
from lit_rl.seeding import derived_generator


class SDPOTotals(NamedTuple):
    """What each of the two losses is divided by, over the whole optimizer batch."""

    policy: Totals
    distillation: Totals


class SDPO(GRPO):
    """Self-distillation policy optimization.

    Args:
        distillation: what is compared with the teacher, and its weight.
        teacher: whose weights score.
        reprompt: what the teacher sees.
        base: the arguments of `GRPO`.
    """

    def __init__(
        self,
        *,
        distillation: Distillation | None = None,
        teacher: Teacher | None = None,
        reprompt: Reprompt | None = None,
        **base: Any,
    ) -> None:
        self.distillation = distillation or Distillation()
        self.teacher_settings = teacher or Teacher()
        self.reprompt = reprompt or Reprompt()
        gates: dict[str, type[TeacherGate]] = {"run": RunGate, "prompt": PromptGate}
        kind = gates.get(self.distillation.gate)
        self.gate: TeacherGate | None = kind() if kind is not None else None
        super().__init__(**base)

    @property
    def has_policy_term(self) -> bool:
        return self.distillation.distillation_weight < 1

    @property
    def has_distillation_term(self) -> bool:
        """Whether the teacher counts in the loss."""
        return self.distillation.distillation_weight > 0

    @property
    def stateful(self) -> dict[str, Stateful]:
        moving = {"gate": self.gate} if self.gate is not None and self.gate.is_moving else {}
        return {**super().stateful, **moving}

    def build_roles(self) -> None:
        super().build_roles()
        if self.has_distillation_term:
            self.teacher = self.teacher_settings.role(self.policy)

    def prepare(self, rollout: RolloutBatch) -> None:
        super().prepare(rollout)
        if not self.has_distillation_term:
            return
        with self.clock("teacher"):
            self.build_teacher_context(rollout)
            self.route(rollout)
            is_once = self.distillation.distillation_mode == "sampled_token"
            if is_once and self.teacher_settings.is_fixed_in_step:
                rollout.teacher_logps = self.teacher_logps(rollout)
        emit(
            self,
            "on_self_distillation_batch_prepared",
            prompt_ids=rollout.prompt_ids,
            completion_ids=rollout.completion_ids,
            old_per_token_logps=rollout.old_logps,
        )

    def build_teacher_context(self, rollout: RolloutBatch) -> None:
        """Fill in what the teacher sees, count it, and tell the callbacks."""
        seen = self.fill_teacher_prompts(rollout)
        assert rollout.self_distillation_mask is not None and rollout.completion_ids is not None
        assert rollout.teacher_prompt_ids is not None
        self.report_contexts(rollout, *seen)
        emit(
            self,
            "on_teacher_context_built",
            teacher_input_ids=torch.cat([rollout.teacher_prompt_ids, rollout.completion_ids], 1),
            teacher_attention_mask=torch.cat([_prompt_mask(rollout), rollout.token_mask], 1).long(),
            completion_mask=rollout.completion_mask,
            self_distillation_mask=rollout.self_distillation_mask,
            rollout=rollout,
        )

    def fill_teacher_prompts(
        self, rollout: RolloutBatch
    ) -> tuple[list[bool], list[str | None], list[str | None]]:
        """Fill in the teacher's prompts and `self_distillation_mask`; a row without one keeps its own prompt.

        Returns:
            Of each row: whether it succeeded, the demonstration it is shown, its feedback.
        """
        assert rollout.rewards is not None and rollout.completion_ids is not None
        samples = self.samples(rollout)
        success = self.reprompt.is_success(rollout.rewards).tolist()
        texts = [self.reprompt.demonstration_text(sample.completion) for sample in samples]
        chosen = self.reprompt.demonstrations(
            success,
            texts,
            rollout.num_generations,
            derived_generator(self.seed, self.step, "demonstration", *rollout.prompt_row[:1].tolist()),
        )
        demonstrations = [None if i is None else texts[i] for i in chosen]
        feedback = self.feedback(rollout)
        contexts = [
            self.reprompt.prompt_ids(self.chat, sample.prompt, shown, said)
            for sample, shown, said in zip(samples, demonstrations, feedback, strict=True)
        ]
        own = [
            ids[len(ids) - n :]
            for ids, n in zip(rollout.prompt_ids.tolist(), rollout.prompt_len, strict=True)
        ]
        filled = [context or mine for context, mine in zip(contexts, own, strict=True)]
        teacher_ids, teacher_len = padded(filled, "left", self.chat.pad_token_id)
        rollout.teacher_prompt_ids = teacher_ids.to(self.device)
        rollout.teacher_prompt_len = teacher_len.to(self.device)
        rollout.self_distillation_mask = torch.tensor(
            [context is not None for context in contexts], device=self.device
        )
        return success, demonstrations, feedback

    def route(self, rollout: RolloutBatch) -> None:
        """Leave in `self_distillation_mask` the rows that are distilled, and weigh their prompts.
        Collective."""
        assert rollout.self_distillation_mask is not None and rollout.rewards is not None
        is_success = self.reprompt.is_success(rollout.rewards)
        if self.distillation.rows == "failed":
            rollout.self_distillation_mask = rollout.self_distillation_mask & ~is_success
        if self.gate is not None:
            is_open = self.gate.is_open(rollout.prompt_row).to(self.device)
            rollout.self_distillation_mask = rollout.self_distillation_mask & is_open
        if self.distillation.prompt_weight == "sqrt_pq":
            rollout.distillation_weights = pass_rate_weights(is_success, rollout.num_generations)
        self.sums.add("sdpo/distilled_frac", rollout.self_distillation_mask.sum(), len(rollout))

    def policy_rows(self, rows: RolloutBatch) -> RolloutBatch:
        """The rows as the policy loss sees them: with rows="failed", no token of a distilled row counts."""
        if self.distillation.rows == "all" or not self.has_distillation_term:
            return rows
        assert rows.completion_mask is not None and rows.self_distillation_mask is not None
        return replace(rows, completion_mask=rows.completion_mask & ~rows.self_distillation_mask[:, None])

    def picked(self, rows: RolloutBatch) -> Tensor:
        return super().picked(self.policy_rows(rows))

    def feedback(self, rollout: RolloutBatch) -> list[str | None]:
        """Feedback of each row: the reward's text, else the static column's."""
        key = self.trainer.datamodule.privileged_context_key  # type: ignore[attr-defined]
        static = rollout.columns.get(key) or [None] * len(rollout)
        said = rollout.feedback or [None] * len(rollout)
        return [dynamic or column for dynamic, column in zip(said, static, strict=True)]

    def report_contexts(
        self,
        rollout: RolloutBatch,
        success: list[bool],
        demonstrations: list[str | None],
        feedback: list[str | None],
    ) -> None:
        """Count successes and teacher contexts."""
        assert rollout.self_distillation_mask is not None
        rows, size = len(rollout), rollout.num_generations
        groups = [any(success[i : i + size]) for i in range(0, rows, size)]
        self.sums.add("sdpo/success_group_frac", sum(groups), len(groups))
        self.sums.add("sdpo/reprompted_frac", rollout.self_distillation_mask.sum(), rows)
        self.sums.add("sdpo/demonstration_frac", sum(d is not None for d in demonstrations), rows)
        self.sums.add("sdpo/feedback_available_frac", sum(bool(f and f.strip()) for f in feedback), rows)

    def totals(self, rows: RolloutBatch) -> SDPOTotals:  # type: ignore[override]
        policy = super().totals(self.policy_rows(rows))
        if not self.has_distillation_term:
            return SDPOTotals(policy, policy)
        distillation = self.global_totals(_distillation_mask(rows))
        if self.distillation.distillation_divisor == "all_rows":
            distillation = distillation._replace(rows=super().totals(rows).rows)
        return SDPOTotals(policy, distillation)

    def rows_in_loss(self, rows: RolloutBatch) -> RolloutBatch:
        """Without a policy term,
        only rows that have a teacher; one row stays so that the loss has a graph."""
        if not self.has_distillation_term:
            return super().rows_in_loss(rows)
        if self.has_policy_term:
            return rows
        assert rows.self_distillation_mask is not None
        index = rows.self_distillation_mask.nonzero().flatten()
        return rows.select(index if len(index) else [0])

    def loss(self, micro_batch: RolloutBatch, totals: SDPOTotals) -> Tensor:  # type: ignore[override]
        weight = self.distillation.distillation_weight
        if not self.has_distillation_term:
            return super().loss(micro_batch, totals.policy)
        loss = self.distillation_term(micro_batch, totals.distillation)
        if self.has_policy_term:
            loss = weight * loss + (1 - weight) * super().loss(self.policy_rows(micro_batch), totals.policy)
        return loss

    def distillation_term(self, micro_batch: RolloutBatch, totals: Totals) -> Tensor:
        """Divergence to the teacher over these rows, as a share of the optimizer batch."""
        mask = _distillation_mask(micro_batch)
        if self.distillation.distillation_mode == "sampled_token":
            logps = self.score(self.policy, micro_batch).logps
            teacher_logps = micro_batch.teacher_logps
            if teacher_logps is None:
                teacher_logps = self.teacher_logps(micro_batch)
            per_token = sampled_token_loss(logps, teacher_logps)
        else:
            per_token, logps = self.token_divergence(micro_batch)
        per_token = self.distillation.weighted(per_token, logps, micro_batch.old_logps)
        if micro_batch.rollout_is_weights is not None:
            per_token = per_token * micro_batch.rollout_is_weights
        if micro_batch.distillation_weights is not None:
            per_token = per_token * micro_batch.distillation_weights[:, None]
        loss = self.distillation.mean(per_token, mask, totals)
        self.sums.add_share("train/distillation_loss", loss)
        return loss

    def token_divergence(self, micro_batch: RolloutBatch) -> tuple[Tensor, Tensor]:
        """(B, T) divergence over the vocabulary or its top entries, and (B, T) log-probabilities of the
        student."""
        assert self.teacher is not None and micro_batch.completion_ids is not None
        assert micro_batch.completion_len is not None
        completions = (micro_batch.completion_ids, micro_batch.completion_len)
        student = completion_hidden(
            self.policy, Rows(micro_batch.prompt_ids, micro_batch.prompt_len, *completions)
        )
        with torch.no_grad(), self.clock("teacher"), self.teacher.model() as model:
            teacher = completion_hidden(model, _teacher_rows(micro_batch))
            teacher_head = head_of(model)
        flat, logps = self.distillation.divergence(
            student,
            teacher,
            head_of(self.policy),
            teacher_head,
            micro_batch.completion_ids[micro_batch.token_mask],
            self.sampling.temperature,
        )
        zeros = flat.new_zeros(micro_batch.completion_ids.shape)
        return tuple(zeros.masked_scatter(micro_batch.token_mask, x) for x in (flat, logps))  # type: ignore[return-value]

    @torch.no_grad()
    def teacher_logps(self, rollout: RolloutBatch) -> Tensor:
        """(B, T) log-probabilities under the teacher with its own prompt, 0 in rows that have no teacher."""
        assert self.teacher is not None and rollout.completion_ids is not None
        assert rollout.self_distillation_mask is not None
        out = torch.zeros(rollout.completion_ids.shape, dtype=logps_dtype(self.policy), device=self.device)
        index = rollout.self_distillation_mask.nonzero().flatten()
        taught = rollout.select(index)
        with self.clock("teacher"), self.teacher.model() as model:
            for piece in self.batch.score_batches(taught):
                rows = _teacher_rows(taught.select(piece))
                scores = score(model, rows, temperature=self.sampling.temperature)
                out[index[piece]] = scores.logps.to(out.dtype)
        return out

    def sync(self) -> None:
        super().sync()
        if self.teacher is not None:
            self.teacher_settings.follow(self.teacher, self.step + 1)


def _distillation_mask(rows: RolloutBatch) -> Tensor:
    assert rows.completion_mask is not None and rows.self_distillation_mask is not None
    return rows.completion_mask & rows.self_distillation_mask[:, None]


def _teacher_rows(rows: RolloutBatch) -> Rows:
    assert rows.teacher_prompt_ids is not None and rows.teacher_prompt_len is not None
    assert rows.completion_ids is not None and rows.completion_len is not None
    return Rows(rows.teacher_prompt_ids, rows.teacher_prompt_len, rows.completion_ids, rows.completion_len)


def _prompt_mask(rows: RolloutBatch) -> Tensor:
    assert rows.teacher_prompt_ids is not None and rows.teacher_prompt_len is not None
    width = rows.teacher_prompt_ids.shape[1]
    return length_mask(rows.teacher_prompt_len, width).flip(1)
