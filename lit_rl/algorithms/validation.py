"""ValidationScores: accuracy per data source over all ranks, each row counted once."""

import torch
from torchmetrics import MeanMetric

from lit_rl.algorithms.reporting import RIGHT
from lit_rl.batch import RolloutBatch
from lit_rl.distributed import gather_objects
from lit_rl.rewards.base import RewardSum


class ValidationScores:
    """Means over validation rows, each weighted by rows.

    Logged as `val/accuracy` and `val/accuracy/<source>` (a row is right when the verifier's score reaches 1;
    without the function `by_source`, when the weighted reward does), `val/reward`, `val/reward/<function>`
    and `val/completion_len`.
    """

    def __init__(self) -> None:
        self._means: dict[str, MeanMetric] = {}
        self.rollouts: list[RolloutBatch] = []

    def add(self, rollout: RolloutBatch, sources: list | None, reward: RewardSum) -> None:
        """Count the rows of one batch.

        Args:
            rollout: B rows with rewards; a row without a reward (NaN) counts as wrong, with reward 0.
            sources: B names; None is one source called "all".
            reward: names the functions.
        """
        assert rollout.rewards is not None and rollout.rewards_per_func is not None
        assert rollout.completion_len is not None
        self.rollouts.append(rollout)
        parts = dict(zip(reward.names, rollout.rewards_per_func.cpu().unbind(1), strict=True))
        rewards = rollout.rewards.cpu().nan_to_num()
        decisive = parts[reward.verifier].nan_to_num() if reward.verifier else rewards
        is_right = (decisive >= RIGHT).float()
        self._add("val/accuracy", is_right)
        self._add("val/reward", rewards)
        self._add("val/completion_len", rollout.completion_len.cpu().float())
        for name, scores in parts.items():
            self._add(f"val/reward/{name}", scores[~scores.isnan()])
        names = [str(source) for source in sources or ["all"] * len(rollout)]
        for source in sorted(set(names)):
            of_source = torch.tensor([name == source for name in names])
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
        metric = self._means.setdefault(name, MeanMetric(nan_strategy="error"))
        if len(values):
            metric.update(values)
