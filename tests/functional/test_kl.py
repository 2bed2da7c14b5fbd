"""KL estimators: values near and far from zero, and whose gradient each one has."""

import pytest
import torch
from torch import Tensor

from lit_rl.functional.kl import (
    ESTIMATORS,
    LOW_VAR_KL_BOUND,
    adapted_coef,
    full_kl,
    k1,
    k2,
    k3,
    k_abs,
    kl_in_reward,
    straight_through,
    token_logps_and_kl,
)
from lit_rl.functional.logps import Head
from lit_rl.functional.masking import clamped_frac

POLICY = torch.tensor([0.5, 0.3, -0.9], dtype=torch.float64)
REFERENCE = torch.tensor([-0.2, 0.6, 0.1], dtype=torch.float64).log_softmax(-1)


def test_the_estimators_by_hand() -> None:
    logps, ref = torch.tensor([[-1.0]]), torch.tensor([[-3.0]])  # d = 2
    assert k1(logps, ref).item() == 2.0
    assert k_abs(ref, logps).item() == 2.0
    assert k2(logps, ref).item() == 2.0
    assert k3(logps, ref).item() == pytest.approx(2 - 1 + 0.1353352832, rel=1e-6)


@pytest.mark.field("num/6")
@pytest.mark.parametrize(
    ("d", "value", "tolerance"), [(1e-6, 5e-13, 0.15), (1e-4, 5e-9, 0.01), (1e-3, 5e-7, 0.01)]
)
@pytest.mark.parametrize("sign", [1, -1])
def test_the_low_variance_estimator_is_right_near_zero(
    d: float, value: float, tolerance: float, sign: int
) -> None:
    estimate = k3(torch.zeros(1), torch.tensor([sign * d]))
    assert estimate.dtype == torch.float32
    assert estimate.item() == pytest.approx(value, rel=tolerance)


@pytest.mark.field("num/6")
@pytest.mark.parametrize("d", [200.0, -200.0])
def test_the_low_variance_estimator_is_finite_far_away(d: float) -> None:
    logps = torch.zeros(1, requires_grad=True)
    estimate = k3(logps, torch.tensor([d]))
    estimate.backward()
    assert estimate.isfinite() and logps.grad is not None and logps.grad.isfinite()
    assert clamped_frac(estimate, torch.ones(1), bound=LOW_VAR_KL_BOUND) == 1.0


@pytest.mark.field("num/6")
def test_the_low_variance_estimator_is_never_negative_and_smooth_at_the_seam() -> None:
    d = torch.cat([torch.linspace(-3, 3, 6001), torch.logspace(-8, -1, 500)])
    estimate = k3(torch.zeros_like(d), d)
    assert bool((estimate >= 0).all())
    exact = torch.expm1(d.double()) - d.double()
    torch.testing.assert_close(estimate.double(), exact.clamp(max=10), rtol=1e-5, atol=1e-16)


@pytest.mark.field("num/6")
def test_half_precision_inputs_are_promoted() -> None:
    logps, ref = torch.tensor([-1.0], dtype=torch.bfloat16), torch.tensor([-1.0078125], dtype=torch.bfloat16)
    assert k3(logps, ref).dtype == torch.float32
    assert k3(logps, ref).item() == pytest.approx(0.0078125**2 / 2, rel=0.01)


def expected_gradient(estimator) -> Tensor:
    """Gradient of the estimator inside a loss, averaged over samples of the policy: exact, token by token."""
    theta = POLICY.clone().requires_grad_()
    logps = theta.log_softmax(-1)
    loss = (logps.exp().detach() * estimator(logps, REFERENCE)).sum()
    return torch.autograd.grad(loss, theta)[0]


def gradient_of_kl(is_forward: bool) -> Tensor:
    theta = POLICY.clone().requires_grad_()
    logps = theta.log_softmax(-1)
    kl = full_kl(logps, REFERENCE) if is_forward else full_kl(REFERENCE, logps)
    return torch.autograd.grad(kl, theta)[0]


@pytest.mark.field("num/7")
def test_k1_in_the_loss_has_no_expected_gradient() -> None:
    assert expected_gradient(k1).abs().max() < 1e-12


@pytest.mark.field("num/7")
@pytest.mark.parametrize("name", ["mse", "kl+", "abs+", "mse+", "low_var_kl+"])
def test_k2_and_the_plus_names_have_the_gradient_of_policy_to_reference(name: str) -> None:
    torch.testing.assert_close(expected_gradient(ESTIMATORS[name]), gradient_of_kl(is_forward=True))


@pytest.mark.field("num/7")
def test_k3_has_the_gradient_of_reference_to_policy() -> None:
    torch.testing.assert_close(expected_gradient(k3), gradient_of_kl(is_forward=False))


