import pytest

from lit_rl.errors import ConfigError
from lit_rl.rewards.length import Length
from lit_rl.rewards.reward import Sample


@pytest.mark.parametrize(
    ("tokens", "score"), [(0, 0.0), (2, 0.5), (4, 1.0), (8, 1.0), (10, 0.75), (16, 0.0), (40, 0.0)]
)
def test_the_score_falls_with_the_distance_from_the_bounds(tokens: int, score: float) -> None:
    result = Length(low=4, high=8).score(Sample("q", "a", [5] * tokens))
    assert result.score == score and (result.feedback is None) == (score == 1.0)


@pytest.mark.parametrize("bounds", [{"low": -1}, {"low": 5, "high": 4}, {"high": 0}], ids=str)
def test_bounds_that_are_none_are_refused(bounds: dict) -> None:
    with pytest.raises(ConfigError, match="0 <= low <= high"):
        Length(**bounds)
