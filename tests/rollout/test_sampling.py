import pytest

from lit_rl.errors import ConfigError
from lit_rl.rollout.sampling import Sampling


def test_generation_kwargs_win_over_the_keys() -> None:
    sampling = Sampling(
        temperature=0.7,
        top_p=0.9,
        max_completion_length=8,
        generation_kwargs={"temperature": 0.5, "max_new_tokens": 3, "min_new_tokens": 2},
    ).effective()
    assert (sampling.temperature, sampling.top_p, sampling.max_completion_length) == (0.5, 0.9, 3)
    assert sampling.generation_kwargs == {"min_new_tokens": 2}


def test_null_in_generation_kwargs_is_the_neutral_value() -> None:
    sampling = Sampling(top_k=3, stop=["a"], generation_kwargs={"top_k": None, "stop": None}).effective()
    assert (sampling.top_k, sampling.stop) == (0, [])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1.0}, r"algo.sampling.temperature must be >= 0 \(found -1.0\)"),
        ({"stop": "end"}, r"algo.sampling.stop must be a list of non-empty strings \(found 'end'\)"),
        (
            {"generation_kwargs": {"top_p": 2}},
            r"algo.sampling.generation_kwargs: .*top_p must be in \(0, 1\]",
        ),
    ],
)
def test_values_out_of_range_are_refused_by_their_key(settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Sampling(**settings).effective()
