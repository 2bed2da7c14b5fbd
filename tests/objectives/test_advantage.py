"""Advantage: each estimator by hand, its unit of normalisation, and what is refused."""

import pytest
import torch

from lit_rl.batch import length_mask
from lit_rl.errors import ConfigError
from lit_rl.objectives.advantage import ESTIMATORS, Advantage, ScoredRows

REWARDS = torch.tensor([1.0, 0.0, 1.0, 1.0])
LENGTHS = torch.tensor([2, 4, 2, 4])


def rows(rewards: torch.Tensor = REWARDS, penalty: torch.Tensor | None = None) -> ScoredRows:
    mask = length_mask(LENGTHS[: len(rewards)], 5)
    cost = torch.zeros(mask.shape) if penalty is None else penalty
    greedy = torch.tensor([0.25, 0.25, 1.0, 1.0])[: len(rewards)]
    return ScoredRows(rewards, LENGTHS[: len(rewards)], mask, cost, greedy)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # group 1: mean 0.5, std sqrt(0.5); group 2 has no spread
        ({"adv_estimator": "grpo"}, [0.7071058, -0.7071058, 0, 0]),
        ({"adv_estimator": "grpo", "scale_rewards": "none"}, [0.5, -0.5, 0, 0]),
        ({"adv_estimator": "grpo", "scale_rewards": False}, [0.5, -0.5, 0, 0]),
        ({"adv_estimator": "grpo", "scale_rewards": True}, [0.7071058, -0.7071058, 0, 0]),
        # std of all four: sqrt((3 * 0.0625 + 0.5625) / 3) = 0.5
        ({"adv_estimator": "grpo", "scale_rewards": "batch"}, [0.999998, -0.999998, 0, 0]),
        ({"adv_estimator": "rloo", "scale_rewards": "none"}, [1, -1, 0, 0]),
        # baseline of group 1: (2 * 1 + 4 * 0) / 6
        ({"adv_estimator": "opo"}, [2 / 3, -1 / 3, 0, 0]),
        # 4 completions, 3 of non-zero reward
        ({"adv_estimator": "gpg"}, [2 / 3, -2 / 3, 0, 0]),
        ({"adv_estimator": "grpo_passk"}, [1.4142116, 0, 0, 0]),
        ({"adv_estimator": "none"}, [0, 0, 0, 0]),
    ],
    ids=str,
)
def test_credit_of_rows_by_hand(settings: dict, expected: list[float]) -> None:
    advantages = Advantage(**settings)(rows(), 2)
    torch.testing.assert_close(advantages, torch.tensor(expected, dtype=torch.float32), rtol=1e-6, atol=1e-7)


def test_the_reward_itself_is_discounted_from_the_last_token() -> None:
    advantages = Advantage(adv_estimator="reward", gamma=0.5)(rows(), 2)
    expected = [[0.5, 1, 0, 0, 0], [0] * 5, [0.5, 1, 0, 0, 0], [0.125, 0.25, 0.5, 1, 0]]
    torch.testing.assert_close(advantages, torch.tensor(expected))


@pytest.mark.field("num/5")
@pytest.mark.parametrize("scale", ["batch", "group", "none", False])
@pytest.mark.parametrize("estimator", ["reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_the_whitened_estimators_have_the_whole_batch_as_their_unit(estimator: str, scale: str) -> None:
    scored = rows()
    advantages = Advantage(adv_estimator=estimator, scale_rewards=scale)(scored, 2)  # type: ignore[arg-type]
    counted = advantages[scored.mask]
    assert counted.mean().abs() < 1e-6
    assert advantages[~scored.mask].eq(0).all()
    if scale in ("batch", "group"):
        assert counted.std() == pytest.approx(1.0, abs=1e-3)
    else:
        unscaled = Advantage(adv_estimator=estimator, scale_rewards="none")(scored, 2)  # type: ignore[arg-type]
        assert torch.equal(advantages, unscaled) and counted.std() < 0.6
    if estimator == "reinforce_plus_plus":  # a group of equal rewards is not centred by itself
        assert advantages[2:, 0].gt(0).all()


@pytest.mark.field("num/4")
def test_estimators_without_a_group_learn_from_single_completions() -> None:
    for name in ("reinforce_plus_plus", "reward"):
        settings = Advantage(adv_estimator=name)  # type: ignore[arg-type]
        assert not settings.is_group_relative
        assert settings(rows(REWARDS[:2]), 1).abs().sum() > 0


def test_a_penalty_is_paid_by_the_token_or_by_the_row() -> None:
    penalty = torch.zeros(4, 5)
    penalty[0, 0], penalty[1, 2] = 0.25, 0.5
    by_row = Advantage(scale_rewards="none")(rows(penalty=penalty), 2)
    # 1 - 0.25 and 0 - 0.5 about their mean 0.125
    torch.testing.assert_close(by_row, torch.tensor([0.625, -0.625, 0, 0]))
    by_token = Advantage(adv_estimator="reward")(rows(penalty=penalty), 2)
    torch.testing.assert_close(by_token[0], torch.tensor([0.75, 1, 0, 0, 0]))
    torch.testing.assert_close(by_token[1], torch.tensor([-0.5, -0.5, -0.5, 0, 0]))


def test_remax_is_the_return_less_the_greedy_reward() -> None:
    penalty = torch.zeros(4, 5)
    penalty[0, 1] = 0.5  # on the last of two tokens: both pay it
    advantages = Advantage(adv_estimator="remax")(rows(penalty=penalty), 2)
    expected = [[0.25, 0.25, 0, 0, 0], [-0.25, -0.25, -0.25, -0.25, 0], [0] * 5, [0] * 5]
    torch.testing.assert_close(advantages, torch.tensor(expected))


@pytest.mark.parametrize("name", [name for name in ESTIMATORS if name != "none"])
def test_a_row_without_reward_gets_nothing_and_disturbs_nobody(name: str) -> None:
    rewards = torch.tensor([1.0, 0.0, torch.nan, torch.nan])
    scored = rows(rewards)
    scored = scored._replace(mask=scored.mask & ~rewards.isnan()[:, None])
    advantages = Advantage(adv_estimator=name)(scored, 2)  # type: ignore[arg-type]
    assert advantages.isfinite().all() and advantages[2:].eq(0).all()
    alone = Advantage(adv_estimator=name)(rows(rewards[:2]), 2)  # type: ignore[arg-type]
    torch.testing.assert_close(advantages[:2], alone)


@pytest.mark.parametrize(
    "settings", [{"std_epsilon": -1.0}, {"gamma": 1.5}, {"adv_estimator": "nothing"}], ids=str
)
def test_values_out_of_range_are_refused(settings: dict) -> None:
    (name,) = settings
    with pytest.raises(ConfigError, match=rf"algo\.advantage\.{name} must"):
        Advantage(**settings)
