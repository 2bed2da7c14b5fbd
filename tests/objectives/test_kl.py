"""KL: the gradient of each option is the one that its table says, in the loss and in the reward."""

import typing

import pytest
import torch
from torch import Tensor

from lit_rl.errors import ConfigError
from lit_rl.functional.kl import full_kl
from lit_rl.objectives.kl import KL, KLCoefficient, KLControl

POLICY = torch.tensor([0.5, 0.3, -0.9], dtype=torch.float64)
REFERENCE = torch.tensor([-0.2, 0.6, 0.1], dtype=torch.float64).log_softmax(-1)
HINTS = typing.get_type_hints(KL)
IN_LOSS = [name for name in typing.get_args(HINTS["kl_loss_type"]) if name != "kl"]
IN_REWARD = [name for name in typing.get_args(HINTS["kl_penalty"]) if name != "abs"]  # of no distance


def gradient(function) -> Tensor:
    """Of a scalar function of the policy's log-probabilities over its three tokens, by the logits."""
    theta = POLICY.clone().requires_grad_()
    return torch.autograd.grad(function(theta.log_softmax(-1)), theta)[0]


def forward(logps: Tensor) -> Tensor:
    return full_kl(logps, REFERENCE)  # KL(policy, reference)


def backward(logps: Tensor) -> Tensor:
    return full_kl(REFERENCE, logps)


def distance(logps: Tensor) -> Tensor:
    return (logps.exp() - REFERENCE.exp()).abs().sum()


def mean_square(logps: Tensor) -> Tensor:
    return (logps.exp() * (logps - REFERENCE).square() / 2).sum()


@pytest.mark.field("num/7")
@pytest.mark.parametrize("name", IN_LOSS)
def test_in_the_loss_each_estimator_has_the_gradient_of_the_table(name: str) -> None:
    kl = KL(beta=1.0, kl_loss_type=name)  # type: ignore[arg-type]
    # the mean over samples of the policy, exactly: every token with its probability
    found = gradient(lambda logps: (logps.exp().detach() * kl.per_token(logps, REFERENCE)).sum())
    table = {"low_var_kl": gradient(backward), "abs": gradient(distance)}
    torch.testing.assert_close(found, table.get(name, gradient(forward)))


@pytest.mark.field("num/7")
@pytest.mark.parametrize("name", IN_REWARD)
def test_in_the_reward_each_estimator_has_the_gradient_of_the_table(name: str) -> None:
    kl = KL(use_kl_in_reward=True, kl_penalty=name)  # type: ignore[arg-type]
    every = torch.ones(3, dtype=torch.bool)

    def policy_gradient(logps: Tensor) -> Tensor:
        cost = kl.in_reward(logps, REFERENCE, every)
        assert not cost.requires_grad
        return (logps.exp().detach() * cost * logps).sum()

    table = {
        "kl": gradient(forward),
        "mse": gradient(mean_square) - gradient(forward),
        "low_var_kl": gradient(forward) - gradient(backward),
    }
    torch.testing.assert_close(gradient(policy_gradient), table[name])


@pytest.mark.field("num/7")
def test_k1_in_the_loss_is_refused_and_the_way_out_is_named() -> None:
    with pytest.raises(ConfigError, match=r"algo\.kl\.kl_loss_type .*'kl\+'"):
        KL(beta=0.1, kl_loss_type="kl")


def test_nothing_is_paid_at_masked_tokens() -> None:
    kl = KL(use_kl_in_reward=True)
    cost = kl.in_reward(
        torch.tensor([[-1.0, -1.0]]), torch.tensor([[-3.0, torch.nan]]), torch.tensor([[True, False]])
    )
    assert cost.tolist() == [[2.0, 0.0]]


@pytest.mark.field("num/6")
def test_the_share_of_clamped_estimates_is_known() -> None:
    values, mask = torch.tensor([[10.0, 0.1, 10.0]]), torch.tensor([[True, True, False]])
    assert KL(kl_loss_type="low_var_kl").clamped_frac(values, mask).item() == 0.5
    assert KL(kl_loss_type="mse").clamped_frac(values, mask).item() == 0.0


def test_a_fixed_weight_stays_and_an_adaptive_one_follows_the_kl() -> None:
    kl, mask = torch.tensor([[0.4, 0.2], [0.1, 9.0]]), torch.tensor([[True, True], [True, False]])
    fixed = KLCoefficient(KLControl(kl_coef=0.2))
    fixed.follow(kl, mask)
    assert fixed.value == 0.2 and not fixed.is_moving
    adaptive = KLCoefficient(KLControl("adaptive", kl_coef=0.2, horizon=10, target_kl=0.25))
    adaptive.follow(kl, mask)
    # rows have means 0.3 and 0.1, together 0.2: error 0.2 / 0.25 - 1 = -0.2; times 2 rows / 10
    assert adaptive.is_moving and adaptive.value == pytest.approx(0.2 * (1 - 0.2 * 2 / 10))
    again = KLCoefficient(KLControl("adaptive", kl_coef=0.2, horizon=10, target_kl=0.25))
    again.load_state_dict(adaptive.state_dict())
    assert again.value == adaptive.value


@pytest.mark.parametrize(
    ("settings", "name"),
    [({"kl_coef": -1.0}, "kl_coef"), ({"horizon": 0}, "horizon"), ({"target_kl": 0.0}, "target_kl")],
)
def test_values_out_of_range_are_refused(settings: dict, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"algo\.kl\.kl_ctrl\.{name} must"):
        KLControl(**settings)
