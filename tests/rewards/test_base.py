import math
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch

from lit_rl.errors import ConfigError, DataError
from lit_rl.rewards.base import RewardSum
from lit_rl.rewards.custom import from_function
from lit_rl.rewards.exact_match import ExactMatch
from lit_rl.rewards.results import FAILURES_TOLD
from lit_rl.rewards.reward import Reward, RewardResult


class Listed(Reward):
    """Returns what it was given, by the sample's number."""

    def __init__(self, *values) -> None:
        self.values = values

    def score(self, sample) -> RewardResult:
        value = self.values[int(sample.completion)]
        if isinstance(value, Exception):
            raise value
        return value if isinstance(value, RewardResult) else RewardResult(value)


def rows(sample, count):
    return [sample(str(i)) for i in range(count)]


def returning(value):
    def f(completions):
        return value

    return from_function(f)


@pytest.mark.field("rew/3")
def test_what_does_not_apply_is_left_out_of_the_sum_and_named_once(sample) -> None:
    nan = math.nan
    reward = RewardSum({"f1": Listed(1, None, 0, nan), "f2": Listed(None, 1, nan, None)}, [1.0, 2.0])
    with pytest.warns(UserWarning, match=r"rows \[3\].*missing_frac.*filterwarnings"):
        scores = reward(rows(sample, 4))
    torch.testing.assert_close(scores.rewards, torch.tensor([1.0, 2.0, 0.0, nan]), equal_nan=True)
    per_func = torch.tensor([[1, nan], [nan, 1], [0, nan], [nan, nan]])
    torch.testing.assert_close(scores.rewards_per_func, per_func, equal_nan=True)
    assert scores.metrics["missing_frac"] == 0.25
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reward(rows(sample, 4))


@pytest.mark.field("rew/3")
def test_an_infinite_reward_stops_and_names_function_and_row(sample) -> None:
    with pytest.raises(DataError, match=r"'f'.*sample 1.*returned inf.*starts with '1'.*on_error"):
        RewardSum({"f": Listed(1, math.inf)})(rows(sample, 2))


@pytest.mark.field("rew/4")
@pytest.mark.parametrize(
    "value",
    [
        [1, 0.5],
        (True, np.float32(0.5)),
        np.array([1.0, 0.5]),
        torch.tensor([1.0, 0.5]),
        [torch.tensor(1.0), np.array(0.5)],
        [{"score": 1, "feedback": None}, {"score": 0.5}],
    ],
)
def test_numbers_in_any_sequence_of_the_right_length_are_scores(sample, value) -> None:
    assert RewardSum({"f": returning(value)})(rows(sample, 2)).rewards.tolist() == [1.0, 0.5]


@pytest.mark.field("rew/4")
@pytest.mark.parametrize(
    ("value", "found"),
    [
        ([1.0], "found 1"),
        (1.0, "found float"),
        (np.float64(1.0), "found float"),
        (torch.tensor(1.0), "found float"),
        ("10", "found str"),
        (None, "found NoneType"),
        ({"score": 1.0}, "found dict"),
    ],
)
def test_another_shape_names_the_function_and_the_expected_count(sample, value, found) -> None:
    with pytest.raises(DataError, match=rf"'f' must return 2 scores.*{found}"):
        RewardSum({"f": returning(value)})(rows(sample, 2))


@pytest.mark.field("rew/4")
@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("0.5", "must return a number or None .found str '0.5'"),
        ([0.5], "must return a number or None .found list"),
        (torch.ones(2), "must return one number .found Tensor"),
        ({"reward": 1.0}, "returned a mapping without 'score' .found the keys .'reward'"),
        ({"score": 1.0, "feedback": 3}, "returned feedback that is no text .found int"),
        (math.inf, "returned inf"),
    ],
)
@pytest.mark.parametrize("manager", ["naive", "prime"])
def test_an_element_that_is_no_score_names_the_row_and_follows_on_error(
    sample, value, message, manager, caplog
) -> None:
    def f(completions):
        return [value if turns[0]["content"] == "2" else 1.0 for turns in completions]

    def total(on_error):
        return RewardSum({"f": from_function(f)}, on_error=on_error, reward_manager=manager)

    with pytest.raises(DataError, match=rf"'f' failed on sample 2 of the batch .*{message}"):
        total("error")(rows(sample, 4))
    zero, drop = total("zero")(rows(sample, 4)), total("drop")(rows(sample, 4))
    assert zero.rewards.tolist() == [1, 1, 0, 1] and zero.metrics["error_frac"] == 0.25
    assert drop.rewards.isnan().tolist() == [False, False, True, False]
    assert "'f' failed on sample 2" in caplog.text


