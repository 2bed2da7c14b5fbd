"""Critic: which settings it takes, and the error of a value by hand."""

import pytest
import torch
from torch import nn

from lit_rl.errors import ConfigError
from lit_rl.objectives.value import Critic


def critic(**settings: object) -> Critic:
    return Critic(model=nn.Identity(), **settings)  # type: ignore[arg-type]


def test_the_larger_of_plain_and_clipped_error_counts() -> None:
    """Old value 0, clip range 0.5. Toward a far return the bound makes the error larger; away it does not."""
    values, old = torch.tensor([[0.3, 0.8, 0.8, -0.8]]), torch.zeros(1, 4)
    returns = torch.tensor([[1.0, 1.0, 0.0, 1.0]])
    # (0.3 - 1)^2, (0.5 - 1)^2 > (0.8 - 1)^2, 0.8^2 > 0.5^2, 1.8^2 > 1.5^2, each halved
    expected = torch.tensor([[0.245, 0.125, 0.32, 1.62]])
    torch.testing.assert_close(critic().per_token(values, old, returns), expected)
    assert critic().is_clipped(values, old, returns).tolist() == [[False, True, False, False]]


def test_without_a_clip_range_the_plain_error_counts() -> None:
    values, old, returns = torch.tensor([[0.8]]), torch.zeros(1, 1), torch.ones(1, 1)
    free = critic(cliprange_value=None)
    torch.testing.assert_close(free.per_token(values, old, returns), torch.tensor([[0.02]]))
    assert not free.is_clipped(values, old, returns).any()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("critic_warmup", -1),
        ("micro_batch_size", 0),
        ("max_grad_norm", -0.1),
        ("cliprange_value", 0.0),
        ("value_loss_coef", 0.0),
    ],
)
def test_what_is_out_of_range_is_refused_by_its_key(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"^algo\.critic\.{name} must be .*\(found {value}\)"):
        critic(**{name: value})
