"""Distillation: what is compared with the teacher, and how it is averaged and mixed."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from lit_rl.errors import ConfigError
from lit_rl.functional.distillation import Source, TokenGaps, importance_weight, token_gaps
from lit_rl.functional.logps import Head
from lit_rl.functional.masking import Totals, aggregate
from lit_rl.functional.teacher_support import TopEntries, support_gaps

DIVISORS = {
    "active_tokens": "token_mean",
    "active_rows": "seq_mean_token_mean",
    "all_rows": "seq_mean_token_mean",
}


@dataclass(frozen=True)
class Distillation:
    """The self-distillation term (source: TRL SDPOConfig; Huebotter et al., RL via Self-Distillation).

    Args:
        distillation_weight: loss = (1 - weight) policy loss + weight distillation loss, in [0, 1].
        distillation_alpha: 1 is reverse KL, KL(student || teacher); 0 forward; between, generalised
            Jensen-Shannon.
        distillation_mode: compare the "sampled_token" only, the student's "topk_logits", or "full_logits".
        distillation_is_clip: cap of the ratio (policy now / policy at rollout) that weighs each token; null
            leaves tokens unweighted.
        distillation_topk: entries compared in mode topk_logits.
        distillation_add_tail: one more bucket for the probability outside the top entries; else both are
            renormalised.
        distillation_divisor: "active_tokens" averages over the tokens of rows that have a teacher;
            "active_rows" over the tokens of each row, then over those rows; "all_rows" then over all rows, as
            TRL does.
        chunk_tokens: positions whose logits exist at once.
        rows: "all" rows that have a teacher are distilled, and all rows take the policy gradient; "failed":
            a failed row that has a teacher is only distilled, every other row only takes the policy gradient
            (SRPO, Li et al. 2026, arXiv 2604.02288).
        prompt_weight: "sqrt_pq" weighs each prompt's rows by sqrt(p (1 - p)), p its share of successes, over
            the mean of that (SC-SDPO, Liu et al. 2026, arXiv 2605.27765); "none" weighs all prompts alike.
        gate: distil only while the teacher's prompt makes the policy better: "run" by the last measurement on
            validation rows, "prompt" by one completion for each row that has a teacher, drawn from its prompt
            in every step; needs callbacks.teacher_gap. "none" always distils.

    Raises:
        ConfigError: a value is out of range, or mode, alpha and top-k do not fit together.
    """

    key: ClassVar[str] = "algo.distillation"

    distillation_weight: float = 1.0
    distillation_alpha: float = 1.0
    distillation_mode: Literal["sampled_token", "topk_logits", "full_logits"] = "sampled_token"
    distillation_is_clip: float | None = 2.0
    distillation_topk: int | None = None
    distillation_add_tail: bool = False
    distillation_divisor: Literal["active_tokens", "active_rows", "all_rows"] = "active_tokens"
    chunk_tokens: int = 512
    rows: Literal["all", "failed"] = "all"
    prompt_weight: Literal["none", "sqrt_pq"] = "none"
    gate: Literal["none", "run", "prompt"] = "none"

    def __post_init__(self) -> None:
        clip, topk = self.distillation_is_clip, self.distillation_topk
        checks = [
            ("distillation_weight", 0 <= self.distillation_weight <= 1, "must be in [0, 1]"),
            ("distillation_alpha", 0 <= self.distillation_alpha <= 1, "must be in [0, 1]"),
            ("distillation_is_clip", clip is None or clip > 0, "must be null or > 0"),
            ("distillation_topk", topk is None or topk >= 1, "must be null or >= 1"),
            ("chunk_tokens", self.chunk_tokens >= 1, "must be >= 1"),
        ]
        for name, is_legal, rule in checks:
            if not is_legal:
                raise ConfigError(f"{self.key}.{name} {rule} (found {getattr(self, name)!r}).")
        self._check_mode()

    def _check_mode(self) -> None:
        mode, alpha, topk = self.distillation_mode, self.distillation_alpha, self.distillation_topk
        if mode == "sampled_token" and alpha != 1.0:
            raise ConfigError(
                f"{self.key}.distillation_alpha must be 1.0 when {self.key}.distillation_mode is "
                f"'sampled_token' (found {alpha!r}): the sampled token estimates the reverse KL only."
            )
        if mode == "topk_logits" and topk is None:
            raise ConfigError(
                f"{self.key}.distillation_topk must be set when {self.key}.distillation_mode is "
                f"'topk_logits' (found None); give an integer >= 1."
            )
        if mode != "topk_logits" and topk is not None:
            raise ConfigError(
                f"{self.key}.distillation_topk must be null when {self.key}.distillation_mode is {mode!r} "
                f"(found {topk!r}); it belongs to 'topk_logits'."
            )
        if self.distillation_add_tail and mode != "topk_logits":
            raise ConfigError(
                f"{self.key}.distillation_add_tail must be false when {self.key}.distillation_mode is "
                f"{mode!r} (found True); it belongs to 'topk_logits'."
            )

    @property
    def is_sampled(self) -> bool:
        """Whether the sampled token alone is compared, so that log-probabilities of the teacher will do."""
        return self.distillation_mode == "sampled_token"

    def gaps(
        self,
        student: Tensor,
        head: Head,
        teacher: Sequence[Source] | TopEntries,
        targets: Tensor,
        temperature: float,
        *,
        entropy_gradient: bool = False,
    ) -> TokenGaps:
        """Divergence at each of N completion tokens, over the vocabulary or some top entries of it.

        Args:
            student: (N, H) hidden states, with gradient.
            head: of the policy.
            teacher: what the teacher's logits are made of, to compare on the student's top entries; or the
                teacher's own top entries, to compare on those.
            targets: (N,) long, the sampled tokens.
            temperature: divides both logits.
            entropy_gradient: let gradients through the entropy too.
        """
        if isinstance(teacher, TopEntries):
            return support_gaps(
                student,
                head,
                teacher,
                targets,
                alpha=self.distillation_alpha,
                add_tail=self.distillation_add_tail,
                temperature=temperature,
                chunk_tokens=self.chunk_tokens,
                entropy_gradient=entropy_gradient,
            )
        return token_gaps(
            student,
            head,
            teacher,
            targets,
            alpha=self.distillation_alpha,
            topk=self.distillation_topk,
            add_tail=self.distillation_add_tail,
            temperature=temperature,
            chunk_tokens=self.chunk_tokens,
            entropy_gradient=entropy_gradient,
        )

    def importance(self, logps: Tensor, old_logps: Tensor | None) -> Tensor:
        """(B, T) capped ratio of the policy now to the policy at rollout, detached; on-policy it is 1.

        Args:
            logps: (B, T) now.
            old_logps: (B, T) at rollout, None where the policy has not moved since.
        """
        if self.distillation_is_clip is None:
            return torch.ones_like(logps)
        return importance_weight(logps, logps if old_logps is None else old_logps, self.distillation_is_clip)

    def is_capped(self, logps: Tensor, old_logps: Tensor | None) -> Tensor:
        """(B, T) bool: tokens whose ratio the cap holds. Arguments as for `importance`."""
        if old_logps is None or self.distillation_is_clip is None:
            return torch.zeros_like(logps, dtype=torch.bool)
        return (logps.detach() - old_logps) > math.log(self.distillation_is_clip)

    def mean(self, per_token: Tensor, mask: Tensor, totals: Totals) -> Tensor:
        """The scalar of this micro-batch; over the micro-batches of all ranks it adds up to the loss.

        Args:
            per_token: (B, T).
            mask: (B, T) bool, tokens that count in rows that have a teacher.
            totals: of the whole optimizer batch; its rows are those the divisor counts.
        """
        return aggregate(per_token, mask, mode=DIVISORS[self.distillation_divisor], totals=totals)
