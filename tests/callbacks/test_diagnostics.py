"""Diagnostics: what counts as degenerate, when a warning comes, what sets a count back."""

import re
import warnings

import pytest

from lit_rl.callbacks.diagnostics import Diagnostics
from lit_rl.errors import ConfigError

FLAT = {"rollout/reward_std": 0.0}
HEALTHY = {"rollout/reward_std": 0.4, "rollout/truncated_frac": 0.0, "rollout/loss_tokens": 9.0}


def warned_at(callback: Diagnostics, script: list[dict[str, float]], about: str = "") -> list[int]:
    """Steps (from 1) whose warnings mention `about`, when the metrics follow the script."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step, metrics in enumerate(script, start=1):
            callback.on_update_end(None, None, step=step, metrics=metrics)  # type: ignore[arg-type]
    texts = [str(item.message) for item in caught]
    return [int(re.match(r"Step (\d+):", text)[1]) for text in texts if about in text]


def test_a_warning_repeats_after_every_interval_of_flat_steps():
    assert warned_at(Diagnostics(3), [FLAT] * 7, "spread in its rewards") == [3, 6]


def test_a_healthy_step_sets_the_count_back():
    assert warned_at(Diagnostics(3), [FLAT, FLAT, HEALTHY, FLAT, FLAT, FLAT]) == [6]


def test_healthy_steps_say_nothing():
    assert warned_at(Diagnostics(1), [HEALTHY] * 3) == []


def test_interval_0_is_silent():
    assert warned_at(Diagnostics(0), [{**FLAT, "rollout/loss_tokens": 0.0}] * 20) == []


@pytest.mark.parametrize(("std", "is_flat"), [(0.0, True), (1e-8, True), (1e-7, False)])
def test_a_spread_within_the_tolerance_is_flat(std, is_flat):
    assert bool(warned_at(Diagnostics(1, 1e-8), [{"rollout/reward_std": std}])) == is_flat


def test_each_kind_has_its_own_count():
    callback = Diagnostics(2)
    steps = [
        {"sdpo/success_group_frac": 0.0, "sdpo/reprompted_frac": 0.5},
        {"sdpo/success_group_frac": 0.0, "sdpo/reprompted_frac": 0.0},
        {"sdpo/success_group_frac": 0.5, "sdpo/reprompted_frac": 0.0},
    ]
    assert warned_at(callback, steps, "success") == [2]
    assert callback.counts["no_success"] == 0 and callback.counts["no_reprompt"] == 2


def test_feedback_that_never_comes_is_reported():
    script = [{"sdpo/feedback_available_frac": value} for value in (0.0, 0.0, 0.5, 0.0, 0.0)]
    assert warned_at(Diagnostics(2), script, "data.privileged_context_key") == [2, 5]


def test_kinds_that_the_algorithm_does_not_report_are_left_alone():
    callback = Diagnostics(1)
    assert warned_at(callback, [{"train/loss": 0.0}]) == []


@pytest.mark.field("gen/6")
def test_completions_that_are_all_cut_are_reported_after_a_few_steps_and_flat_rewards_with_them():
    script = [{"rollout/truncated_frac": 1.0, "rollout/reward_std": 0.0}] * 10
    assert warned_at(Diagnostics(), script, "max_completion_length") == [3, 10]
    assert warned_at(Diagnostics(), script, "spread in its rewards") == [10]


@pytest.mark.field("log/1")
def test_a_loss_of_zero_without_reward_spread_is_explained():
    metrics = {"train/loss": 0.0, "rollout/reward_std": 0.0, "rollout/zero_variance_frac": 1.0}
    assert warned_at(Diagnostics(1), [metrics], "policy loss of 0 is no sign of a fault") == [1]
    assert warned_at(Diagnostics(1), [{**metrics, "rollout/reward_std": 0.5}]) == []


@pytest.mark.field("num/2")
def test_a_step_without_any_token_in_the_loss_is_reported_once_with_its_cause():
    script = [{"rollout/loss_tokens": 0.0}] * 5
    assert warned_at(Diagnostics(), script, "mask_truncated_completions") == [1]


def test_counts_go_on_after_a_resume():
    first, second = Diagnostics(3), Diagnostics(3)
    warned_at(first, [FLAT, FLAT])
    second.load_state_dict(first.state_dict())
    assert warned_at(second, [FLAT]) == [1]


@pytest.mark.parametrize("name", ["diagnostics_warning_interval", "diagnostics_flat_tolerance"])
def test_negative_values_are_refused(name):
    with pytest.raises(ConfigError, match=rf"callbacks\.diagnostics\.{name}"):
        Diagnostics(**{name: -1})
