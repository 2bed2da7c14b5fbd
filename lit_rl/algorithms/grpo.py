"""GRPO: group-relative policy optimization, and what differs from it in settings only.

No critic: a completion's advantage is its reward against the other completions of the same prompt, and every
token of the row gets it. The loss is PPO's clipped ratio plus `beta` times a KL to the reference.
DeepSeekMath (Shao et al. 2024, arXiv 2402.03300), eq. 3; `loss_type` and `scale_rewards` give Dr. GRPO (arXiv
2503.20783) and DAPO (arXiv 2503.14476), `importance_sampling_level=sequence` gives GSPO (arXiv 2507.18071),
`adv_estimator` RLOO and REINFORCE++, another `policy_loss` CISPO; conf/algo has a file for each.
"""

from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lit_rl.algorithms.base import RLModule, Stateful
from lit_rl.algorithms.refills import Refills, greedy_rewards
from lit_rl.algorithms.reporting import add_correction_metrics, add_mismatch
from lit_rl.batch import RolloutBatch
from lit_rl.distributed import gather_rows
from lit_rl.errors import ConfigError
from lit_rl.functional.masking import Totals, clamped_frac, masked_mean
from lit_rl.functional.policy_loss import LOG_RATIO_BOUND
from lit_rl.models.flat_attention import shares_prefixes
from lit_rl.models.score import rows_of
from lit_rl.models.score_kl import KLScores, score_kl
from lit_rl.models.sharding import gathered
from lit_rl.objectives.advantage import Advantage, ScoredRows
from lit_rl.objectives.covariance_losses import TokenPicking
from lit_rl.objectives.dynamic_sampling import DynamicSampling
from lit_rl.objectives.kl import KL, KLCoefficient
from lit_rl.objectives.policy import ClippedSurrogate, PolicyLoss, Terms
from lit_rl.objectives.reference import Ref
from lit_rl.objectives.rollout_correction import RolloutCorrection
from lit_rl.rollout.noise import uniforms
from lit_rl.seeding import derived_seed


