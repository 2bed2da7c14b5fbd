"""Learning-rate multipliers by step."""

import math
from itertools import pairwise

import pytest

from lit_rl.functional.schedules import lr_multiplier, weight_decay

TYPES = ["constant", "linear", "cosine", "inverse_square_root", "wsd"]


def test_linear_by_hand() -> None:
    values = [lr_multiplier(s, lr_scheduler_type="linear", total_steps=10, warmup_steps=2) for s in range(11)]
    assert values == pytest.approx([0, 0.5, 1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8, 0])


@pytest.mark.field("cfg/5")
def test_warm_up_reaches_the_peak_at_its_last_step() -> None:
    values = [
        lr_multiplier(k, lr_scheduler_type="linear", total_steps=100, warmup_steps=4) for k in (1, 2, 3, 4)
    ]
    assert values == [0.25, 0.5, 0.75, 1.0]


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("warmup", [0, 1, 5])
def test_every_shape_peaks_at_the_end_of_the_warm_up_and_falls(kind: str, warmup: int) -> None:
    settings = {"lr_scheduler_type": kind, "total_steps": 20, "warmup_steps": warmup, "min_ratio": 0.1}
    values = [lr_multiplier(step, **settings) for step in range(warmup, 30)]
    assert values[0] == 1.0
    assert all(later <= earlier for earlier, later in pairwise(values))
    assert all(0.1 <= value <= 1 for value in values)


@pytest.mark.parametrize("kind", [k for k in TYPES if k != "constant"])
@pytest.mark.parametrize("num_cycles", [0.5, 1.0, 1.5])
def test_after_the_end_the_rate_stays_at_the_minimum(kind: str, num_cycles: float) -> None:
    settings = {"lr_scheduler_type": kind, "total_steps": 20, "min_ratio": 0.2, "num_cycles": num_cycles}
    assert [lr_multiplier(step, **settings) for step in (21, 25, 1000)] == [0.2] * 3


def test_the_decay_can_end_before_the_run() -> None:
    settings = {"lr_scheduler_type": "linear", "total_steps": 100, "warmup_steps": 10, "decay_steps": 20}
    assert lr_multiplier(20, **settings) == pytest.approx(0.5)
    assert lr_multiplier(30, **settings) == 0.0


def test_warm_up_starts_from_its_own_share() -> None:
    settings = {
        "lr_scheduler_type": "constant",
        "total_steps": 9,
        "warmup_steps": 4,
        "warmup_init_ratio": 0.2,
    }
    assert [lr_multiplier(s, **settings) for s in range(5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


@pytest.mark.parametrize(
    ("style", "half"),
    [
        ("linear", 0.5),
        ("cosine", 0.5),
        ("exponential", 2 * math.sqrt(0.5) - 1),
        ("minus_sqrt", 1 - math.sqrt(0.5)),
        ("constant", 1.0),
    ],
)
def test_wsd_is_flat_then_falls_over_its_last_steps(style: str, half: float) -> None:
    settings = {
        "lr_scheduler_type": "wsd",
        "total_steps": 40,
        "wsd_decay_style": style,
        "wsd_decay_steps": 10,
    }
    assert {lr_multiplier(step, **settings) for step in range(31)} == {1.0}
    assert lr_multiplier(35, **settings) == pytest.approx(half)
    assert lr_multiplier(40, **settings) == (1.0 if style == "constant" else 0.0)


def test_wsd_decays_over_a_tenth_of_the_run_unless_told_otherwise() -> None:
    settings = {"lr_scheduler_type": "wsd", "total_steps": 50, "wsd_decay_style": "linear"}
    assert lr_multiplier(45, **settings) == 1.0
    assert lr_multiplier(46, **settings) == pytest.approx(0.8)


def test_inverse_square_root_by_hand() -> None:
    settings = {"lr_scheduler_type": "inverse_square_root", "total_steps": 1000, "warmup_steps": 4}
    assert lr_multiplier(16, **settings) == 0.5
    assert lr_multiplier(400, **settings) == 0.1


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="lr_scheduler_type must be"):
        lr_multiplier(1, lr_scheduler_type="step", total_steps=2)
    with pytest.raises(ValueError, match="decay style"):
        lr_multiplier(1, lr_scheduler_type="wsd", total_steps=2, wsd_decay_style="quadratic")
    with pytest.raises(ValueError, match="style must be"):
        weight_decay(1, style="step", start=0.0, end=1.0, total_steps=2)


def test_weight_decay_grows_to_its_end_and_stays() -> None:
    linear = [weight_decay(s, style="linear", start=0.0, end=0.1, total_steps=4) for s in (0, 2, 4, 9)]
    assert linear == pytest.approx([0.0, 0.05, 0.1, 0.1])
    cosine = [weight_decay(s, style="cosine", start=0.0, end=0.1, total_steps=4) for s in (0, 2, 4, 9)]
    assert cosine == pytest.approx([0.0, 0.05, 0.1, 0.1])
    assert weight_decay(9, style="constant", start=0.01, end=0.1, total_steps=4) == 0.01
