"""WarmupDecay: rates by iteration, weight decay, and state that goes on."""

import json
import math

import pytest
import torch

from lit_rl.errors import ConfigError
from lit_rl.schedule import WarmupDecay


def optimizer(lr: float = 1.0, weight_decay: float = 0.1) -> torch.optim.Optimizer:
    """Two groups, the second without weight decay, as the module makes them."""
    groups = [
        {"params": [torch.zeros(2, 2, requires_grad=True)]},
        {"params": [torch.zeros(2, requires_grad=True)], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, weight_decay=weight_decay)


def rates(steps: int, lr: float = 1.0, **settings) -> list[float]:
    """The rate that each iteration runs at."""
    adam = optimizer(lr)
    schedule = WarmupDecay(adam, total_steps=steps, **settings)
    out = []
    for _ in range(steps):
        out.append(adam.param_groups[0]["lr"])
        adam.step()
        schedule.step()
    return out


@pytest.mark.field("cfg/5")
def test_linear_warm_up_reaches_the_peak_at_its_last_step() -> None:
    # Iteration i runs at schedule(i + 1): 1/4, 2/4, 3/4, 4/4 and then on.
    got = rates(8, lr_scheduler_type="constant", lr_warmup_steps=4)
    assert got == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0])


def test_no_iteration_runs_at_the_rate_of_step_zero() -> None:
    # Linear over 4 steps reaches 0 right after the last one: 4/5, 3/5, 2/5, 1/5.
    assert rates(4) == pytest.approx([0.8, 0.6, 0.4, 0.2])
    assert rates(1) == pytest.approx([0.5])


def test_the_ratio_counts_when_no_steps_are_given() -> None:
    assert rates(10, lr_warmup_steps_ratio=0.2) == rates(10, lr_warmup_steps=2)
    assert rates(10, lr_warmup_steps_ratio=0.2) != rates(10)


def test_floors_and_the_start_are_rates_of_the_peak() -> None:
    got = rates(4, lr=2.0, min_lr=0.5)
    assert got == pytest.approx([2 - 1.5 * i / 5 for i in (1, 2, 3, 4)])
    assert rates(4, lr=2.0, min_lr_ratio=0.25) == pytest.approx(got)
    warm = rates(4, lr=2.0, lr_scheduler_type="constant", lr_warmup_steps=4, lr_warmup_init=1.0)
    assert warm == pytest.approx([1.25, 1.5, 1.75, 2.0])


def test_cosine_falls_once_by_half_a_wave() -> None:
    want = [(1 + math.cos(math.pi * i / 5)) / 2 for i in (1, 2, 3, 4)]
    assert rates(4, lr_scheduler_type="cosine") == pytest.approx(want)


def test_wsd_holds_the_peak_until_its_last_phase() -> None:
    settings = {"lr_scheduler_type": "wsd", "lr_wsd_decay_style": "linear", "lr_wsd_decay_steps": 4}
    assert rates(10, **settings) == pytest.approx([1.0] * 7 + [0.75, 0.5, 0.25])


def test_growing_weight_decay_leaves_undecayed_groups_alone() -> None:
    adam = optimizer(weight_decay=0.1)
    schedule = WarmupDecay(adam, total_steps=4, weight_decay_incr_style="linear", end_weight_decay=0.5)
    seen = []
    for _ in range(4):
        seen.append([group["weight_decay"] for group in adam.param_groups])
        adam.step()
        schedule.step()
    assert [first for first, _ in seen] == pytest.approx([0.2, 0.3, 0.4, 0.5])
    assert [second for _, second in seen] == [0.0] * 4


def test_a_restored_schedule_goes_on_as_if_it_had_never_stopped() -> None:
    adam = optimizer()
    schedule = WarmupDecay(adam, total_steps=8, lr_scheduler_type="cosine", lr_warmup_steps=2)
    for _ in range(3):
        adam.step()
        schedule.step()
    state = json.loads(json.dumps(schedule.state_dict()))  # plain values only

    other = optimizer()
    resumed = WarmupDecay(other, total_steps=99, lr_scheduler_type="linear")
    resumed.load_state_dict(state)
    for _ in range(4):
        assert other.param_groups[0]["lr"] == adam.param_groups[0]["lr"]
        for optimizer_, schedule_ in ((adam, schedule), (other, resumed)):
            optimizer_.step()
            schedule_.step()


def test_without_settings_in_the_state_the_own_ones_stay() -> None:
    adam = optimizer()
    schedule = WarmupDecay(adam, total_steps=9)
    schedule.load_state_dict({"last_epoch": 4})
    assert adam.param_groups[0]["lr"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"lr_warmup_steps_ratio": 1.5}, "lr_warmup_steps_ratio"),
        ({"min_lr": -1.0}, "min_lr"),
        ({"min_lr_ratio": 2.0}, "min_lr_ratio"),
        ({"num_cycles": 0.0}, "num_cycles"),
        ({"lr_warmup_steps": 9}, "lr_warmup_steps"),
        ({"lr_warmup_steps": 4, "lr_decay_steps": 5}, "lr_decay_steps"),
        ({"weight_decay_incr_style": "linear"}, "end_weight_decay"),
    ],
)
def test_what_cannot_work_is_refused(settings: dict, key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        WarmupDecay(optimizer(), total_steps=8, **settings)
