"""Mathematics, patterns and JSON, worked cases."""

import pytest

from lit_rl.errors import ConfigError
from lit_rl.rewards.base import RewardSum, Sample
from lit_rl.rewards.by_source import BySource
from lit_rl.rewards.json_answer import JSONAnswer
from lit_rl.rewards.math import Math
from lit_rl.rewards.pattern import Pattern


def sample(completion: str, truth: object, source: str = "lighteval/MATH") -> Sample:
    return Sample("q", completion, columns={"data_source": source, "reward_model": {"ground_truth": truth}})


@pytest.mark.parametrize(
    ("completion", "truth", "score"),
    [
        (r"so \boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"\boxed{1/2}", r"\frac{1}{2}", 1.0),
        (r"first \boxed{3}, no: \boxed{4}", "4", 1.0),
        (r"\boxed{(1, 2]}", "(1,2]", 1.0),
        (r"\boxed{\{2, 1\}}", r"\{1, 2\}", 1.0),
        (r"\boxed{x^2+2x+1}", "(x+1)^2", 1.0),
        (r"\boxed{12}", "13", 0.0),
        ("I do not know.", "13", 0.0),
    ],
)
def test_expressions_are_compared_as_mathematics(completion: str, truth: str, score: float) -> None:
    assert BySource()([sample(completion, truth)])[0].score == score


def test_no_answer_is_counted_apart_from_a_wrong_one() -> None:
    total = RewardSum({"math": Math()})
    metrics = total([sample(r"\boxed{1}", "2"), sample("none", "2")]).metrics
    assert metrics["math/no_answer"] == 0.5
    assert Math().answer(sample(r"\boxed{0.50}", "1")) is not None
    assert Math().answer(sample("none", "1")) is None


def test_the_think_pattern_wants_one_block_at_the_start() -> None:
    pattern = Pattern(hint="Think first.")
    assert pattern.score(sample("<think>a\nb</think>\n4", "4")).score == 1.0
    for wrong in ("4", "4 <think>a</think>", "<think>a", "<think>a<think>b</think>4"):
        assert pattern.score(sample(wrong, "4")).score == 0.0
    assert pattern.score(sample("4", "4")).feedback == "Think first."


def test_a_pattern_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(ConfigError, match="regular expression"):
        Pattern("(")


@pytest.mark.parametrize(
    ("completion", "truth", "score"),
    [
        ('call {"name": "f", "arguments": {"x": 1}}', '{"name": "f", "arguments": {"x": 1}}', 1.0),
        ('{"name": "f", "arguments": {"x": 2}}', {"name": "f", "arguments": {"x": 1}}, 0.5),
        ('{"name": "f", "arguments": {"x": 1}, "more": 0}', {"name": "f", "arguments": {"x": 1}}, 2 / 3),
        ("[1, 2]", "[1, 2]", 1.0),
        ('{"a": 1} then {"a": 2}', {"a": 2}, 1.0),
        ('{"a": 1', {"a": 1}, 0.0),
    ],
)
def test_json_is_compared_field_by_field(completion: str, truth: object, score: float) -> None:
    assert JSONAnswer().score(sample(completion, truth)).score == pytest.approx(score)
