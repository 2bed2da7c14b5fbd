"""GRPO: group-relative policy optimization.

No critic: a completion's advantage is its reward against the other completions of the same prompt, and every
token of the row gets it. The loss is PPO's clipped ratio plus `beta` times a KL to the reference.
DeepSeekMath (Shao et al. 2024, arXiv 2402.03300), eq. 3; `loss_type` and `scale_rewards` give Dr. GRPO (arXiv
2503.20783) and DAPO (arXiv 2503.14476), `importance_sampling_level=sequence` gives GSPO (arXiv 2507.18071).
"""

from typing import Any

from torch import Tensor

from lit_rl.algorithms.base import RLModule
from lit_rl.batch import RolloutBatch
from lit_rl.errors import ConfigError
from lit_rl.functional.masking import Totals
from lit_rl.functional.policy_loss import clip_fraction
from lit_rl.models.roles import reference_of
from lit_rl.objectives.advantage import Advantage
from lit_rl.objectives.kl import KL
from lit_rl.objectives.policy import ClippedSurrogate


class GRPO(RLModule):
    """Group-relative policy optimization.

    Args:
        advantage: how rewards become credit.
        policy_loss: the clipped surrogate and its average.
        kl: the penalty towards the reference; beta 0 loads none.
        base: the arguments of `RLModule`.

    Raises:
        ConfigError: groups of one, which have nothing to be compared with.
    """

    def __init__(
        self,
        *,
        advantage: Advantage | None = None,
        policy_loss: ClippedSurrogate | None = None,
        kl: KL | None = None,
        **base: Any,
    ) -> None:
        super().__init__(**base)
        self.advantage = advantage or Advantage()
        self.policy_loss = policy_loss or ClippedSurrogate()
        self.kl = kl or KL()
        if self.num_generations < 2 and self.has_policy_term and self.advantage.adv_estimator == "grpo":
            raise ConfigError(
                f"algo.num_generations must be >= 2 for algo.advantage.adv_estimator='grpo' (found "
                f"{self.num_generations}): a group of one has nothing to be compared with."
            )

    @property
    def has_policy_term(self) -> bool:
        """Whether the policy loss counts in the loss."""
        return True

    def build_roles(self) -> None:
        if self.kl.beta > 0:
            self.ref = reference_of(self.policy)

    def prepare(self, rollout: RolloutBatch) -> None:
        super().prepare(rollout)
        if self.ref is not None:
            with self.ref.model() as model:
                rollout.ref_logps = self.logps(model, rollout)

    def assign_credit(self, rollout: RolloutBatch) -> None:
        assert rollout.rewards is not None
        rollout.advantages = self.advantage(rollout.rewards, self.num_generations)

    def rows_in_loss(self, rows: RolloutBatch) -> RolloutBatch:
        """Rows without an advantage have no gradient: with nothing else in the loss they need no pass."""
        is_all = self.ref is not None or self.policy_loss.entropy_coeff > 0
        if is_all or self.policy_loss.loss_type == "bnpo":
            return rows
        assert rows.advantages is not None
        index = rows.advantages.nonzero().flatten()
        return rows.select(index if len(index) else [0])

    def loss(self, micro_batch: RolloutBatch, totals: Totals) -> Tensor:
        scores = self.score(self.policy, micro_batch, with_entropy=True)
        return self.policy_term(micro_batch, scores.logps, scores.entropy, totals)

    def policy_term(
        self, micro_batch: RolloutBatch, logps: Tensor, entropy: Tensor | None, totals: Totals
    ) -> Tensor:
        """Clipped surrogate, KL and entropy of these rows, as a share of the optimizer batch.

        Args:
            micro_batch: rows with advantages, and ref_logps where there is a reference.
            logps: (B, T), with gradient.
            entropy: (B, T), with gradient where it is in the loss.
            totals: of the optimizer batch over all ranks.
        """
        mask, advantages = micro_batch.completion_mask, micro_batch.advantages
        assert mask is not None and advantages is not None and entropy is not None
        old_logps = logps.detach() if micro_batch.old_logps is None else micro_batch.old_logps
        log_ratios = self.policy_loss.log_ratio(logps, old_logps, mask)
        policy_loss = self.policy_loss.mean(self.policy_loss.per_token(log_ratios, advantages), mask, totals)
        loss, tokens = policy_loss, mask.sum()
        if self.ref is not None:
            assert micro_batch.ref_logps is not None
            kl = self.kl.per_token(logps, micro_batch.ref_logps)
            loss = loss + self.kl.beta * self.policy_loss.mean(kl, mask, totals)
            self.sums.add("train/kl", (kl.detach() * mask).sum(), tokens)
        if self.policy_loss.entropy_coeff > 0:
            loss = loss - self.policy_loss.entropy_coeff * self.policy_loss.mean(entropy, mask, totals)
        self.sums.add_share("train/policy_loss", policy_loss)
        self.sums.add("train/entropy", (entropy.detach() * mask).sum(), tokens)
        clipped = clip_fraction(log_ratios.detach(), advantages, mask, *self.policy_loss.bounds)
        self.sums.add("train/clip_frac", clipped * tokens, tokens)
        return loss
