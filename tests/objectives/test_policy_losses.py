"""Policy losses: one token of each by hand, which tokens count as clipped, and what is refused."""

import math
from collections.abc import Callable

import pytest
import torch

from lit_rl.errors import ConfigError
from lit_rl.functional.masking import totals_of
from lit_rl.objectives.covariance_losses import ClipCov, KLCov, TokenPicking
from lit_rl.objectives.policy import GPG, ClippedSurrogate, PolicyLoss, Terms
from lit_rl.objectives.ratio_losses import CISPO, SAPO, GeoMean

LOGPS = torch.tensor([[-1.0, -2.0], [-0.5, -3.0]])
RATIOS = torch.tensor([[1.5, 1.0], [0.5, 1.1]])
ADVANTAGES = torch.tensor([2.0, -1.0])
MASK = torch.tensor([[True, True], [True, False]])


def terms(loss: PolicyLoss, picked: torch.Tensor | None = None) -> Terms:
    log_ratios = loss.log_ratio(LOGPS, LOGPS - RATIOS.log(), MASK)
    return Terms(log_ratios, LOGPS, ADVANTAGES, MASK, picked)


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        # clip(1.5) = 1.2; 0.5 at a negative advantage is clipped to 0.8
        (ClippedSurrogate(), [-2.4, -2.0, 0.8]),
        (ClippedSurrogate(epsilon=0.3, epsilon_high=0.4), [-2.8, -2.0, 0.7]),
        (GPG(), [2.0, 4.0, -0.5]),
        # weight 1.2, 1 and 0.8 times -A logp
        (CISPO(), [2.4, 4.0, -0.4]),
        (CISPO(ratio_cap=5.0), [3.0, 4.0, -0.25]),
        # -4 A sigmoid(r - 1), and with tau 1.05 at the negative advantage
        (SAPO(), [-8 / (1 + math.exp(-0.5)), -4.0, 4 / 1.05 / (1 + math.exp(0.525))]),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, PolicyLoss) else "",
)
def test_the_loss_of_a_token_by_hand(loss: PolicyLoss, expected: list[float]) -> None:
    torch.testing.assert_close(loss.per_token(terms(loss))[MASK], torch.tensor(expected))


def test_the_sequence_ratio_is_one_per_row() -> None:
    loss = ClippedSurrogate(importance_sampling_level="sequence", epsilon=1.0)
    value = loss.per_token(terms(loss))
    # sqrt(1.5 * 1.0) = 1.2247; the second row has one counted token
    torch.testing.assert_close(value, torch.tensor([[-2 * math.sqrt(1.5)], [0.5]]))


def test_the_geometric_mean_is_one_loss_per_row_and_a_mean_over_rows() -> None:
    loss = GeoMean(epsilon=0.4)
    value = loss.per_token(terms(loss))
    # log 1.5 = 0.405 is clipped at 0.4; log 0.5 = -0.693 at a negative advantage at -0.4
    expected = torch.tensor([[-2 * math.exp(0.2)], [math.exp(-0.4)]])
    torch.testing.assert_close(value, expected)
    assert loss.mean(value, MASK, totals_of(MASK, 2)).item() == pytest.approx(expected.mean().item())
    weights = torch.tensor([[4.0, 1.0], [0.5, 0.0]])  # a row weighs by their geometric mean: 2 and 0.5
    torch.testing.assert_close(loss.weighted(value, weights, MASK), expected * torch.tensor([[2.0], [0.5]]))


@pytest.mark.parametrize(
    ("loss", "clipped"),
    [
        (ClippedSurrogate(), [True, False, True]),
        (CISPO(), [True, False, True]),
        (CISPO(ratio_cap=5.0), [False, False, False]),
        (GeoMean(epsilon=0.5), [False, False, True]),
        (SAPO(), [False, False, False]),
        (GPG(), [False, False, False]),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, PolicyLoss) else "",
)
def test_clipped_tokens_are_those_that_a_bound_holds(loss: PolicyLoss, clipped: list[bool]) -> None:
    found = loss.is_clipped(terms(loss).log_ratios, ADVANTAGES)
    assert found[MASK].tolist() == clipped


def picked(loss: TokenPicking, noise: torch.Tensor) -> torch.Tensor:
    """Of one row of four tokens with log-probabilities -4, -1, -2, -1 and advantages -1, 1, 1, -1."""
    logps = torch.tensor([[-4.0, -1.0, -2.0, -1.0]])
    advantages = torch.tensor([[-1.0, 1.0, 1.0, -1.0]])
    mask = torch.ones(1, 4, dtype=torch.bool)
    # mean of logps -2, of advantages 0: covariances 2, 1, 0, -1
    return loss.picked(Terms(torch.zeros(1, 4), logps, advantages, mask), noise)


def test_clip_cov_draws_among_the_candidates_and_takes_them_out() -> None:
    loss = ClipCov(cov_low=0.5, cov_high=5.0, cov_ratio=0.25)
    assert picked(loss, torch.tensor([[0.9, 0.1, 0.0, 0.0]])).tolist() == [[False, True, False, False]]
    assert picked(loss, torch.tensor([[0.1, 0.9, 0.0, 0.0]])).tolist() == [[True, False, False, False]]
    out = torch.tensor([[False, True], [False, False]])
    torch.testing.assert_close(loss.per_token(terms(loss, out))[MASK], torch.tensor([-2.4, 0.0, 0.8]))


def test_kl_cov_picks_the_largest_covariances_and_they_pay() -> None:
    loss = KLCov(cov_ratio=0.5, kl_coef=3.0)
    assert picked(loss, torch.zeros(1, 4)).tolist() == [[True, True, False, False]]
    paying = torch.tensor([[True, False], [False, False]])
    expected = torch.tensor([-3.0 + 3 * math.log(1.5), -2.0, 0.5])
    torch.testing.assert_close(loss.per_token(terms(loss, paying))[MASK], expected)
    assert loss.needs_every_row


@pytest.mark.parametrize(
    ("build", "name"),
    [
        (lambda: ClippedSurrogate(epsilon=-0.1), "epsilon"),
        (lambda: ClippedSurrogate(dual_clip=1.0), "dual_clip"),
        (lambda: GPG(entropy_coeff=-1.0), "entropy_coeff"),
        (lambda: GPG(loss_type="mean"), "loss_type"),  # type: ignore[arg-type]
        (lambda: CISPO(ratio_cap=0.5), "ratio_cap"),
        (lambda: CISPO(ratio_cap=5.0, epsilon=0.1), "ratio_cap"),
        (lambda: SAPO(tau_neg=0.0), "tau_neg"),
        (lambda: GeoMean(loss_type="dapo"), "loss_type"),  # type: ignore[arg-type]
        (lambda: ClipCov(cov_low=5.0, cov_high=1.0), "cov_high"),
        (lambda: ClipCov(cov_ratio=0.0), "cov_ratio"),
        (lambda: KLCov(kl_coef=-1.0), "kl_coef"),
    ],
)
def test_values_out_of_range_are_refused(build: Callable[[], PolicyLoss], name: str) -> None:
    with pytest.raises(ConfigError, match=rf"algo\.policy_loss\.{name}"):
        build()
