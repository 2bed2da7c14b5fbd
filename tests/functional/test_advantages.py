"""Advantages: worked by hand, exact zeros, padding and permutations."""

import math

import pytest
import torch
from torch import Tensor

from lit_rl.functional.advantages import (
    discounted_returns,
    gae,
    gpg,
    group_advantages,
    grpo_passk,
    is_zero_variance,
    opo,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    remax,
    rloo,
    summed_after_normalizing,
    terminal_rewards,
)

NAN = math.nan
GROUP_ESTIMATORS = {
    "grpo": lambda r: group_advantages(r, scale="group"),
    "grpo batch": lambda r: group_advantages(r, scale="batch"),
    "grpo none": lambda r: group_advantages(r, scale="none"),
    "rloo": rloo,
    "rloo scaled": lambda r: rloo(r, scale="group"),
    "opo": lambda r: opo(r, torch.arange(1, r.numel() + 1).view_as(r)),
    "gpg": gpg,
    "passk": grpo_passk,
}


def test_group_advantages_by_hand() -> None:
    # mean 2, unbiased variance ((-2)^2 + 0 + 0 + 2^2) / 3 = 8 / 3
    rewards = torch.tensor([[0.0, 2.0, 2.0, 4.0]])
    std = math.sqrt(8 / 3)
    expected = torch.tensor([[-2 / std, 0, 0, 2 / std]])
    torch.testing.assert_close(group_advantages(rewards, scale="group", std_epsilon=0.0), expected)
    assert group_advantages(rewards, scale="none").tolist() == [[-2, 0, 0, 2]]


def test_the_batch_scale_is_the_spread_of_all_rewards() -> None:
    rewards = torch.tensor([[0.0, 2.0], [10.0, 10.0]])
    advantages = group_advantages(rewards, scale="batch", std_epsilon=0.0)
    torch.testing.assert_close(advantages[0], torch.tensor([-1.0, 1.0]) / rewards.std())
    assert advantages[1].tolist() == [0.0, 0.0]


@pytest.mark.field("num/3")
@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
def test_equal_rewards_give_exact_zeros(name: str) -> None:
    rewards = torch.full((2, 7), 0.35)
    assert is_zero_variance(rewards).all()
    assert not GROUP_ESTIMATORS[name](rewards).any()


@pytest.mark.field("num/3")
def test_one_odd_reward_stays_bounded() -> None:
    rewards = torch.tensor([[0.95] * 7 + [0.35]])
    assert rloo(rewards)[0, 7].item() == pytest.approx(-0.6, rel=1e-5)
    for scale in ("group", "batch"):
        assert rloo(rewards, scale=scale).abs().max() <= math.sqrt(8) + 1e-5
        assert group_advantages(rewards, scale=scale).abs().max() <= 10


@pytest.mark.field("num/3")
def test_the_spread_survives_a_large_mean_in_float32() -> None:
    small = torch.tensor([[0.0, 1.0, 2.0, 5.0]])
    torch.testing.assert_close(
        group_advantages(small + 8192, scale="group"), group_advantages(small, scale="group")
    )


@pytest.mark.field("num/4")
def test_a_group_of_one_keeps_its_reward() -> None:
    rewards = torch.tensor([[0.7], [-0.2]])
    for name in ("grpo none", "rloo", "opo"):
        torch.testing.assert_close(GROUP_ESTIMATORS[name](rewards), rewards)
    torch.testing.assert_close(group_advantages(rewards, scale="group", std_epsilon=0.0), rewards)
    with pytest.raises(ValueError, match="at least 2"):
        grpo_passk(rewards)


@pytest.mark.field("num/4")
def test_plain_reinforce_plus_plus_learns_from_single_completions() -> None:
    tokens = terminal_rewards(torch.tensor([1.0, 0.0]), torch.tensor([2, 3]), 3)
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    advantages = reinforce_plus_plus(tokens, mask)
    assert bool((advantages[0, :2] > 0).all()) and bool((advantages[1] < 0).all())