@pytest.mark.field("num/7")
def test_k1_in_the_reward_has_the_gradient_of_policy_to_reference() -> None:
    theta = POLICY.clone().requires_grad_()
    logps = theta.log_softmax(-1)
    reward = kl_in_reward(torch.zeros(1, 3), k1(logps, REFERENCE)[None], torch.ones(1, 3), coef=1.0)
    loss = -(logps.exp().detach() * reward[0] * logps).sum()  # policy gradient
    torch.testing.assert_close(torch.autograd.grad(loss, theta)[0], gradient_of_kl(is_forward=True))


def test_a_plus_name_has_the_value_of_its_estimator() -> None:
    logps, ref = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-3.0, -1.5]])
    torch.testing.assert_close(straight_through(k3)(logps, ref), k3(logps, ref))


def test_the_exact_kl_by_hand() -> None:
    p, q = torch.tensor([0.5, 0.5]), torch.tensor([0.25, 0.75])
    # 0.5 ln 2 + 0.5 ln(2/3)
    assert full_kl(p.log(), q.log()).item() == pytest.approx(0.1438410362, rel=1e-6)


def test_the_penalty_stays_off_masked_tokens() -> None:
    penalty = torch.tensor([[1.0, torch.nan]])
    rewards = kl_in_reward(torch.tensor([[0.0, 2.0]]), penalty, torch.tensor([[1, 0]]), coef=0.1)
    assert rewards.tolist() == [[pytest.approx(-0.1), 2.0]]


def test_the_adaptive_weight_moves_by_at_most_a_fifth_per_horizon() -> None:
    settings = {"target_kl": 0.1, "horizon": 100.0, "rows": 50}
    assert adapted_coef(0.2, 0.1, **settings) == pytest.approx(0.2)
    assert adapted_coef(0.2, 10.0, **settings) == pytest.approx(0.2 * 1.1)
    assert adapted_coef(0.2, 0.0, **settings) == pytest.approx(0.2 * 0.9)


def vocabulary(seed: int, scale: float = 1.0, **options) -> Tensor:
    return scale * torch.randn(5, 7, generator=torch.Generator().manual_seed(seed), **options)


@pytest.mark.parametrize("chunk_tokens", [1, 2, 5, 64])
def test_the_exact_kl_by_chunks_has_the_value_and_gradient_of_the_plain_form(chunk_tokens: int) -> None:
    hidden, weight = vocabulary(0, dtype=torch.float64), vocabulary(1, dtype=torch.float64)[:, :7]
    weight = torch.cat([weight, 2 * weight])  # (V=10, H=7)
    ref_hidden, ref_weight = vocabulary(2, dtype=torch.float64), weight.flip(0) + 0.1
    targets = torch.tensor([0, 3, 9, 2, 4])

    def both(function) -> tuple[Tensor, ...]:
        inputs = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        logps, entropy, kl = function(*inputs)
        mixed = (logps + 2 * entropy + 3 * kl * torch.arange(5)).sum()
        return (logps, entropy, kl, *torch.autograd.grad(mixed, inputs))

    def plain(own: Tensor, head: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logps = (own @ head.T / 0.7).log_softmax(-1)
        ref_logps = (ref_hidden @ ref_weight.T / 0.7).log_softmax(-1)
        entropy = -(logps.exp() * logps).sum(-1)
        return logps[torch.arange(5), targets], entropy, (logps.exp() * (logps - ref_logps)).sum(-1)

    def chunked(own: Tensor, head: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        settings = {"temperature": 0.7, "chunk_tokens": chunk_tokens}
        return token_logps_and_kl(
            own, Head(head), ref_hidden, Head(ref_weight), targets, entropy_gradient=True, **settings
        )

    for found, expected in zip(both(chunked), both(plain), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.field("num/6")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_exact_kl_is_finite_at_extreme_ratios_and_so_is_its_gradient(dtype: torch.dtype) -> None:
    scores = torch.tensor([[200.0, 0.0, -200.0], [0.0, 0.0, 0.0]], dtype=dtype).requires_grad_()
    ref = torch.tensor([[-200.0, 0.0, 200.0], [0.0, -300.0, 0.0]], dtype=dtype)
    kl = full_kl(scores.log_softmax(-1), ref.log_softmax(-1))
    gradient = torch.autograd.grad(kl.sum(), scores)[0]
    assert kl.dtype == torch.float32 and kl[0] == 400 and kl.isfinite().all() and gradient.isfinite().all()


def test_a_token_that_the_policy_never_takes_costs_nothing() -> None:
    scores = torch.tensor([0.0, 1.0, -torch.inf], requires_grad=True)
    kl = full_kl(scores.log_softmax(-1), torch.tensor([0.5, 0.2, 0.3]).log())
    p = torch.tensor([1.0, torch.e]) / (1 + torch.e)
    torch.testing.assert_close(kl, (p * (p.log() - torch.tensor([0.5, 0.2]).log())).sum())
    assert torch.autograd.grad(kl, scores)[0].isfinite().all()
