import torch

from lit_rl.algorithms.reporting import add_source_metrics
from lit_rl.metrics import MetricSums


def test_rewards_are_told_apart_by_source_and_rows_without_reward_do_not_count_in_the_mean() -> None:
    sums = MetricSums()
    rewards = torch.tensor([1.0, 0.0, torch.nan, 0.5, 0.25])
    add_source_metrics(sums, rewards, ["a", "b/c", "a", "a", None])
    assert sums.reduce() == {"rollout/reward/a": 0.75, "rollout/reward/b/c": 0.0}