@pytest.mark.field("rew/4")
def test_a_missing_score_is_looked_for_row_by_row(sample, caplog) -> None:
    scores = RewardSum({"f": from_function(without_the_second)}, on_error="zero")(rows(sample, 3))
    assert scores.rewards.tolist() == [1, 0, 1] and "failed on sample 1" in caplog.text
    alone_each_has_one = RewardSum({"f": returning([1.0])}, on_error="zero")(rows(sample, 3))
    assert alone_each_has_one.rewards.tolist() == [0, 0, 0]
    assert alone_each_has_one.metrics["error_frac"] == 1.0


def without_the_second(completions):
    return [1.0 for turns in completions if turns[0]["content"] != "1"]


def test_many_failures_are_told_in_short_and_with_the_row_of_the_data(sample, caplog) -> None:
    samples = [replace(row, row=100 + i) for i, row in enumerate(rows(sample, 9))]
    RewardSum({"f": returning("x")}, on_error="zero")(samples)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == FAILURES_TOLD + 1 and "failed on 9 of 9 samples" in lines[-1]
    assert "sample 3 of the batch, row 103 of the data" in lines[3]


def test_zero_scores_only_the_row_that_failed_and_logs_why(sample, caplog) -> None:
    reward = RewardSum({"f": Listed(1, KeyError("x"), 1)}, on_error="zero")
    scores = reward(rows(sample, 3))
    assert scores.rewards.tolist() == [1, 0, 1]
    assert scores.metrics["error_frac"] == pytest.approx(1 / 3)
    assert "'f' failed on sample 1" in caplog.text and "KeyError: 'x'" in caplog.text


def test_drop_takes_the_row_out_although_another_function_scored_it(sample) -> None:
    reward = RewardSum({"f": Listed(1, ValueError("x")), "g": Listed(1, 1)}, on_error="drop")
    scores = reward(rows(sample, 2))
    torch.testing.assert_close(scores.rewards, torch.tensor([2.0, math.nan]), equal_nan=True)
    torch.testing.assert_close(scores.rewards_per_func, torch.tensor([[1, 1], [math.nan, 1]]), equal_nan=True)


def test_error_stops_and_keeps_the_cause(sample) -> None:
    with pytest.raises(DataError, match=r"'f' failed on sample 1 .*ValueError: x") as caught:
        RewardSum({"f": Listed(1, ValueError("x"))})(rows(sample, 2))
    assert isinstance(caught.value.__cause__, ValueError)


def test_feedback_of_several_functions_is_joined_and_weight_zero_is_silent(sample) -> None:
    said = RewardResult(0.0, "too low")
    reward = RewardSum({"a": Listed(said), "b": Listed(said), "logged": Listed(said)}, [1, 1, 0])
    assert reward([sample("0")]).feedback == ["too low\ntoo low"]
    assert RewardSum({"a": Listed(1.0)})([sample("0")]).feedback == [None]


def test_further_numbers_are_averaged_over_the_rows_that_have_them(sample) -> None:
    first = RewardResult(1.0, metrics={"len": 4.0})
    reward = RewardSum({"f": Listed(first, RewardResult(0.0, metrics={"len": 2.0}), 1.0)})
    assert reward(rows(sample, 3)).metrics == {"f/len": 3.0, "error_frac": 0.0, "missing_frac": 0.0}


def test_no_rows_give_no_scores() -> None:
    scores = RewardSum({"f": Listed(), "g": Listed()})([])
    assert scores.rewards.shape == (0,) and scores.rewards_per_func.shape == (0, 2) and scores.feedback == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reward_funcs": {}}, "reward.reward_funcs must hold at least one"),
        ({"reward_weights": [1.0, 2.0]}, r"reward.reward_weights must hold one weight per .* 2 for \['f'\]"),
        ({"reward_weights": [math.nan]}, "reward.reward_weights must be finite"),
        ({"reward_weights": [0.0]}, "reward.reward_weights must be finite and not all 0"),
        ({"on_error": "ignore"}, "reward.on_error must be one of error, zero, drop .found 'ignore'"),
        ({"custom_reward_function": {"name": "f"}}, "custom_reward_function.name .found 'f'. needs .*path"),
        ({"custom_reward_function": {"pth": "x"}}, "custom_reward_function has no key 'pth'"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_by_its_full_name(settings, message) -> None:
    with pytest.raises(ConfigError, match=message):
        RewardSum(**{"reward_funcs": {"f": ExactMatch()}, **settings})
