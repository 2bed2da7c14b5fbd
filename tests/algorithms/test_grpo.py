"""GRPO in a real step: KL in the reward, mismatch of the engine, picked tokens, and what is refused."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from lit_rl.algorithms.grpo import GRPO
from lit_rl.errors import ConfigError
from lit_rl.objectives.advantage import Advantage, ScoredRows
from lit_rl.objectives.covariance_losses import ClipCov
from lit_rl.objectives.kl import KL, KLControl
from lit_rl.objectives.rollout_correction import RolloutCorrection
from lit_rl.rollout.sampling import Sampling

ADAPTIVE = KL(use_kl_in_reward=True, kl_ctrl=KLControl("adaptive", kl_coef=0.5, horizon=20))


@pytest.fixture
def grpo(tiny_policy: Callable, plain_sgd: dict) -> Callable[..., GRPO]:
    def build(**settings: object) -> GRPO:
        sampling = Sampling(max_completion_length=6)
        return GRPO(
            policy=tiny_policy(dtype=torch.float64),
            **plain_sgd,
            **{"sampling": sampling, "num_generations": 4, **settings},  # type: ignore[arg-type]
        )

    return build


@pytest.mark.field("num/4")
@pytest.mark.parametrize("name", ["grpo", "grpo_passk", "rloo", "opo", "reinforce_plus_plus_baseline"])
def test_groups_of_one_are_refused_by_the_estimator_s_name(grpo: Callable, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"num_generations must be >= 2 .*'{name}'"):
        grpo(advantage=Advantage(adv_estimator=name), num_generations=1)  # type: ignore[arg-type]


@pytest.mark.field("num/4")
def test_reinforce_plus_plus_trains_on_single_completions(
    grpo: Callable, train: Callable, with_prompts: Callable
) -> None:
    batch = with_prompts(P=2, G=1)
    batch.rewards = torch.tensor([1.0, 0.0])
    module = grpo(advantage=Advantage(adv_estimator="reinforce_plus_plus"), num_generations=1)
    train(module, [batch])
    assert module.last_rollout.advantages[:, 0].ne(0).all()
    assert module.metrics["train/grad_norm"] > 0


def test_no_estimator_is_refused_where_the_policy_loss_counts(grpo: Callable) -> None:
    with pytest.raises(ConfigError, match=r"adv_estimator must not be 'none'"):
        grpo(advantage=Advantage(adv_estimator="none"))


def test_the_kl_of_a_row_comes_off_its_reward_and_the_reward_itself_stays(
    grpo: Callable, train: Callable, with_prompts: Callable
) -> None:
    batch = with_prompts()
    module = train(grpo(kl=ADAPTIVE, advantage=Advantage(scale_rewards="none")), [batch, batch])
    rollout = module.last_rollout
    assert torch.equal(rollout.rewards, batch.rewards)
    cost = ((rollout.old_logps - rollout.ref_logps) * rollout.completion_mask).sum(1)
    assert cost.abs().max() > 1e-3  # the first step has moved the policy away from its reference
    # no KL in the first step: the error is clipped at -0.2, with 12 rows over a horizon of 20
    weight = 0.5 * (1 - 0.2 * 12 / 20)
    assert module.metrics["train/kl_coef"] == pytest.approx(weight, rel=1e-6)
    shaped = (batch.rewards - weight * cost).view(-1, 4)
    expected = (shaped - shaped.mean(1, keepdim=True)).flatten()
    torch.testing.assert_close(rollout.advantages, expected, rtol=1e-5, atol=1e-6)


def test_the_weight_of_the_kl_is_in_the_checkpoint(
    grpo: Callable, train: Callable, with_prompts: Callable
) -> None:
    module = train(grpo(kl=ADAPTIVE), [with_prompts()])
    checkpoint = {"state_dict": {}}
    module.on_save_checkpoint(checkpoint)
    again = grpo(kl=ADAPTIVE)
    again.on_load_checkpoint(checkpoint)
    assert again.kl_coef.value == module.kl_coef.value != 0.5
    assert "kl_coef" not in grpo(kl=KL(use_kl_in_reward=True)).stateful  # a fixed one does not move


def test_without_the_engine_s_log_probabilities_a_correction_says_what_to_set(
    grpo: Callable, train: Callable, with_prompts: Callable
) -> None:
    batch = with_prompts()
    batch.rollout_logps = None
    correction = RolloutCorrection(rollout_is=True, rollout_is_threshold=2.0)
    with pytest.raises(ConfigError, match=r"rollout\.calculate_log_probs=true"):
        train(grpo(rollout_correction=correction), [batch])


BOUNDED = RolloutCorrection(rollout_is=True, rollout_is_threshold=1.5)
BEFORE = replace(
    BOUNDED, rollout_is_veto_threshold=1e-30
)  # may reject rows, so that it has a pass of its own


def test_a_correction_that_rejects_nothing_takes_no_pass_of_its_own(
    grpo: Callable, train: Callable, with_prompts: Callable
) -> None:
    without, with_pass = (train(grpo(rollout_correction=c), [with_prompts()]) for c in (BOUNDED, BEFORE))
    assert without.last_rollout.old_logps is None
    assert with_pass.last_rollout.old_logps is not None
    for name in ("train/loss", "train/grad_norm"):
        assert without.metrics[name] == pytest.approx(with_pass.metrics[name], rel=1e-6), name
    for ours, theirs in zip(without.policy.parameters(), with_pass.policy.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-8)


def test_the_mismatch_is_measured(grpo: Callable, train: Callable, with_prompts: Callable) -> None:
    batch = with_prompts()
    module = train(grpo(rollout_correction=BEFORE), [batch])
    metrics, rollout, mask = module.metrics, module.last_rollout, batch.completion_mask
    log_ratio = (rollout.old_logps - batch.rollout_logps)[mask]
    weights = log_ratio.exp().clamp(max=1.5)
    ess = weights.sum() ** 2 / weights.square().sum() / len(weights)
    expected = {
        "kl": (log_ratio.exp() - 1 - log_ratio).mean(),
        "touched_frac": (log_ratio.exp() > 1.5).double().mean(),
        "max_ratio": log_ratio.exp().max(),
        "effective_sample_frac": ess,
    }
    for name, value in expected.items():
        assert metrics[f"rollout_is/{name}"] == pytest.approx(value.item(), rel=1e-6), name


def test_an_unbounded_correction_warns(grpo: Callable) -> None:
    with pytest.warns(UserWarning, match="rollout_is_threshold is null"):
        grpo(rollout_correction=RolloutCorrection(rollout_is=True))


def test_noise_belongs_to_the_completion(grpo: Callable, train: Callable, with_prompts: Callable) -> None:
    """The rows of one prompt draw the same numbers whatever stands beside them."""
    batch = with_prompts()
    settings = {"policy_loss": ClipCov(cov_low=0.0, cov_ratio=0.3)}
    whole = train(grpo(**settings), [batch])
    part = train(grpo(**settings), [batch.select(slice(4, 8))])
    assert torch.equal(whole.last_rollout.noise[4:8], part.last_rollout.noise)
    assert whole.last_rollout.noise.unique().numel() == whole.last_rollout.noise.numel()


def test_remax_credits_the_return_against_the_greedy_completion(
    grpo: Callable, train: Callable, with_prompts: Callable
) -> None:
    batch = with_prompts()
    batch.baselines[:4] = torch.nan  # a prompt whose greedy completion has no reward
    module = train(grpo(advantage=Advantage(adv_estimator="remax"), num_generations=4), [batch])
    mask = batch.completion_mask
    expected = (batch.rewards - batch.baselines).nan_to_num()[:, None] * mask
    torch.testing.assert_close(module.last_rollout.advantages.float(), expected.float())
    assert (expected != 0).any()


def test_remax_without_baselines_says_what_is_missing(
    grpo: Callable, train: Callable, with_prompts: Callable
) -> None:
    batch = with_prompts()
    batch.baselines = None
    with pytest.raises(ConfigError, match=r"'remax' needs the reward of a greedy completion"):
        train(grpo(advantage=Advantage(adv_estimator="remax")), [batch])


@pytest.mark.field("num/3")
@pytest.mark.parametrize("name", ["grpo", "grpo_passk", "rloo", "opo", "gpg"])
@pytest.mark.parametrize("reward", [0.35, 1.0, -7.3])
def test_groups_of_equal_rewards_get_exactly_nothing(name: str, reward: float) -> None:
    rewards = torch.full((7,), reward)
    mask = torch.ones(7, 2, dtype=torch.bool)
    rows = ScoredRows(rewards, torch.arange(7) + 1, mask, torch.zeros(7, 2))
    advantages = Advantage(adv_estimator=name)(rows, 7)  # type: ignore[arg-type]
    assert advantages.eq(0).all()