@pytest.mark.field("num/5")
@pytest.mark.parametrize("scale", [True, False])
def test_reinforce_plus_plus_normalises_over_all_counted_tokens(scale: bool) -> None:
    lengths = torch.tensor([2, 4, 2, 4])
    mask = torch.arange(4) < lengths[:, None]
    tokens = terminal_rewards(torch.tensor([1.0, 0.0, 1.0, 1.0]), lengths, 4)
    kept = reinforce_plus_plus(tokens, mask, scale=scale)[mask]
    assert kept.mean().abs() < 1e-6
    # 8 tokens of return 1, 4 of return 0: unbiased variance 12 * (2/3 * 1/3) / 11
    std = 1.0 if scale else math.sqrt(12 * 2 / 9 / 11)
    assert kept.std().item() == pytest.approx(std, rel=1e-3)
    assert kept[:2].unique().numel() == 1  # nothing is normalised per prompt


def test_the_group_baseline_is_taken_before_whitening() -> None:
    rewards, mask = torch.tensor([[1.0, 0.0], [5.0, 5.0]]), torch.ones(4, 2)
    centred = torch.tensor([0.5, 0.5, -0.5, -0.5, 0, 0, 0, 0])
    expected = centred / centred.var().add(1e-8).sqrt()
    torch.testing.assert_close(reinforce_plus_plus_baseline(rewards, mask).flatten(), expected)


@pytest.mark.parametrize("name", [name for name in GROUP_ESTIMATORS if name != "opo"])  # its weights shift
def test_unknown_rewards_enter_no_statistic_and_get_zero(name: str) -> None:
    known, padded = torch.tensor([[0.1, 0.9, 0.4]]), torch.tensor([[0.1, NAN, 0.9, 0.4]])
    advantages = GROUP_ESTIMATORS[name](padded)
    assert advantages[0, 1] == 0
    torch.testing.assert_close(advantages[:, [0, 2, 3]], GROUP_ESTIMATORS[name](known))


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
def test_a_group_of_unknown_rewards_is_all_zero(name: str) -> None:
    rewards = torch.tensor([[NAN, NAN], [0.0, 1.0]])
    advantages = GROUP_ESTIMATORS[name](rewards)
    assert not advantages[0].any() and advantages.isfinite().all() and advantages[1].any()


@pytest.mark.parametrize("name", ["grpo", "grpo batch", "grpo none", "rloo", "rloo scaled", "gpg", "passk"])
def test_the_order_of_groups_and_of_completions_changes_nothing(name: str) -> None:
    rewards = torch.rand(3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    groups, rows = torch.tensor([2, 0, 1]), torch.tensor([4, 2, 0, 1, 3])
    permuted = GROUP_ESTIMATORS[name](rewards[groups][:, rows])
    torch.testing.assert_close(permuted, GROUP_ESTIMATORS[name](rewards)[groups][:, rows])


def test_leave_one_out_is_the_distance_from_the_others() -> None:
    rewards = torch.tensor([[1.0, 2.0, 6.0]])
    assert rloo(rewards).tolist() == [[pytest.approx(1 - 4), pytest.approx(2 - 3.5), pytest.approx(6 - 1.5)]]


def test_optimal_baseline_weighs_by_length() -> None:
    # baseline (1 * 1 + 3 * 5) / 4 = 4
    assert opo(torch.tensor([[1.0, 5.0]]), torch.tensor([[1, 3]])).tolist() == [[-3.0, 1.0]]


def test_gpg_scales_by_the_share_of_nonzero_rewards() -> None:
    rewards = torch.tensor([[1.0, 0.0], [0.0, 0.0]])  # 4 completions, 1 of them non-zero
    assert gpg(rewards, f_norm=2.0).tolist() == [[1.0, -1.0], [0.0, 0.0]]


def test_pass_at_k_credits_the_margin_of_the_best() -> None:
    assert grpo_passk(torch.tensor([[1.0, 4.0, 2.0]]), scale="none").tolist() == [[0.0, 2.0, 0.0]]
    assert not grpo_passk(torch.tensor([[1.0, 4.0, 4.0]]), scale="none").any()


def test_normalising_before_the_sum_keeps_a_small_function_heard() -> None:
    rewards = torch.tensor([[[0.0, 100.0], [0.0, 0.0], [0.01, 0.0]]])  # (1, G = 3, R = 2)
    drowned = group_advantages(rewards.sum(-1), scale="group")[0]
    heard = summed_after_normalizing(rewards, torch.ones(2))[0]
    assert (drowned[2] - drowned[1]).abs() < 1e-3
    assert heard[2] - heard[1] > 1.0


def test_an_unknown_scale_is_refused() -> None:
    with pytest.raises(ValueError, match="scale must be"):
        group_advantages(torch.zeros(1, 2), scale="std")


@pytest.mark.field("num/12")
def test_the_reward_lands_on_the_last_real_token() -> None:
    # [t0, t1, EOS, PAD, PAD] with score 2; [t0..t4] without EOS, score 2 less an end penalty of 1
    tokens = terminal_rewards(torch.tensor([2.0, 2.0 - 1.0]), torch.tensor([3, 5]), 5)
    assert tokens.tolist() == [[0, 0, 2, 0, 0], [0, 0, 0, 0, 1]]
    assert not terminal_rewards(torch.tensor([2.0]), torch.tensor([0]), 5).any()


def test_returns_discount_per_token_and_cross_gaps() -> None:
    tokens, mask = torch.tensor([[0.0, 9.0, 0.0, 1.0]]), torch.tensor([[1, 0, 1, 1]])
    assert discounted_returns(tokens, mask, gamma=0.5).tolist() == [[0.25, 0.0, 0.5, 1.0]]
    assert discounted_returns(tokens, mask, gamma=0.5, across_gaps=False).tolist() == [[0.0, 0.0, 0.5, 1.0]]


def test_remax_subtracts_the_greedy_reward() -> None:
    tokens = terminal_rewards(torch.tensor([1.0]), torch.tensor([2]), 3)
    assert remax(tokens, torch.tensor([[1, 1, 0]]), torch.tensor([0.25])).tolist() == [[0.75, 0.75, 0.0]]


def slow_gae(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """The definition, as a double sum over one row without padding."""
    following = [*values[1:], 0.0]
    deltas = [r + gamma * n - v for r, n, v in zip(rewards, following, values, strict=True)]
    return [sum((gamma * lam) ** k * d for k, d in enumerate(deltas[t:])) for t in range(len(deltas))]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5), (1.0, 1.0), (0.9, 0.0)])
