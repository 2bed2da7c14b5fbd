"""PPO: proximal policy optimization with a critic.

A second network, the critic, estimates at each token what is still to be earned. A token's advantage is how
much better things went than the critic expected, with `lam` between one step ahead (0) and the whole rest
(1), scaled to variance 1 over the tokens of the step; the critic learns toward the returns. Against GRPO it
needs no group, one completion per prompt will do, and it costs a second model.
Schulman et al. 2017, arXiv 1707.06347; advantages: Schulman et al. 2016, arXiv 1506.02438.
"""

from collections.abc import Iterable
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from lit_rl.algorithms.arguments import optimizer_of
from lit_rl.algorithms.grpo import GRPO
from lit_rl.algorithms.reporting import add_value_metrics
from lit_rl.algorithms.sharded import even
from lit_rl.algorithms.updates import Network, as_list
from lit_rl.batch import RolloutBatch
from lit_rl.errors import ConfigError
from lit_rl.functional.masking import Totals
from lit_rl.models.critic import vocabulary_size
from lit_rl.models.flat_attention import shares_prefixes
from lit_rl.models.score import rows_of
from lit_rl.models.sharding import gathered
from lit_rl.objectives.advantage import Advantage
from lit_rl.objectives.batch_plan import BatchPlan
from lit_rl.objectives.value import Critic


class PPO(GRPO):
    """Proximal policy optimization.

    Args:
        critic: the value model, its optimizer and loss.
        advantage: generalised advantage estimation, `adv_estimator` "gae".
        base: the arguments of `GRPO`.

    Raises:
        ConfigError: another estimator, which would leave the critic without effect, or a critic with another
            vocabulary than the policy's.
    """

    def __init__(self, *, critic: Critic, advantage: Advantage | None = None, **base: Any) -> None:
        super().__init__(advantage=advantage or Advantage(adv_estimator="gae"), **base)
        self.value = critic
        self.critic = critic.model
        sizes = [vocabulary_size(model) for model in (self.critic, self.policy)]
        if sizes[0] != sizes[1]:
            raise ConfigError(
                f"algo.critic.model.path must have the policy's vocabulary of {sizes[1]} tokens (found "
                f"{sizes[0]}); name a model with the same tokenizer."
            )
        own = critic.micro_batch_size
        self.critic_batch = None if own is None else BatchPlan(micro_batch_size=own)

    def _check_estimator(self) -> None:
        estimator = self.advantage.adv_estimator
        if estimator != "gae":
            raise ConfigError(
                f"algo.advantage.adv_estimator must be 'gae' for PPO (found {estimator!r}): no other one "
                "uses the critic; set algo=grpo for one without."
            )

    @property
    def is_warming_up(self) -> bool:
        """Whether this step trains the critic alone."""
        return self.step < self.value.critic_warmup

    # ------------------------------------------------------------------------------------------ once per step

    def prepare(self, rollout: RolloutBatch) -> None:
        super().prepare(rollout)
        rollout.values = self.values(rollout)

    @torch.no_grad()
    def values(self, rollout: RolloutBatch) -> Tensor:
        """(B, T) the critic's values without gradient, in score micro-batches."""
        pieces = list(self.batch.score_batches(rollout, is_sharing=shares_prefixes(self.policy)))
        with gathered(self.critic):
            values = torch.cat([self.critic(rows_of(rollout.select(piece))) for piece in pieces])
        return values[torch.cat(pieces).argsort().to(values.device)]

    def credit_(self, rollout: RolloutBatch) -> None:
        """Advantages of the tokens, and the returns that the critic learns toward. Collective."""
        assert rollout.values is not None and rollout.completion_mask is not None
        credit = self.advantage.gae(self.scored_rows(rollout), rollout.values)
        rollout.advantages, rollout.returns = credit
        add_value_metrics(self.sums, rollout.values, credit.returns, rollout.completion_mask)

    # ----------------------------------------------------------------------------------- per optimizer batch

    def micro_batches(self, rows: RolloutBatch) -> list[RolloutBatch]:
        """Rows for both networks at once, or those for the policy and then those for the critic.

        A piece without advantages is for the critic alone, one without returns for the policy alone.
        """
        for_critic, is_sharing = replace(rows, advantages=None), shares_prefixes(self.policy)
        pieces: Iterable[RolloutBatch]
        if self.is_warming_up:
            pieces = (self.critic_batch or self.batch).micro_batches(for_critic, is_sharing=is_sharing)
        elif self.critic_batch is None:
            pieces = self.batch.micro_batches(rows, is_sharing=is_sharing)
        else:
            for_policy = super().micro_batches(replace(rows, returns=None))
            pieces = chain(for_policy, self.critic_batch.micro_batches(for_critic))
        return even(list(pieces), self.policy)

    def networks(self) -> list[Network]:
        (policy,) = super().networks()
        optimizer = as_list(self.optimizers())[1]
        critic = Network("critic", self.critic, optimizer, self.value.max_grad_norm)
        return [replace(policy, learns=not self.is_warming_up), critic]

    # --------------------------------------------------------------------------------------- per micro-batch

    def loss(self, micro_batch: RolloutBatch, totals: Totals) -> Tensor:
        terms = []
        if micro_batch.advantages is not None:
            terms.append(super().loss(micro_batch, totals))
        if micro_batch.returns is not None:
            terms.append(self.value.value_loss_coef * self.value_term(micro_batch, totals))
        return torch.stack(terms).sum()

    def value_term(self, micro_batch: RolloutBatch, totals: Totals) -> Tensor:
        """The critic's loss of these rows, as a share of the optimizer batch."""
        mask, old_values, returns = micro_batch.completion_mask, micro_batch.values, micro_batch.returns
        assert mask is not None and old_values is not None and returns is not None
        values = self.critic(rows_of(micro_batch))
        loss = self.policy_loss.mean(self.value.per_token(values, old_values, returns), mask, totals)
        clipped = self.value.is_clipped(values.detach(), old_values, returns) & mask
        self.sums.add_share("train/value_loss", loss)
        self.sums.add("train/value_clip_frac", clipped.sum(), mask.sum())
        return loss

    # ------------------------------------------------------------------------------------------------- setup

    def configure_optimizers(self) -> Any:
        """The policy's optimizer and schedule, then the critic's."""
        own = self.scheduled(optimizer_of(self.value.optim, self.critic), self.value.schedule)
        return [super().configure_optimizers(), own]
