"""Policy losses: hand-worked values, clips, gradients and equivalences."""

import math

import pytest
import torch
from torch import Tensor

from lit_rl.functional.masking import aggregate, clamped_frac, totals_of
from lit_rl.functional.policy_loss import (
    LOG_RATIO_BOUND,
    cispo,
    clip_cov,
    clip_fraction,
    clipped_surrogate,
    geo_mean,
    gpg_loss,
    is_value_clipped,
    kl_cov,
    log_ratio,
    sapo,
    sequence_log_ratio_at_tokens,
    token_covariance,
    value_loss,
)

MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])


def make(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities now (a leaf) and before, advantages per row."""
    g = torch.Generator().manual_seed(seed)
    old = -torch.rand(2, 4, generator=g, dtype=torch.float64)
    now = old + 0.4 * torch.randn(2, 4, generator=g, dtype=torch.float64)
    return now.requires_grad_(), old, torch.tensor([1.3, -0.7], dtype=torch.float64)


def ratio_of(*ratios: float) -> Tensor:
    return torch.tensor([ratios], dtype=torch.float64).log()


def test_the_surrogate_by_hand() -> None:
    # A > 0: r 1.5 is clipped to 1.2, r 0.5 is not; A < 0: r 0.5 is clipped to 0.8, r 1.5 is not
    ratio = ratio_of(1.5, 0.5)
    assert clipped_surrogate(ratio, torch.tensor([2.0]), epsilon=0.2).tolist() == [[-2.4, -1.0]]
    assert clipped_surrogate(ratio, torch.tensor([-2.0]), epsilon=0.2).tolist() == [
        [pytest.approx(3.0), pytest.approx(1.6)]
    ]


def test_the_upper_bound_is_its_own() -> None:
    loss = clipped_surrogate(ratio_of(1.5), torch.tensor([1.0]), epsilon=0.2, epsilon_high=0.28)
    assert loss.item() == pytest.approx(-1.28)


def test_dual_clip_caps_the_loss_at_negative_advantages_only() -> None:
    ratio = ratio_of(50.0)
    assert clipped_surrogate(ratio, torch.tensor([-1.0]), epsilon=0.2, dual_clip=3.0).item() == 3.0
    assert clipped_surrogate(ratio, torch.tensor([1.0]), epsilon=0.2, dual_clip=3.0).item() == -1.2


def test_the_ratio_cap_acts_at_either_sign() -> None:
    loss = clipped_surrogate(ratio_of(50.0), torch.tensor([-1.0]), epsilon=0.2, ratio_cap=4.0)
    assert loss.item() == 4.0


def test_on_policy_the_gradient_is_the_plain_policy_gradient() -> None:
    logps, _, advantages = make()
    ratio = log_ratio(logps, logps.detach(), MASK)
    assert not ratio.any()
    loss = clipped_surrogate(ratio, advantages, epsilon=0.2)
    total = aggregate(loss, MASK, mode="token_mean", totals=totals_of(MASK, 4))
    expected = -advantages[:, None] * MASK / 5
    torch.testing.assert_close(torch.autograd.grad(total, logps)[0], expected)


def test_clipped_tokens_have_no_gradient_and_are_counted() -> None:
    logps = ratio_of(1.5, 1.1, 0.5).requires_grad_()
    old, mask, advantages = torch.zeros(1, 3), torch.ones(1, 3), torch.tensor([1.0])
    ratio = log_ratio(logps, old, mask)
    gradient = torch.autograd.grad(clipped_surrogate(ratio, advantages, epsilon=0.2).sum(), logps)[0]
    assert (gradient != 0).tolist() == [[False, True, True]]
    assert clip_fraction(ratio, advantages, mask, 0.2).item() == pytest.approx(1 / 3)


def test_the_log_ratio_is_clamped_and_the_share_is_known() -> None:
    logps = torch.tensor([[500.0, -500.0, 0.5, 9.0]], requires_grad=True)
    mask = torch.tensor([[1, 1, 1, 0]])
    ratio = log_ratio(logps, torch.zeros(1, 4), mask)
    assert ratio.tolist() == [[20.0, -20.0, 0.5, 0.0]]
    assert clamped_frac(ratio, mask, bound=LOG_RATIO_BOUND).item() == pytest.approx(2 / 3)
    ratio.exp().sum().backward()
    assert logps.grad is not None and logps.grad.isfinite().all()


def test_a_row_ratio_is_the_geometric_mean_of_its_tokens() -> None:
    logps, old, _ = make()
    ratio = log_ratio(logps, old, MASK, "sequence")
    assert ratio.shape == (2, 1)
    assert ratio[1, 0].item() == pytest.approx((logps - old)[1, :2].mean().item())
    assert not log_ratio(logps, old, torch.zeros(2, 4), "sequence").any()


def test_the_sequence_ratio_at_tokens_has_the_same_loss_and_gradient_per_row_mean() -> None:
    logps, old, advantages = make()
    results = []
    for ratio in (log_ratio(logps, old, MASK, "sequence"), sequence_log_ratio_at_tokens(logps, old, MASK)):
        loss = clipped_surrogate(ratio, advantages, epsilon=0.3)
        total = aggregate(loss, MASK, mode="seq_mean_token_mean", totals=totals_of(MASK, 4))
        results.append((total, torch.autograd.grad(total, logps)[0]))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_padding_changes_neither_ratio_nor_gradient(level: str) -> None:
    logps, old, advantages = make()
    junk = torch.full((2, 3), math.nan, dtype=torch.float64)
    mask = torch.cat([MASK, torch.zeros(2, 3, dtype=torch.long)], 1)

    def gradient(now: Tensor, before: Tensor, kept: Tensor) -> Tensor:
        loss = clipped_surrogate(log_ratio(now, before, kept, level), advantages, epsilon=0.2)
        return aggregate(loss, kept, mode="seq_mean_token_mean", totals=totals_of(kept, 4))

    plain = torch.autograd.grad(gradient(logps, old, MASK), logps)[0]
    wide = torch.autograd.grad(gradient(torch.cat([logps, junk], 1), torch.cat([old, junk], 1), mask), logps)[
        0
    ]
    torch.testing.assert_close(wide, plain)


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match="level must be"):
        log_ratio(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1), "row")


def test_cispo_keeps_the_gradient_of_clipped_tokens() -> None:
    logps = torch.tensor([[-1.0, -1.0]], requires_grad=True)
    loss = cispo(ratio_of(9.0, 0.1), logps, torch.tensor([2.0]), low=0.8, high=1.2)
    assert loss.tolist() == [[pytest.approx(2.4), pytest.approx(1.6)]]
    gradient = torch.autograd.grad(loss.sum(), logps)[0]
    assert gradient.tolist() == [[pytest.approx(-2.4), pytest.approx(-1.6)]]


def test_gpg_is_the_plain_policy_gradient() -> None:
    assert gpg_loss(torch.tensor([[-1.0, -2.0]]), torch.tensor([3.0])).tolist() == [[3.0, 6.0]]


def test_sapo_has_the_gradient_of_the_ratio_at_one_and_fades_away_from_it() -> None:
    def slope(ratio: float, advantage: float) -> float:
        x = torch.tensor([[ratio]], dtype=torch.float64).log().requires_grad_()
        loss = sapo(x, torch.tensor([advantage], dtype=torch.float64), tau_pos=1.0, tau_neg=2.0)
        return torch.autograd.grad(loss.sum(), x)[0].item()

    assert slope(1.0, 1.0) == pytest.approx(-1.0)  # (4 / tau) * tau / 4 * r A
    assert slope(1.0, -1.0) == pytest.approx(1.0)
    assert abs(slope(8.0, 1.0)) < 0.1 and abs(slope(8.0, -1.0)) < abs(slope(8.0, 1.0))


def test_the_geometric_mean_clips_each_log_ratio_pessimistically() -> None:
    # A > 0: log-ratios 0.5 -> 0.2 and -0.5 kept; mean -0.15
    ratio, mask = torch.tensor([[0.5, -0.5, 9.0]]), torch.tensor([[1, 1, 0]])
    loss = geo_mean(ratio, torch.tensor([2.0]), mask, epsilon=0.2)
    assert loss.shape == (1, 1) and loss.item() == pytest.approx(-2 * math.exp(-0.15), rel=1e-6)


def test_covariances_add_up_to_the_covariance() -> None:
    logps, _, _ = make()
    advantages = torch.randn(2, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    kept = MASK.bool()
    pairs = torch.stack([advantages[kept], logps.detach()[kept]])
    expected = torch.cov(pairs, correction=0)[0, 1]
    torch.testing.assert_close(token_covariance(logps, advantages, MASK)[kept].mean(), expected)


def test_clip_cov_takes_out_the_candidates_of_least_noise() -> None:
    logps = torch.tensor([[-3.0, -1.0, -1.0, -3.0]], requires_grad=True)
    advantages = torch.tensor([[-1.0, 1.0, 1.0, -1.0]])  # every covariance is 1
    ratio, mask = logps - logps.detach(), torch.ones(1, 4)
    settings = {"epsilon": 0.2, "cov_ratio": 0.5, "cov_low": 0.5, "cov_high": 5.0}
    noise = torch.tensor([[0.9, 0.1, 0.7, 0.3]])
    loss = clip_cov(ratio, logps, advantages, mask, noise, **settings)
    assert (loss != 0).tolist() == [[True, False, True, False]]
    assert torch.equal(loss, clip_cov(ratio, logps, advantages, mask, noise, **settings))


def test_kl_cov_penalises_the_tokens_of_largest_covariance() -> None:
    logps = torch.tensor([[-3.0, -1.0, -1.5, -2.5]])
    advantages, mask = torch.tensor([[-2.0, 2.0, 0.1, 0.0]]), torch.ones(1, 4)
    ratio = torch.full((1, 4), 0.5)
    plain = -advantages * math.exp(0.5)
    loss = kl_cov(ratio, logps, advantages, mask, cov_ratio=0.5, kl_coef=2.0)
    torch.testing.assert_close(loss - plain, torch.tensor([[1.0, 1.0, 0.0, 0.0]]))


def test_the_value_loss_is_the_larger_error() -> None:
    # old 0, target 1: value 0.8 is clipped to 0.5, error 0.5^2 / 2 > 0.2^2 / 2; value 0.3 is not clipped
    values, zeros, ones = torch.tensor([[0.8, 0.3]]), torch.zeros(1, 2), torch.ones(1, 2)
    loss = value_loss(values, zeros, ones, cliprange_value=0.5)
    assert loss.tolist() == [[pytest.approx(0.125), pytest.approx(0.245)]]
    assert is_value_clipped(values, zeros, ones, cliprange_value=0.5).tolist() == [[True, False]]
    assert value_loss(values, zeros, ones).tolist() == [[pytest.approx(0.02), pytest.approx(0.245)]]


@pytest.mark.parametrize("mode", ["token_mean", "seq_mean_token_mean"])
def test_a_micro_batch_cut_changes_no_gradient(mode: str) -> None:
    logps, old, advantages = make()
    totals = totals_of(MASK, 4)

    def loss(rows: slice) -> Tensor:
        ratio = log_ratio(logps[rows], old[rows], MASK[rows])
        per_token = clipped_surrogate(ratio, advantages[rows], epsilon=0.2)
        return aggregate(per_token, MASK[rows], mode=mode, totals=totals)

    whole = torch.autograd.grad(loss(slice(0, 2)), logps)[0]
    parts = torch.autograd.grad(loss(slice(0, 1)) + loss(slice(1, 2)), logps)[0]
    torch.testing.assert_close(parts, whole)
