import pytest

from lit_rl.errors import ConfigError
from lit_rl.rewards.base import Sample
from lit_rl.rewards.soft_overlong import SoftOverlong


@pytest.mark.parametrize(
    ("length", "score"), [(0, 0.0), (16, 0.0), (17, -0.25), (18, -0.5), (20, -1.0), (25, -1.0)]
)
def test_the_penalty_grows_over_the_last_fifth(length: int, score: float) -> None:
    assert SoftOverlong(20).score(Sample("", "", [7] * length)).score == score


def test_the_zone_can_be_given_and_is_within_the_limit() -> None:
    assert SoftOverlong(20, 10).score(Sample("", "", [7] * 15)).score == -0.5
    assert SoftOverlong(3).score(Sample("", "", [7] * 3)).score == -1.0
    for zone in (0, 21):
        with pytest.raises(ConfigError, match="soft_punish_cache"):
            SoftOverlong(20, zone)
