"""ValidationScores: accuracy per data source over all ranks, each row counted once."""

import torch
from torchmetrics import MeanMetric

from lit_rl.algorithms.reporting import RIGHT
from lit_rl.batch import RolloutBatch
from lit_rl.distributed import gather_objects


class ValidationScores:
    """Means over validation rows.

    Logged as `val/accuracy/<source>` (rows whose weighted reward reaches 1), `val/accuracy`, `val/reward`,
    `val/completion_len` and `val/rows`, each weighted by rows.
    """

    def __init__(self) -> None:
        self._means: dict[str, MeanMetric] = {}
        self.rollouts: list[RolloutBatch] = []

    def add(self, rollout: RolloutBatch, data_source_key: str) -> None:
        """Count the rows of one batch.

        Args:
            rollout: rows with rewards; a row without a reward (NaN) counts as wrong, with reward 0.
            data_source_key: column that names the source; a row without it counts as "all".
        """
        assert rollout.rewards is not None and rollout.completion_len is not None
        self.rollouts.append(rollout)
        rewards = rollout.rewards.cpu().nan_to_num()
        is_right = (rewards >= RIGHT).float()
        self._add("val/accuracy", is_right)
        self._add("val/reward", rewards)
        self._add("val/completion_len", rollout.completion_len.cpu().float())
        sources = rollout.columns.get(data_source_key) or ["all"] * len(rollout)
        for source in sorted({str(s) for s in sources}):
            of_source = torch.tensor([str(s) == source for s in sources])
            self._add(f"val/accuracy/{source}", is_right[of_source])

    def compute(self) -> dict[str, float]:
        """Every mean over all ranks, by name. Collective; ranks may have seen different sources."""
        names = sorted({name for part in gather_objects(list(self._means)) for name in part})
        out = {}
        for name in names:
            metric = self._means.setdefault(name, MeanMetric(nan_strategy="error"))
            parts = gather_objects((float(metric.mean_value), float(metric.weight)))
            total, weight = (sum(values) for values in zip(*parts, strict=True))
            out[name] = total / weight if weight else 0.0
        return out

    def reset(self) -> None:
        """Forget the rows."""
        self._means.clear()
        self.rollouts.clear()

    def _add(self, name: str, values: torch.Tensor) -> None:
        self._means.setdefault(name, MeanMetric(nan_strategy="error")).update(values)
