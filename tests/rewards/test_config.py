from pathlib import Path

import pytest

from lit_rl.configuration.build import built
from lit_rl.configuration.compose import Source, compose
from lit_rl.rewards.base import RewardSum
from lit_rl.rewards.by_source import BySource
from lit_rl.rewards.random import Random

SOURCE = Source(Path(__file__).resolve().parents[2] / "conf", "evaluate")


def reward_of(choice: str) -> RewardSum:
    return built(compose(SOURCE, [f"reward={choice}"]).tree["reward"])


@pytest.mark.parametrize(
    ("choice", "classes", "weights"),
    [("by_source", [BySource], [1.0]), ("random", [Random, BySource], [1.0, 0.0])],
)
def test_every_reward_file_gives_its_sum(choice, classes, weights) -> None:
    reward = reward_of(choice)
    assert isinstance(reward, RewardSum)
    assert [type(function) for function in reward.functions.values()] == classes
    assert reward.weights == weights


def test_the_control_pays_coins_and_logs_the_truth(sample) -> None:
    reward = reward_of("random")
    scores = reward([sample("7"), sample("8")])
    coins = [Random().score(sample(text)).score for text in ("7", "8")]
    assert scores.rewards.tolist() == coins
    assert scores.rewards_per_func[:, 1].tolist() == [1.0, 0.0]
    assert scores.feedback == [None, None]
