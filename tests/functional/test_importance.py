"""Rollout correction: bounds, masks and the veto."""

import math

import pytest
import torch
from torch import Tensor

from lit_rl.functional.importance import (
    geometric_weights,
    has_vetoed_token,
    is_within,
    mismatch,
    normalized_weights,
    rollout_correction,
)


def gap(value: float, tokens: int = 100) -> tuple[Tensor, Tensor, Tensor]:
    """Training and engine log-probabilities that differ by `value` at each token."""
    rollout = torch.full((1, tokens), -1.0, dtype=torch.float64)
    return rollout + value, rollout, torch.ones(1, tokens)


@pytest.mark.field("vllm/5")
def test_token_levels_weigh_each_token_and_sequence_levels_the_product() -> None:
    logps, rollout, mask = gap(0.012)
    for mode in ("truncate", "mask"):
        token = rollout_correction(logps, rollout, mask, level="token", mode=mode, upper=2.0)
        assert token.weights.unique().item() == pytest.approx(1.01207, rel=1e-5)
        assert token.mask.all()
    sequence = rollout_correction(logps, rollout, mask, level="sequence", mode="truncate", upper=2.0)
    assert sequence.log_ratio.exp().item() == pytest.approx(3.3201, rel=1e-4)
    assert bool((sequence.weights == 2.0).all()) and sequence.mask.all()
    masked = rollout_correction(logps, rollout, mask, level="sequence", mode="mask", upper=2.0)
    assert not masked.mask.any()


def test_the_geometric_level_does_not_grow_with_length() -> None:
    for tokens in (10, 1000):
        logps, rollout, mask = gap(0.012, tokens)
        ratio = mismatch(logps, rollout, mask, "geometric").exp()
        assert ratio.item() == pytest.approx(math.exp(0.012))


def test_the_lower_bound_is_the_reciprocal_unless_given() -> None:
    ratio = torch.tensor([[0.49, 0.51, 1.0, 1.99, 2.01]]).log()
    assert is_within(ratio, upper=2.0).tolist() == [[False, True, True, True, False]]
    assert is_within(ratio, upper=2.0, lower=0.9).tolist() == [[False, False, True, True, False]]


def test_without_an_upper_bound_nothing_is_cut() -> None:
    logps, rollout, mask = gap(3.0, 4)
    for mode in ("truncate", "mask", "none"):
        correction = rollout_correction(logps, rollout, mask, mode=mode)
        assert correction.mask.all()
        assert correction.weights.unique().item() == pytest.approx(math.exp(3.0))


def test_the_veto_drops_the_whole_row_and_no_other() -> None:
    rollout = torch.full((2, 3), -1.0)
    logps = torch.tensor([[-1.0, -12.0, -1.0], [-1.0, -1.1, -0.9]])
    correction = rollout_correction(logps, rollout, torch.ones(2, 3), mode="none", veto=1e-4)
    assert correction.mask.tolist() == [[False] * 3, [True] * 3]


def test_a_token_that_does_not_count_cannot_veto() -> None:
    ratio, mask = torch.tensor([[0.0, -12.0]]), torch.tensor([[1, 0]])
    assert not has_vetoed_token(ratio, mask, threshold=1e-4).any()


def test_padding_has_weight_zero_and_is_not_read() -> None:
    logps = torch.tensor([[-1.0, math.nan], [math.nan, math.nan]])
    mask = torch.tensor([[1, 0], [0, 0]])
    for level in ("token", "sequence", "geometric"):
        correction = rollout_correction(logps, torch.full((2, 2), -1.5), mask, level=level, upper=2.0)
        assert correction.weights.tolist() == [[pytest.approx(math.exp(0.5)), 0.0], [0.0, 0.0]]
        assert torch.equal(correction.mask, mask.bool())


def test_weights_carry_no_gradient_and_stay_finite() -> None:
    logps = torch.tensor([[500.0]], requires_grad=True)
    correction = rollout_correction(logps, torch.zeros(1, 1), torch.ones(1, 1))
    assert not correction.weights.requires_grad and correction.weights.isfinite().all()


def test_normalised_weights_have_mean_one_over_what_counts() -> None:
    weights, mask = torch.tensor([[1.0, 3.0, 9.0], [5.0, 5.0, 5.0]]), torch.tensor([[1, 1, 0], [0, 0, 0]])
    assert normalized_weights(weights, mask)[0, :2].tolist() == [0.5, 1.5]
    assert normalized_weights(torch.tensor([[4.0], [9.0]]), mask)[0].item() == 1.0


def test_the_geometric_weight_of_a_row() -> None:
    weights, mask = torch.tensor([[2.0, 8.0, 99.0], [5.0, 5.0, 5.0]]), torch.tensor([[1, 1, 0], [0, 0, 0]])
    assert geometric_weights(weights, mask).flatten().tolist() == [pytest.approx(4.0), 1.0]


def test_unknown_names_are_refused() -> None:
    logps, rollout, mask = gap(0.0, 2)
    with pytest.raises(ValueError, match="level must be"):
        rollout_correction(logps, rollout, mask, level="row")
    with pytest.raises(ValueError, match="mode must be"):
        rollout_correction(logps, rollout, mask, mode="clip")


@pytest.mark.field("num/11")
def test_a_truncated_support_shows_as_a_ratio_away_from_one() -> None:
    # engine: top_k 2 of [0.5, 0.3, 0.2] reports log(0.5 / 0.8); the trainer's full softmax says log 0.5
    ratio = mismatch(
        torch.tensor([[math.log(0.5)]]), torch.tensor([[math.log(0.625)]]), torch.ones(1, 1)
    ).exp()
    assert ratio.item() == pytest.approx(0.8)