def test_gae_is_its_definition(gamma: float, lam: float) -> None:
    rewards, values = [0.1, -0.2, 0.0, 1.0], [0.5, 0.4, 0.9, 0.3]
    as_row = [torch.tensor([x], dtype=torch.float64) for x in (rewards, values)]
    credit = gae(*as_row, torch.ones(1, 4), gamma=gamma, lam=lam, whiten=False)
    expected = slow_gae(rewards, values, gamma, lam)
    torch.testing.assert_close(credit.advantages[0], torch.tensor(expected, dtype=torch.float64))
    torch.testing.assert_close(credit.returns, credit.advantages + as_row[1])


@pytest.mark.field("num/13")
@pytest.mark.parametrize("junk", [99.0, -99.0, math.nan])
@pytest.mark.parametrize("whiten", [True, False])
def test_gae_does_not_read_padding(junk: float, whiten: bool) -> None:
    rewards, values = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[0.2, 0.4, 0.7]])
    plain = gae(rewards, values, torch.ones(1, 3), gamma=1.0, lam=0.95, whiten=whiten)
    padding = torch.full((1, 5), junk)
    wide = gae(
        torch.cat([rewards, padding], 1),
        torch.cat([values, padding], 1),
        torch.arange(8)[None] < 3,
        gamma=1.0,
        lam=0.95,
        whiten=whiten,
    )
    for padded, bare in zip(wide, plain, strict=True):
        assert torch.equal(padded[:, :3], bare) and not padded[:, 3:].any()


def test_gae_carries_value_and_advantage_across_tool_output() -> None:
    rewards, values = torch.tensor([[0.0, 7.0, 1.0]]), torch.tensor([[0.2, 99.0, 0.7]])
    gapped = gae(rewards, values, torch.tensor([[1, 0, 1]]), gamma=0.9, lam=0.8, whiten=False)
    bare = gae(rewards[:, [0, 2]], values[:, [0, 2]], torch.ones(1, 2), gamma=0.9, lam=0.8, whiten=False)
    torch.testing.assert_close(gapped.advantages[:, [0, 2]], bare.advantages)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_results_are_float32_or_better(dtype: torch.dtype) -> None:
    rewards: Tensor = torch.tensor([[0.0, 1.0]], dtype=dtype)
    expected = torch.float64 if dtype == torch.float64 else torch.float32
    assert all(estimator(rewards).dtype == expected for estimator in GROUP_ESTIMATORS.values())
