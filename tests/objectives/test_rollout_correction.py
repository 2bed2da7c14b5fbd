"""RolloutCorrection: what each mode does to weights and mask, and what is refused."""

import pytest
import torch

from lit_rl.errors import ConfigError
from lit_rl.objectives.rollout_correction import RolloutCorrection

RATIOS = torch.tensor([[4.0, 1.0], [0.2, 1.0], [1.0, 9.0]])
MASK = torch.tensor([[True, True], [True, True], [True, False]])
ROLLOUT = torch.full((3, 2), -2.0)


def corrected(**settings) -> tuple[list, list]:
    correction = RolloutCorrection(rollout_is=True, **settings)(ROLLOUT + RATIOS.log(), ROLLOUT, MASK)
    return [[round(w, 5) for w in row] for row in correction.weights.tolist()], correction.mask.tolist()


def test_truncation_caps_the_weight_and_keeps_the_mask() -> None:
    weights, mask = corrected(rollout_is_threshold=2.0)
    assert weights == [[2.0, 1.0], [0.2, 1.0], [1.0, 0.0]] and mask == MASK.tolist()


def test_masking_takes_tokens_outside_the_bounds_out_of_the_loss() -> None:
    weights, mask = corrected(rollout_is_threshold=2.0, rollout_is_mode="mask")
    assert mask == [[False, True], [False, True], [True, False]]
    assert weights[0] == [4.0, 1.0]
    _, mask = corrected(rollout_is_threshold=5.0, rollout_is_threshold_lower=0.1, rollout_is_mode="mask")
    assert mask == MASK.tolist()


def test_levels_weigh_a_row_by_its_product_or_its_geometric_mean() -> None:
    assert corrected(rollout_is_level="sequence")[0] == [[4.0, 4.0], [0.2, 0.2], [1.0, 0.0]]
    assert corrected(rollout_is_level="geometric")[0][0] == [2.0, 2.0]


def test_the_veto_drops_rows_by_their_worst_token() -> None:
    weights, mask = corrected(rollout_is_mode="none", rollout_is_veto_threshold=0.25)
    assert mask == [[True, True], [False, False], [True, False]] and weights[0] == [4.0, 1.0]


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"rollout_is_threshold": 1.0}, "rollout_is_threshold"),
        ({"rollout_is_threshold_lower": 0.5}, "rollout_is_threshold_lower"),
        ({"rollout_is_threshold_lower": 1.5, "rollout_is_mode": "mask"}, "rollout_is_threshold_lower"),
        ({"rollout_is_mode": "none"}, "rollout_is_veto_threshold"),
        ({"rollout_is_mode": "none", "rollout_is_threshold": 2.0}, "rollout_is_threshold"),
        ({"rollout_is_veto_threshold": 2.0}, "rollout_is_veto_threshold"),
    ],
)
def test_values_out_of_range_or_of_another_mode_are_refused(settings: dict, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"algo\.rollout_correction\.{name} must"):
        RolloutCorrection(rollout_is=True, **settings)
