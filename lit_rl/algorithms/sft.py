"""SFT: supervised fine-tuning.

The negative log-likelihood of the completion tokens that count, averaged over the tokens of the whole
optimizer batch on all ranks. No rollout, no reward: the rows carry their completions. It shares the step,
scoring and batch arithmetic of the other algorithms.
"""

from typing import Any

import torch
from torch import Tensor

from lit_rl.algorithms.base import RLModule
from lit_rl.batch import RolloutBatch
from lit_rl.distributed import all_sum_
from lit_rl.functional.masking import Totals, aggregate


class SFT(RLModule):
    """Supervised fine-tuning on rows that carry their completions.

    Args:
        base: the arguments of `RLModule`; `num_generations` is 1 and there is no reward.
    """

    def __init__(self, **base: Any) -> None:
        super().__init__(num_generations=1, **base)
        self._validation_sums = torch.zeros(2, dtype=torch.float64)

    def prepare(self, rollout: RolloutBatch) -> None:
        """Nothing to compare with."""

    def loss(self, micro_batch: RolloutBatch, totals: Totals) -> Tensor:
        mask = micro_batch.completion_mask
        assert mask is not None
        logps = self.score(self.policy, micro_batch).logps
        return aggregate(-logps, mask, mode="token_mean", totals=totals)

    @torch.no_grad()
    def validation_step(self, batch: RolloutBatch, batch_idx: int) -> None:
        """Add up the negative log-likelihood of the validation rows."""
        with self.clock("validate"):
            rollout = self.take_rollout(batch)
            assert rollout.completion_mask is not None
            nll = -(self.logps(self.policy, rollout) * rollout.completion_mask).sum()
            self._validation_sums += torch.stack([nll, rollout.completion_mask.sum()]).double().cpu()

    def on_validation_epoch_end(self) -> None:
        """Log the mean over all tokens of all ranks. Collective."""
        total, tokens = all_sum_(self._validation_sums.clone()).tolist()
        self.log_dict({"val/loss": total / max(tokens, 1.0), "val/tokens": tokens}, sync_dist=True)
        self._validation_sums.zero_()
