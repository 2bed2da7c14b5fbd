"""SFT: supervised fine-tuning.

The negative log-likelihood of the completion tokens that count, averaged over the tokens of the whole
optimizer batch on all ranks. No rollout, no reward: the rows carry their completions. It shares the step,
scoring and batch arithmetic of the other algorithms.
"""

import math
from typing import Any

import torch
from torch import Tensor

from lit_rl.algorithms.base import RLModule
from lit_rl.batch import RolloutBatch, length_mask
from lit_rl.distributed import all_sum_
from lit_rl.errors import ConfigError
from lit_rl.functional.cross_entropy import smoothed_nll
from lit_rl.functional.masking import Totals, aggregate
from lit_rl.models.packing import alone, check_packing, laid_out_hidden, packed
from lit_rl.models.score import completion_hidden, head_of, rows_of
from lit_rl.models.weights import base_of
from lit_rl.seeding import derived_generator


class SFT(RLModule):
    """Supervised fine-tuning on rows that carry their completions.

    Args:
        label_smoothing_factor: share of the target that is spread evenly over the vocabulary.
        packing: short rows of a micro-batch share a sequence; less padding, the same loss.
        base: the arguments of `RLModule`; `num_generations` is 1 and there is no reward.

    Raises:
        ConfigError: a value is out of range.
    """

    def __init__(self, *, label_smoothing_factor: float = 0.0, packing: bool = False, **base: Any) -> None:
        super().__init__(num_generations=1, **base)
        if not 0 <= label_smoothing_factor < 1:
            raise ConfigError(
                f"algo.label_smoothing_factor must be in [0, 1) (found {label_smoothing_factor!r})."
            )
        self.label_smoothing_factor, self.packing = label_smoothing_factor, packing
        self._validation_sums = torch.zeros(2, dtype=torch.float64)

    @property
    def neftune_noise_alpha(self) -> float | None:
        """Size of the noise on the embeddings while training, `model.neftune_noise_alpha`."""
        return getattr(base_of(self.policy), "neftune_noise_alpha", None)

    def build_roles(self) -> None:
        """No other model; whether the policy keeps packed rows apart."""
        if self.packing:
            check_packing(self.policy)

    def prepare(self, rollout: RolloutBatch) -> None:
        """Nothing to compare with."""

    def loss(self, micro_batch: RolloutBatch, totals: Totals) -> Tensor:
        mask = micro_batch.completion_mask
        assert mask is not None
        return aggregate(self._nll(micro_batch), mask, mode="token_mean", totals=totals)

    def _nll(self, rows: RolloutBatch) -> Tensor:
        """(B, T) smoothed negative log-likelihood of every completion token, 0 at padding."""
        if not (self.packing or self.label_smoothing_factor or self.neftune_noise_alpha):
            return -self.score(self.policy, rows).logps
        assert rows.completion_ids is not None and rows.completion_len is not None
        is_token = length_mask(rows.completion_len, rows.completion_ids.shape[1])
        nll = smoothed_nll(
            self._hidden(rows),
            head_of(self.policy),
            rows.completion_ids[is_token],
            smoothing=self.label_smoothing_factor,
        )
        return nll.new_zeros(is_token.shape).masked_scatter(is_token, nll)

    def _hidden(self, rows: RolloutBatch) -> Tensor:
        """(N, H) hidden state that predicts each completion token."""
        own = rows_of(rows)
        if not int((own.prompt_len + own.completion_len).max()):
            return completion_hidden(self.policy, own)
        layout = packed(own) if self.packing else alone(own)
        noise = self._noise(rows, layout.lengths) if self.neftune_noise_alpha else None
        return laid_out_hidden(self.policy, own, layout, noise)

    def _noise(self, rows: RolloutBatch, lengths: list[int]) -> list[Tensor]:
        """For each row (length, H), uniform in +-alpha / sqrt(length * H), a function of seed, step and row.

        Source: Jain et al., NEFTune: Noisy Embeddings Improve Instruction Finetuning, arXiv 2310.05914,
        algorithm 1.
        """
        alpha = self.neftune_noise_alpha or 0.0
        width = base_of(self.policy).get_input_embeddings().weight.shape[1]
        noise = []
        for row, length in zip(rows.prompt_row.tolist(), lengths, strict=True):
            generator = derived_generator(self.seed, self.step, "neftune", row)
            uniform = torch.rand(length, width, generator=generator)
            noise.append((2 * uniform - 1) * alpha / math.sqrt(length * width))
        return noise

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