class GRPO(RLModule):
    """Group-relative policy optimization.

    Args:
        advantage: how rewards become credit.
        policy_loss: the clipped surrogate, or another loss, and its average.
        kl: the penalty towards the reference, in the loss or in the reward; off loads none.
        ref: whose weights the reference has, and where they rest.
        rollout_correction: weights of training over engine probability.
        dynamic_sampling: fresh prompts in the place of groups that teach nothing.
        base: the arguments of `RLModule`.

    Raises:
        ConfigError: groups of one, which have nothing to be compared with, or no estimator for a policy loss.
    """

    def __init__(
        self,
        *,
        advantage: Advantage | None = None,
        policy_loss: PolicyLoss | None = None,
        kl: KL | None = None,
        ref: Ref | None = None,
        rollout_correction: RolloutCorrection | None = None,
        dynamic_sampling: DynamicSampling | None = None,
        **base: Any,
    ) -> None:
        super().__init__(**base)
        self.advantage = advantage or Advantage()
        self.policy_loss = policy_loss or ClippedSurrogate()
        self.has_entropy_term = self.policy_loss.entropy_coeff > 0
        self.kl = kl or KL()
        self.ref_settings = ref or Ref()
        self.kl_coef = KLCoefficient(self.kl.kl_ctrl) if self.kl.use_kl_in_reward else None
        self.rollout_correction = rollout_correction or RolloutCorrection()
        self.refills = Refills(dynamic_sampling or DynamicSampling())
        if self.has_policy_term:
            self._check_estimator()
        if self.rollout_correction.is_unbounded:
            rank_zero_warn(
                "algo.rollout_correction.rollout_is_threshold is null, so that nothing bounds the weights; "
                "set it, e.g. to 2, to silence this."
            )

    def _check_estimator(self) -> None:
        estimator = self.advantage.adv_estimator
        if estimator == "none":
            raise ConfigError(
                "algo.advantage.adv_estimator must not be 'none' where the policy loss counts: it would "
                "learn nothing; 'none' is for algo.distillation.distillation_weight 1.0."
            )
        if estimator == "gae":
            raise ConfigError(
                "algo.advantage.adv_estimator 'gae' needs a critic, which only algo=ppo has; take that, or "
                "an estimator without one."
            )
        if self.num_generations < 2 and self.advantage.is_group_relative:
            raise ConfigError(
                f"algo.num_generations must be >= 2 for algo.advantage.adv_estimator={estimator!r} (found "
                f"{self.num_generations}): a group of one has nothing to be compared with."
            )

    @property
    def has_policy_term(self) -> bool:
        """Whether the policy loss counts in the loss."""
        return True

    @property
    def stateful(self) -> dict[str, Stateful]:
        parts = {"kl_coef": self.kl_coef, "refills": self.refills}
        moving = {name: part for name, part in parts.items() if part is not None and part.is_moving}
        return {**super().stateful, **moving}

    def build_roles(self) -> None:
        if self.kl.needs_reference:
            self.ref = self.ref_settings.role(self.policy, moves=self.ref_moves)

    # ------------------------------------------------------------------------------------------ once per step

    def complete(self, rollout: RolloutBatch) -> None:
        with gathered(self.policy):
            if self.refills.is_moving:
                self.refills(self, rollout)
            if self.advantage.needs_baselines:
                rollout.baselines = greedy_rewards(self, rollout)

    def prepare(self, rollout: RolloutBatch) -> None:
        super().prepare(rollout)
        is_estimated = self.kl.use_kl_in_reward and not self.kl.is_exact_in_reward
        if rollout.old_logps is None and (is_estimated or self.rollout_correction.rejects):
            rollout.old_logps = self.logps(self.policy, rollout)
        if self.ref is None or self.kl.is_exact_in_loss:  # which takes its own passes
            return
        if self.kl.is_exact_in_reward:
            rollout.ref_kl = self.exact_kl(rollout)
            return
        with self.ref.model() as model:
            rollout.ref_logps = self.logps(model, rollout)

    @torch.no_grad()
    def exact_kl(self, rollout: RolloutBatch) -> Tensor:
        """(B, T) KL of the policy from the reference over the vocabulary, in score micro-batches."""
        assert self.ref is not None
        pieces = list(self.batch.score_batches(rollout, is_sharing=shares_prefixes(self.policy)))
        with gathered(self.policy), self.ref.ready():
            kl = torch.cat([self.score_kl(rollout.select(index)).kl for index in pieces])
        return kl[torch.cat(pieces).argsort().to(kl.device)]

    def score_kl(self, rows: RolloutBatch) -> KLScores:
        """Log-probabilities, entropy and exact KL to the reference, with gradient."""
        assert self.ref is not None
        return score_kl(
            self.policy,
            self.ref,
            rows_of(rows),
            temperature=self.sampling.temperature,
            entropy_gradient=self.has_entropy_term,
        )

    def assign_credit(self, rollout: RolloutBatch) -> None:
        """Advantages first, from the rows as they were sampled; then what the engine's mismatch rejects."""
        self.credit_(rollout)
        if self.rollout_correction.rollout_is and rollout.old_logps is not None:
            self.correct_(rollout, rollout.old_logps)

    def credit_(self, rollout: RolloutBatch) -> None:
        """Fill in the advantages. Collective."""
        rollout.advantages = self.advantage(self.scored_rows(rollout), self.num_generations)

    def scored_rows(self, rollout: RolloutBatch) -> ScoredRows:
        """What credit is computed from, a KL in the reward included. Collective."""
        assert rollout.rewards is not None and rollout.completion_len is not None
        assert rollout.completion_mask is not None
        penalty = self.reward_penalty(rollout)
        lengths, mask = rollout.completion_len, rollout.completion_mask
        written = rollout.written_mask.sum(1)
        return ScoredRows(rollout.rewards, lengths, mask, penalty, rollout.baselines, written)

    def reward_penalty(self, rollout: RolloutBatch) -> Tensor:
        """(B, T): what is subtracted from the reward of each token, KL times its weight. Collective.

        The weight moves afterwards, so that a step is scored with one.
        """
        mask, rewards = rollout.completion_mask, rollout.rewards
        assert mask is not None and rewards is not None
        if self.kl_coef is None:
            return torch.zeros(mask.shape, dtype=rewards.dtype, device=rewards.device)
        if self.kl.is_exact_in_reward:
            assert rollout.ref_kl is not None
            kl = rollout.ref_kl
        else:
            assert rollout.old_logps is not None and rollout.ref_logps is not None
            kl = self.kl.in_reward(rollout.old_logps, rollout.ref_logps)
        kl = torch.where(mask, kl, torch.zeros_like(kl))
        penalty = self.kl_coef.value * kl
        self.sums.add("train/kl_in_reward", kl.sum(), mask.sum())
        self.sums.add("train/kl_coef", self.kl_coef.value)
        self.kl_coef.follow(kl, mask)
        return penalty

    def correct_(self, rows: RolloutBatch, old_logps: Tensor) -> None:
        """Fill in the weights against the engine, and take what they reject out of the loss.

        Before optimizer batches are counted, so that divisors leave the rejected tokens out on every rank.
        Where nothing is rejected and the policy has not moved, the update's own pass does: see `weigh_`.

        Args:
            rows: B rows.
            old_logps: (B, T) with the weights at the beginning of the step.

        Raises:
            ConfigError: the engine reported no log-probabilities.
        """
        if rows.rollout_logps is None:
            raise ConfigError(
                "algo.rollout_correction.rollout_is needs the engine's log-probabilities and the rollout has "
                "none; set rollout.calculate_log_probs=true."
            )
        mask = rows.completion_mask
        assert mask is not None
        correction = self.rollout_correction(old_logps, rows.rollout_logps, mask)
        rows.rollout_is_weights, rows.completion_mask = correction.weights, correction.mask
        add_correction_metrics(self.sums, correction, old_logps, rows.rollout_logps, mask)

    def weigh_(self, micro_batch: RolloutBatch, logps: Tensor) -> None:
        """`correct_` from the pass of the only update, (B, T), if it has not been done."""
        if self.rollout_correction.rollout_is and micro_batch.rollout_is_weights is None:
            self.correct_(micro_batch, logps.detach())

    # ----------------------------------------------------------------------------------- per optimizer batch

    def optimizer_batches(self, rollout: RolloutBatch) -> Iterator[RolloutBatch]:
        """As in the base; a loss that picks tokens picks them here, before the batch is cut. Collective."""
        picks = self.has_policy_term and isinstance(self.policy_loss, TokenPicking)
        if picks:
            rollout.noise = self.noise(rollout)
        for rows in super().optimizer_batches(rollout):
            if picks:
                rows.picked = self.picked(rows)
            yield rows

    def noise(self, rollout: RolloutBatch) -> Tensor:
        """(B, T) uniform numbers that depend on (seed, step, prompt row, generation) alone."""
        assert rollout.completion_ids is not None
        size, width = rollout.completion_ids.shape
        generations = [row % self.num_generations for row in range(size)]
        seed = derived_seed(self.seed, "picked tokens")
        return uniforms(seed, self.step, rollout.prompt_row.tolist(), generations, width).to(self.device)

    def picked(self, rows: RolloutBatch) -> Tensor:
        """(B, T) bool: the tokens of this rank that the loss treats apart. Collective."""
        assert isinstance(self.policy_loss, TokenPicking)
        mask, advantages, noise = rows.completion_mask, rows.advantages, rows.noise
        assert mask is not None and advantages is not None and noise is not None
        logps = self.logps(self.policy, rows)
        old_logps = logps if rows.old_logps is None else rows.old_logps
        log_ratios = self.policy_loss.log_ratio(logps, old_logps, mask)
        (*terms, numbers), own = gather_rows(log_ratios, logps, advantages, mask, noise)
        return self.policy_loss.picked(Terms(*terms), numbers)[own, : mask.shape[1]]

    def rows_in_loss(self, rows: RolloutBatch) -> RolloutBatch:
        """Rows without an advantage have no gradient: with nothing else in the loss they need no pass."""
        if self.kl.beta > 0 or self.policy_loss.needs_every_row:
            return rows
        assert rows.advantages is not None
        index = rows.advantages.reshape(len(rows), -1).any(1).nonzero().flatten()
        return rows.select(index if len(index) else [0])

    # --------------------------------------------------------------------------------------- per micro-batch

    def loss(self, micro_batch: RolloutBatch, totals: Totals) -> Tensor:
        if self.kl.is_exact_in_loss:
            exact = self.score_kl(micro_batch)
            self.weigh_(micro_batch, exact.logps)
            return self.policy_term(micro_batch, exact.logps, exact.entropy, totals, exact.kl)
        scores = self.score(self.policy, micro_batch, with_entropy=True)
        self.weigh_(micro_batch, scores.logps)
        return self.policy_term(micro_batch, scores.logps, scores.entropy, totals)

    def policy_term(
        self,
        micro_batch: RolloutBatch,
        logps: Tensor,
        entropy: Tensor | None,
        totals: Totals,
        exact_kl: Tensor | None = None,
    ) -> Tensor:
        """Policy loss, KL and entropy of these rows, as a share of the optimizer batch.

        Args:
            micro_batch: rows with advantages, and ref_logps where there is a reference.
            logps: (B, T), with gradient.
            entropy: (B, T), with gradient where it is in the loss.
            totals: of the optimizer batch over all ranks.
            exact_kl: (B, T), with gradient, where the KL in the loss is over the vocabulary.
        """
        mask, advantages = micro_batch.completion_mask, micro_batch.advantages
        assert mask is not None and advantages is not None and entropy is not None
        old_logps = logps.detach() if micro_batch.old_logps is None else micro_batch.old_logps
        log_ratios = self.policy_loss.log_ratio(logps, old_logps, mask)
        per_token = self.policy_loss.per_token(Terms(log_ratios, logps, advantages, mask, micro_batch.picked))
        if micro_batch.rollout_is_weights is not None:
            per_token = self.policy_loss.weighted(per_token, micro_batch.rollout_is_weights, mask)
        policy_loss = self.policy_loss.mean(per_token, mask, totals)
        loss = policy_loss
        if self.kl.beta > 0:
            loss = loss + self.kl.beta * self.kl_term(micro_batch, logps, totals, exact_kl)
        if self.policy_loss.entropy_coeff > 0:
            loss = loss - self.policy_loss.entropy_coeff * self.policy_loss.mean(entropy, mask, totals)
        self.sums.add_share("train/policy_loss", policy_loss)
        if micro_batch.rollout_logps is not None and micro_batch.rollout_is_weights is None:
            add_mismatch(self.sums, old_logps, micro_batch.rollout_logps, mask)
        self.report_terms(log_ratios.detach(), advantages, mask, entropy.detach())
        return loss

    def kl_term(
        self, micro_batch: RolloutBatch, logps: Tensor, totals: Totals, exact_kl: Tensor | None = None
    ) -> Tensor:
        """KL to the reference of these rows, averaged as the policy loss is. Arguments of `policy_term`."""
        mask, kl = micro_batch.completion_mask, exact_kl
        assert mask is not None
        if kl is None:
            assert micro_batch.ref_logps is not None
            kl = self.kl.per_token(logps, micro_batch.ref_logps)
        tokens = mask.sum()
        self.sums.add("train/kl", (kl.detach() * mask).sum(), tokens)
        self.sums.add("train/kl_clamped_frac", self.kl.clamped_frac(kl, mask) * tokens, tokens)
        return self.policy_loss.mean(kl, mask, totals)

    def report_terms(self, log_ratios: Tensor, advantages: Tensor, mask: Tensor, entropy: Tensor) -> None:
        """Entropy, and how often the ratio is bounded: by the loss, and by the clamp that keeps it finite."""
        tokens = mask.sum()
        clipped = masked_mean(self.policy_loss.is_clipped(log_ratios, advantages).float(), mask)
        self.sums.add("train/entropy", (entropy * mask).sum(), tokens)
        self.sums.add("train/clip_frac", clipped * tokens, tokens)
        clamped = clamped_frac(log_ratios, mask, bound=LOG_RATIO_BOUND)
        self.sums.add("train/ratio_clamped_frac", clamped * tokens, tokens)
