"""EngineCheck: whether the engine writes with the policy's weights, told by log-probabilities."""

import torch
from lightning.pytorch.utilities import rank_zero_warn

from lit_rl.algorithms.base import RLModule
from lit_rl.batch import RolloutBatch
from lit_rl.distributed import all_max_, all_sum_
from lit_rl.errors import ConfigError
from lit_rl.functional.kl import k3

ROWS = 4


class EngineCheck:
    """Scores a few completions again with the training model and compares.

    A stale weight, another prompt or another temperature shows as a gap; rounding is about 1e-5 in float32
    and 0.03 with an engine in bfloat16.

    Args:
        every_n_steps: steps between checks, the first step included; 0 is off.
        max_gap: mean absolute difference, in nats per token. Beyond it a check warns, and two in a row stop.

    Raises:
        ConfigError: a value is out of range.
    """

    def __init__(self, every_n_steps: int, max_gap: float) -> None:
        if every_n_steps < 0:
            raise ConfigError(f"rollout.check_every_n_steps must be >= 0 (found {every_n_steps!r}).")
        if max_gap <= 0:
            raise ConfigError(f"rollout.max_logp_gap must be > 0 (found {max_gap!r}).")
        self.every_n_steps, self.max_gap = every_n_steps, max_gap
        self._was_beyond = False

    def is_due(self, step: int) -> bool:
        """Whether the rollout of this step is checked."""
        return self.every_n_steps > 0 and step % self.every_n_steps == 0

    def __call__(self, pl_module: RLModule, rollout: RolloutBatch) -> None:
        """Compare before the first update of the step. Collective.

        Raises:
            RuntimeError: the second check in a row is beyond the limit.
        """
        rows = rollout.select(list(range(min(ROWS, len(rollout)))))
        assert rows.rollout_logps is not None
        mask = rows.written_mask
        logps = pl_module.logps(pl_module.policy, rows)
        gap = (logps - rows.rollout_logps).abs() * mask  # (B, T)
        pl_module.sums.add("rollout/logp_gap_mean", gap.sum(), mask.sum())
        pl_module.sums.add("rollout/logp_gap_kl", (k3(rows.rollout_logps, logps) * mask).sum(), mask.sum())
        pl_module.sums.add_max("rollout/logp_gap_max", gap.max() if gap.numel() else 0.0)
        total, count = all_sum_(torch.stack([gap.sum(), mask.sum().to(gap.dtype)])).tolist()
        mean, largest = total / max(count, 1), float(all_max_(gap.max().reshape(1)))
        is_beyond = not mean <= self.max_gap
        if is_beyond:
            message = (
                f"the engine's log-probabilities differ from the policy's by {mean:.3g} per token on average "
                f"(at most {largest:.3g}), and rollout.max_logp_gap is {self.max_gap:g}: it may hold old "
                "weights, or compute in a lower precision"
            )
            if self._was_beyond:
                raise RuntimeError(f"{message}; stopped at the second check in a row.")
            rank_zero_warn(f"{message}; a second check in a row stops the run.")
        self._was_beyond = is_beyond
