"""What each estimator estimates, over every batch that a policy of seven completions can write.

Exact sums in float64: an unbiased estimator is so to 1e-12, a biased one by what the page says.
"""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from benchmarks.oracle import SUM, by, critic, greedy_baseline, table, unscaled_passk
from enumerated_policy import (
    THETA,
    Credit,
    Estimate,
    G,
    T,
    all_batches,
    estimate,
    expected_best,
    expected_reward,
    gradient_of,
    gradients,
    probabilities,
)

from lit_rl.objectives.policy import GPG, ClippedSurrogate, PolicyLoss
from lit_rl.objectives.ratio_losses import CISPO, SAPO, GeoMean

README = Path(__file__).resolve().parents[2] / "lit_rl" / "functional" / "README.md"
TRUTH = gradient_of(expected_reward)


def found(credit: Credit, loss_type: str = SUM) -> Estimate:
    return estimate(credit, ClippedSurrogate(loss_type=loss_type))  # type: ignore[arg-type]


def test_the_batches_are_all_there() -> None:
    batches, weights = all_batches()
    assert batches.shape == (44100, 2, 4)
    assert float(weights.sum()) == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize(
    "credit", [by("rloo"), by("reinforce_plus_plus", "batch")], ids=["rloo", "reinforce_plus_plus"]
)
def test_drawn_batches_agree_within_their_standard_error(credit: Credit) -> None:
    """The rows in any order, and without the weights that the sums use."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.multinomial(
        probabilities(THETA), 20_000 * G, replacement=True, generator=generator
    )  # (P, N * G)
    batches = drawn.view(2, -1, G).transpose(0, 1)
    loss = ClippedSurrogate(loss_type=SUM)
    sampled = gradients(credit, loss, batches)
    errors = (sampled.mean(0) - estimate(credit, loss).mean) / (sampled.std(0) / len(sampled) ** 0.5)
    assert errors.abs().max() < 4


@pytest.mark.parametrize(
    "credit",
    [
        by("reward"),
        by("rloo"),
        greedy_baseline,
        critic(1.0),
        critic(0.5),
        critic(0.0),
        critic(1.0, share=0.5),
        critic(1.0, share=0.0),
    ],
    ids=["reward", "rloo", "remax", "gae_1", "gae_05", "gae_0", "gae_1_half_critic", "gae_1_no_critic"],
)
def test_unbiased(credit: Credit) -> None:
    assert found(credit).bias(TRUTH) < 1e-12


def test_a_mean_that_holds_the_row_itself_shrinks_the_gradient() -> None:
    """(G - 1) / G, in the right direction."""
    torch.testing.assert_close(found(by("grpo")).mean, TRUTH * (G - 1) / G, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    ("credit", "cosine"),
    [
        (by("grpo", "group"), 0.99223),
        (by("rloo", "group"), 0.99223),
        (by("grpo", "batch"), 0.99639),
        (by("opo"), 0.99755),
        (by("gpg", "group"), 0.99000),
        (by("reinforce_plus_plus", "batch"), 0.99342),
        (by("reinforce_plus_plus"), 0.99906),
        (by("reinforce_plus_plus_baseline", "batch"), 0.99735),
        (critic(0.0, share=0.5), 0.94306),
        (critic(1.0, whiten=True), 0.99852),
    ],
    ids=[
        "grpo_group",
        "rloo_group",
        "grpo_batch",
        "opo",
        "gpg",
        "reinforce_plus_plus",
        "reinforce_plus_plus_none",
        "reinforce_plus_plus_baseline",
        "gae_0_half_critic",
        "gae_whitened",
    ],
)
def test_biased_in_direction(credit: Credit, cosine: float) -> None:
    assert found(credit).cosine(TRUTH) == pytest.approx(cosine, abs=5e-5)


def test_the_average_of_a_loss_has_a_bias_of_its_own() -> None:
    """Under an unbiased estimator: a constant length only scales, the row's own length turns the gradient."""
    by_constant, by_tokens, by_row = (found(by("rloo"), name) for name in ("dr_grpo", "dapo", "grpo"))
    torch.testing.assert_close(by_constant.mean, TRUTH / T, rtol=0, atol=1e-14)
    assert 0.999 < by_tokens.cosine(TRUTH) < 1 - 1e-4
    assert 0.95 < by_row.cosine(TRUTH) < 0.97


def test_pass_at_k_credit_estimates_the_best_of_a_group() -> None:
    """Without a scale, exactly; the group's deviation turns it."""
    truth = gradient_of(expected_best) / G
    assert found(unscaled_passk).bias(truth) < 1e-12
    assert found(unscaled_passk).cosine(TRUTH) < 0.9
    assert found(by("grpo_passk", "group")).cosine(truth) == pytest.approx(0.97902, abs=5e-5)


def test_a_better_baseline_has_less_noise() -> None:
    credits = [by("reward"), by("rloo"), greedy_baseline, critic(1.0), critic(0.0)]
    noise = [found(credit).noise for credit in credits]
    assert all(more > less for more, less in pairwise(noise)), noise


@pytest.mark.parametrize(
    "loss",
    [GPG(loss_type=SUM), CISPO(loss_type=SUM), SAPO(loss_type=SUM)],
    ids=lambda loss: type(loss).__name__,
)
def test_losses_agree_on_policy(loss: PolicyLoss) -> None:
    assert estimate(by("rloo"), loss).bias(TRUTH) < 1e-12


@pytest.mark.parametrize(
    "loss",
    [GeoMean(), ClippedSurrogate(loss_type="grpo", importance_sampling_level="sequence")],
    ids=["geo_mean", "gspo"],
)
def test_a_ratio_per_row_is_a_mean_per_row_on_policy(loss: PolicyLoss) -> None:
    mean = found(by("rloo"), "grpo").mean
    torch.testing.assert_close(estimate(by("rloo"), loss).mean, mean, rtol=0, atol=1e-14)


def test_the_page_holds_the_table() -> None:
    """Made by `python tests/benchmarks/oracle.py`."""
    assert table() in README.read_text()
