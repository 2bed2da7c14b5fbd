from pathlib import Path

import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf

from lit_rl.rewards.base import RewardSum
from lit_rl.rewards.by_source import BySource
from lit_rl.rewards.random import Random

CONF = Path(__file__).parents[2] / "conf" / "reward"


@pytest.mark.parametrize(
    ("file", "classes", "weights"),
    [("by_source.yaml", [BySource], [1.0]), ("random.yaml", [Random, BySource], [1.0, 0.0])],
)
def test_every_reward_file_gives_its_sum(file, classes, weights) -> None:
    reward = instantiate(OmegaConf.load(CONF / file), _convert_="all")
    assert isinstance(reward, RewardSum)
    assert [type(function) for function in reward.functions.values()] == classes
    assert reward.weights == weights


def test_the_control_pays_coins_and_logs_the_truth(sample) -> None:
    reward = instantiate(OmegaConf.load(CONF / "random.yaml"), _convert_="all")
    scores = reward([sample("7"), sample("8")])
    coins = [Random().score(sample(text)).score for text in ("7", "8")]
    assert scores.rewards.tolist() == coins
    assert scores.rewards_per_func[:, 1].tolist() == [1.0, 0.0]
    assert scores.feedback == [None, None]
