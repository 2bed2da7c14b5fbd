"""SDPO: self-distillation policy optimization.

The policy is its own teacher: shown a success of the same group, or the environment's feedback, it scores the
student's completion again, token by token, and the student moves toward that. A sparse reward becomes a dense
signal without a second network. Differs from GRPO in `prepare` (teacher contexts), `loss` (divergence to the
teacher, mixed with GRPO's by `distillation_weight`) and `sync` (the teacher follows). Huebotter et al.,
"Reinforcement Learning via Self-Distillation", arXiv 2601.20802; parameters and events as in TRL's
SDPOTrainer. SDPO.md beside this file works an example by hand and lists the metrics.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_rl.algorithms.grpo import GRPO
from lit_rl.algorithms.state import Stateful
from lit_rl.algorithms.student_scores import (
    StudentScores,
    at_tokens,
    logit_scores,
    teacher_rows,
    top_entries,
)
from lit_rl.algorithms.teacher_context import (
    TeacherContexts,
    add_context_metrics,
    fill_in_,
    teacher_contexts,
    teacher_inputs,
)
from lit_rl.algorithms.teacher_server import as_the_teacher_reads, check_teacher_server, put_scores_
from lit_rl.batch import RolloutBatch
from lit_rl.errors import ConfigError
from lit_rl.functional.distillation import Source, sampled_token_loss, source_logps
from lit_rl.functional.masking import Totals
from lit_rl.hooks import emit
from lit_rl.models.flat_attention import shares_prefixes
from lit_rl.models.parameters import logps_dtype
from lit_rl.models.weights import base_of
from lit_rl.objectives.distillation import Distillation
from lit_rl.objectives.reprompt import Reprompt
from lit_rl.objectives.routing import PromptGate, RunGate, TeacherGate, pass_rate_weights
from lit_rl.objectives.teacher import Teacher
from lit_rl.rollout.noise import uniforms
from lit_rl.seeding import derived_seed


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
        if self.teacher_settings.use_teacher_server:
            check_teacher_server(self.distillation, self.sampling)
            self.longest_other_prompt = self.reprompt.max_reprompt_len

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

    @property
    def feedback_key(self) -> str:
        """The column with static feedback."""
        return self.trainer.datamodule.privileged_context_key  # type: ignore[attr-defined]

    def setup(self, stage: str) -> None:
        if stage == "fit" and self.has_distillation_term and self.reprompt.needs_column:
            self.reprompt.check_columns(self.trainer.datamodule.column_names(), self.feedback_key)  # type: ignore[attr-defined]
        super().setup(stage)

    def build_roles(self) -> None:
        super().build_roles()
        if self.has_distillation_term and not self.teacher_settings.use_teacher_server:
            self.teacher = self.teacher_settings.scorer(self.policy)

    # ------------------------------------------------------------------------------------------ once per step

    def prepare(self, rollout: RolloutBatch) -> None:
        super().prepare(rollout)
        if not self.has_distillation_term:
            return
        with self.clock("teacher"):
            self.build_teacher_context(rollout)
            self.route(rollout)
            if self.teacher_settings.use_teacher_server:
                self.ask_teacher_server(rollout)
            elif self.distillation.is_sampled and self.teacher_settings.is_fixed_in_step:
                rollout.teacher_logps = self.teacher_logps(rollout)
        ids, mask = teacher_inputs(rollout)
        emit(
            self,
            "on_self_distillation_batch_prepared",
            prompt_ids=rollout.prompt_ids,
            completion_ids=rollout.completion_ids,
            old_per_token_logps=rollout.old_logps,
            teacher_input_ids=ids,
            teacher_attention_mask=mask,
            self_distillation_mask=rollout.self_distillation_mask,
        )

    def build_teacher_context(self, rollout: RolloutBatch) -> None:
        """Fill in what the teacher sees, count it, and tell the callbacks."""
        contexts = self.fill_teacher_prompts(rollout)
        has_feedback = self.reprompt.include_environment_feedback
        add_context_metrics(self.sums, contexts, rollout.num_generations, has_feedback=has_feedback)
        ids, mask = teacher_inputs(rollout)
        emit(
            self,
            "on_teacher_context_built",
            teacher_input_ids=ids,
            teacher_attention_mask=mask,
            completion_mask=rollout.completion_mask,
            self_distillation_mask=rollout.self_distillation_mask,
            rollout=rollout,
        )

    def fill_teacher_prompts(self, rollout: RolloutBatch) -> TeacherContexts:
        """Fill in the teacher's prompts and `self_distillation_mask`."""
        contexts = teacher_contexts(
            rollout,
            self.samples(rollout),
            self.reprompt,
            self.chat,
            feedback_key=self.feedback_key,
            numbers=self.demonstration_numbers(rollout),
            image_key=None if rollout.images is None else self.trainer.datamodule.image_key,  # type: ignore[attr-defined]
        )
        fill_in_(rollout, contexts.prompts, self.chat.pad_token_id)
        return contexts

    def demonstration_numbers(self, rollout: RolloutBatch) -> list[float]:
        """B numbers in [0, 1) that depend on (seed, step, prompt row, generation) alone."""
        generations = [row % rollout.num_generations for row in range(len(rollout))]
        seed = derived_seed(self.seed, "demonstration")
        return uniforms(seed, self.step, rollout.prompt_row.tolist(), generations, 1)[:, 0].tolist()

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

    @torch.no_grad()
    def teacher_logps(self, rollout: RolloutBatch) -> Tensor:
        """(B, T) log-probabilities under the teacher with its own prompt, 0 in rows that have no teacher."""
        assert rollout.completion_ids is not None and rollout.self_distillation_mask is not None
        assert self.teacher is not None
        out = torch.zeros(rollout.completion_ids.shape, dtype=logps_dtype(self.policy), device=self.device)
        index = rollout.self_distillation_mask.nonzero().flatten()
        taught = rollout.select(index)
        ids, lengths, *_ = teacher_rows(taught)
        shown = replace(taught, prompt_ids=ids, prompt_len=lengths)
        with self.teacher.ready():
            for piece in self.batch.score_batches(shown, is_sharing=shares_prefixes(self.policy)):
                rows = taught.select(piece)
                assert rows.completion_ids is not None
                flat = source_logps(
                    self.teacher_sources(rows),
                    rows.completion_ids[rows.token_mask],
                    temperature=self.sampling.temperature,
                )
                out[index[piece]] = at_tokens(rows.token_mask, flat).to(out.dtype)
        return out

    def ask_teacher_server(self, rollout: RolloutBatch) -> None:
        """Fill in what the rollout engine, which holds the policy, says under the teacher's prompts.

        Raises:
            ConfigError: no engine is at hand.
        """
        assert rollout.completion_ids is not None and rollout.self_distillation_mask is not None
        if self.engine_score is None:
            raise ConfigError(
                "algo.teacher.use_teacher_server needs completions of this step's engine (found rows that "
                "brought their own): add the callback RolloutGeneration (callbacks.rollout=${rollout})."
            )
        index = rollout.self_distillation_mask.nonzero().flatten()
        every = base_of(self.policy).get_output_embeddings().weight.shape[0]
        topk = min(self.distillation.distillation_topk or 0, every)
        shape = rollout.completion_ids.shape
        rollout.teacher_logps = torch.zeros(shape, device=self.device)
        if topk:
            rollout.teacher_top_ids = torch.zeros((*shape, topk), dtype=torch.long, device=self.device)
            rollout.teacher_top_logps = torch.zeros((*shape, topk), device=self.device)
        if len(index):
            put_scores_(rollout, index, self.engine_score(as_the_teacher_reads(rollout.select(index)), topk))

    def teacher_sources(self, rows: RolloutBatch) -> list[Source]:
        """What the teacher's logits at the completions of these rows are made of, without gradient."""
        assert self.teacher is not None
        with self.clock("teacher"):
            return self.teacher.sources(teacher_rows(rows))

    def sync(self) -> None:
        super().sync()
        if self.teacher is not None:
            self.teacher_settings.follow(self.teacher, self.step + 1)
            self.sums.add("sdpo/teacher_moves", self.teacher_settings.moves(self.step + 1))

    # ----------------------------------------------------------------------------------- per optimizer batch

    def distillation_mask(self, rows: RolloutBatch) -> Tensor:
        """(B, T) bool: tokens that count in the distillation loss."""
        assert rows.completion_mask is not None and rows.self_distillation_mask is not None
        return rows.completion_mask & rows.self_distillation_mask[:, None]

    def totals(self, rows: RolloutBatch) -> SDPOTotals:  # type: ignore[override]
        policy = super().totals(self.policy_rows(rows))
        if not self.has_distillation_term:
            return SDPOTotals(policy, policy)
        distillation = self.global_totals(self.distillation_mask(rows))
        self.sums.add("sdpo/empty_batch_frac", distillation.tokens == 0)
        if self.distillation.distillation_divisor == "all_rows":
            distillation = distillation._replace(rows=super().totals(rows).rows)
        return SDPOTotals(policy, distillation)

    def rows_in_loss(self, rows: RolloutBatch) -> RolloutBatch:
        """Without a policy term only rows that have a teacher; one stays so that the loss has a graph."""
        if not self.has_distillation_term:
            return super().rows_in_loss(rows)
        if self.has_policy_term:
            return rows
        index = self.distillation_mask(rows).any(1).nonzero().flatten()
        return rows.select(index if len(index) else [0])

    # --------------------------------------------------------------------------------------- per micro-batch

    def loss(self, micro_batch: RolloutBatch, totals: SDPOTotals) -> Tensor:  # type: ignore[override]
        if not self.has_distillation_term:
            return super().loss(micro_batch, totals.policy)
        student = self.student_scores(micro_batch)
        self.weigh_(micro_batch, student.logps)
        loss = self.distillation_term(micro_batch, student, totals.distillation)
        if self.has_policy_term:
            weight = self.distillation.distillation_weight
            loss = weight * loss + (1 - weight) * self.policy_part(micro_batch, student, totals.policy)
        return loss

    def policy_part(self, micro_batch: RolloutBatch, student: StudentScores, totals: Totals) -> Tensor:
        """GRPO's loss from the same pass; an exact KL needs a pass of its own."""
        rows = self.policy_rows(micro_batch)
        if self.kl.is_exact_in_loss:
            return super().loss(rows, totals)
        return self.policy_term(rows, student.logps, student.entropy, totals)

    def student_scores(self, rows: RolloutBatch) -> StudentScores:
        """The student against the teacher, by the sampled token or by its logits."""
        assert rows.self_distillation_mask is not None
        if not self.distillation.is_sampled:
            teacher: Any = (
                top_entries(rows)
                if self.teacher_settings.use_teacher_server
                else self.teacher_sources(rows.select(rows.self_distillation_mask.nonzero().flatten()))
            )
            return logit_scores(
                self.policy,
                rows,
                teacher,
                self.distillation,
                self.sampling.temperature,
                entropy_gradient=self.has_entropy_term,
            )
        logps, entropy = self.score(self.policy, rows, with_entropy=True)
        teacher_logps = self.teacher_logps(rows) if rows.teacher_logps is None else rows.teacher_logps
        assert entropy is not None
        loss = sampled_token_loss(logps, teacher_logps)
        return StudentScores(logps, entropy, loss, (logps - teacher_logps).detach())

    def distillation_term(self, micro_batch: RolloutBatch, student: StudentScores, totals: Totals) -> Tensor:
        """Divergence to the teacher over these rows, as a share of the optimizer batch."""
        mask = self.distillation_mask(micro_batch)
        weights = self.distillation.importance(student.logps, micro_batch.old_logps)
        if micro_batch.rollout_is_weights is not None:
            weights = weights * micro_batch.rollout_is_weights
        if micro_batch.distillation_weights is not None:
            weights = weights * micro_batch.distillation_weights[:, None]
        loss = self.distillation.mean(student.loss * weights, mask, totals)
        self.sums.add_share("train/distillation_loss", loss)
        self.report_distillation(micro_batch, student, mask)
        return loss

    def report_distillation(self, micro_batch: RolloutBatch, student: StudentScores, mask: Tensor) -> None:
        """Distance to the teacher, capped ratios, and the entropy where the policy term does not say it."""
        tokens = mask.sum()
        self.sums.add("sdpo/divergence", (student.divergence * mask).sum(), tokens)
        capped = self.distillation.is_capped(student.logps, micro_batch.old_logps)
        self.sums.add("sdpo/importance_capped_frac", (capped & mask).sum(), tokens)
        if not self.has_policy_term:
            self.sums.add("train/entropy", (student.entropy.detach() * mask).sum(), tokens)
