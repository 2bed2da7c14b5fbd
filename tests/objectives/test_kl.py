"""KL: the gradient of each option is the one that lit_rl/functional/README.md says, by enumeration.

A policy over three tokens writes two of them: nine completions, each with its exact probability.
"""

import typing
from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

from lit_rl.errors import ConfigError
from lit_rl.functional.kl import full_kl
from lit_rl.objectives.kl import KL, KLCoefficient, KLControl

# logits of the first token, and of the second one after each first one: rows of (4, 3)
POLICY = torch.tensor([[0.5, 0.3, -0.9], [0.1, -0.4, 0.6], [1.0, 0.2, -0.3], [-0.7, 0.0, 0.4]]).double()
REFERENCE = torch.tensor([[-0.2, 0.6, 0.1], [0.3, 0.3, -0.5], [0.0, 0.9, 0.1], [0.4, -0.2, 0.2]]).double()
REFERENCE = REFERENCE.log_softmax(-1)
COMPLETIONS = list(product(range(3), repeat=2))
HINTS = typing.get_type_hints(KL)
IN_LOSS = [name for name in typing.get_args(HINTS["kl_loss_type"]) if name != "kl"]
IN_REWARD = [name for name in typing.get_args(HINTS["kl_penalty"]) if name != "abs"]  # of no distance

Distance = Callable[[Tensor, Tensor], Tensor]


def gradient(function: Callable[[Tensor], Tensor]) -> Tensor:
    """Of a scalar function of the policy's (4, 3) log-probabilities, by the logits."""
    theta = POLICY.clone().requires_grad_()
    return torch.autograd.grad(function(theta.log_softmax(-1)), theta)[0]


def positions(first: int) -> list[int]:
    """Rows of the table that a completion passes through."""
    return [0, 1 + first]


def of_tokens(table: Tensor, completion: tuple[int, int]) -> Tensor:
    """(2,) the entries of the table at the completion's tokens."""
    rows = positions(completion[0])
    return torch.stack([table[row, token] for row, token in zip(rows, completion, strict=True)])


def probability(logps: Tensor, completion: tuple[int, int]) -> Tensor:
    return of_tokens(logps, completion).sum().exp()


def forward(logps: Tensor, ref_logps: Tensor) -> Tensor:
    return full_kl(logps, ref_logps)  # KL(policy, reference)


def backward(logps: Tensor, ref_logps: Tensor) -> Tensor:
    return full_kl(ref_logps, logps)


def absolute(logps: Tensor, ref_logps: Tensor) -> Tensor:
    return (logps.exp() - ref_logps.exp()).abs().sum(-1)


def mean_square(logps: Tensor, ref_logps: Tensor) -> Tensor:
    return (logps.exp() * (logps - ref_logps).square() / 2).sum(-1)


def at_each_position(distance: Distance) -> Tensor:
    """Gradient of the distance at both positions, how often each comes up taken as given."""

    def weighted(logps: Tensor) -> Tensor:
        visits = torch.cat([torch.ones(1).double(), logps[0].exp().detach()])  # (4,)
        return (visits * distance(logps, REFERENCE)).sum()

    return gradient(weighted)


def of_later(distance: Distance) -> Tensor:
    """Gradient of the distance at the second position through the choice of the first token alone."""
    return gradient(lambda logps: (logps[0].exp() * distance(logps, REFERENCE)[1:].detach()).sum())


def of_whole_completions() -> Tensor:
    """Gradient of KL(policy, reference) over the nine completions."""

    def kl(logps: Tensor) -> Tensor:
        ratios = [of_tokens(logps - REFERENCE, completion).sum() for completion in COMPLETIONS]
        return sum(probability(logps, c) * ratio for c, ratio in zip(COMPLETIONS, ratios, strict=True))

    return gradient(kl)


def test_the_parts_of_the_page_add_up() -> None:
    torch.testing.assert_close(of_whole_completions(), at_each_position(forward) + of_later(forward))
    assert of_later(forward).abs().max() > 1e-2


@pytest.mark.field("num/7")
@pytest.mark.parametrize("name", IN_LOSS)
def test_in_the_loss_each_estimator_has_the_gradient_of_the_page(name: str) -> None:
    kl = KL(beta=1.0, kl_loss_type=name)  # type: ignore[arg-type]

    def mean_over_completions(logps: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for completion in COMPLETIONS:
            if kl.is_exact_in_loss:
                cost = full_kl(logps, REFERENCE)[positions(completion[0])]
            else:
                cost = kl.per_token(of_tokens(logps, completion), of_tokens(REFERENCE, completion))
            total = total + probability(logps, completion).detach() * cost.sum()
        return total

    page = {"low_var_kl": at_each_position(backward), "abs": at_each_position(absolute)}
    torch.testing.assert_close(gradient(mean_over_completions), page.get(name, at_each_position(forward)))


@pytest.mark.field("num/7")
@pytest.mark.parametrize("name", IN_REWARD)
def test_in_the_reward_each_estimator_has_the_gradient_of_the_page(name: str) -> None:
    kl = KL(use_kl_in_reward=True, kl_penalty=name)  # type: ignore[arg-type]

    def policy_gradient(logps: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for completion in COMPLETIONS:
            tokens = of_tokens(logps, completion)
            if kl.is_exact_in_reward:
                cost = full_kl(logps, REFERENCE)[positions(completion[0])].detach()
            else:
                cost = kl.in_reward(tokens, of_tokens(REFERENCE, completion))
            assert not cost.requires_grad
            total = total + probability(logps, completion).detach() * cost.sum() * tokens.sum()
        return total

    own, later = at_each_position, of_later
    page = {
        "kl": of_whole_completions(),
        "mse": own(mean_square) - own(forward) + later(mean_square),
        "low_var_kl": own(forward) - own(backward) + later(forward),
        "full": later(forward),
    }
    torch.testing.assert_close(gradient(policy_gradient), page[name])


@pytest.mark.field("num/7")
def test_k1_in_the_loss_is_refused_and_the_way_out_is_named() -> None:
    with pytest.raises(ConfigError, match=r"algo\.kl\.kl_loss_type .*'kl\+'"):
        KL(beta=0.1, kl_loss_type="kl")


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
