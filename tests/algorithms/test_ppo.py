"""PPO in a real step: what the critic learns, when the policy moves, and what a checkpoint holds."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from stored_rollouts import constant_rate

from lit_rl.algorithms.grpo import GRPO
from lit_rl.algorithms.ppo import PPO
from lit_rl.batch import RolloutBatch
from lit_rl.errors import ConfigError
from lit_rl.functional.advantages import gae, terminal_rewards
from lit_rl.models.critic import ValueModel
from lit_rl.objectives.advantage import Advantage
from lit_rl.objectives.batch_plan import BatchPlan
from lit_rl.objectives.kl import KL, KLControl
from lit_rl.objectives.policy import ClippedSurrogate
from lit_rl.objectives.value import Critic
from lit_rl.rollout.sampling import Sampling

GAE = Advantage(adv_estimator="gae", gamma=0.9, lam=0.8)


@pytest.fixture
def critic(tiny_policy: Callable) -> Callable[..., Critic]:
    def build(head: float = 0.3, rate: float = 0.1, **settings: object) -> Critic:
        model = ValueModel(tiny_policy(seed=1, dtype=torch.float64))
        torch.manual_seed(2)
        torch.nn.init.normal_(model.head.weight, std=head)
        return Critic(
            model=model,
            optim=partial(torch.optim.SGD, lr=rate),
            schedule=constant_rate,
            **{"max_grad_norm": 0.0, **settings},  # type: ignore[arg-type]
        )

    return build


@pytest.fixture
def ppo(tiny_policy: Callable, plain_sgd: dict, critic: Callable) -> Callable[..., PPO]:
    def build(**settings: object) -> PPO:
        return PPO(
            policy=tiny_policy(dtype=torch.float64),
            **{
                **plain_sgd,
                "critic": settings.pop("critic", None) or critic(),
                "advantage": GAE,
                "sampling": Sampling(max_completion_length=6),
                "num_generations": 4,
                "max_grad_norm": 0.0,
                **settings,
            },  # type: ignore[arg-type]
        )

    return build


def weights(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def is_same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_the_step_is_gae_a_clipped_ratio_and_a_squared_error(
    ppo: Callable, train: Callable, with_prompts: Callable, critic: Callable
) -> None:
    """Against the critic's loss written out and differentiated anew."""
    batch: RolloutBatch = with_prompts()
    module = train(ppo(), [batch])
    rollout, mask = module.last_rollout, batch.completion_mask
    fresh = critic().model
    values = fresh(rows(rollout))
    torch.testing.assert_close(rollout.values, values.detach(), rtol=0, atol=1e-12)
    rewards = terminal_rewards(batch.rewards, batch.completion_len, mask.shape[1])
    advantages, returns = gae(rewards, values, mask, gamma=0.9, lam=0.8)
    torch.testing.assert_close(rollout.advantages.double(), advantages.double(), rtol=0, atol=1e-6)
    torch.testing.assert_close(rollout.returns, returns, rtol=0, atol=1e-12)
    assert rollout.advantages[mask].mean().abs() < 1e-6
    loss = (0.5 * (values - returns).square())[mask].mean()
    loss.backward()
    for (name, start), now in zip(fresh.named_parameters(), module.critic.parameters(), strict=True):
        torch.testing.assert_close(now, start - 0.1 * start.grad, rtol=0, atol=1e-10, msg=name)
    assert module.metrics["train/value_loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert module.metrics["train/loss"] == pytest.approx(
        module.metrics["train/policy_loss"] + loss.item(), rel=1e-6
    )
    spread, missed = returns[mask].var(unbiased=False), (returns - values)[mask].var(unbiased=False)
    assert module.metrics["train/explained_variance"] == pytest.approx((1 - missed / spread).item(), rel=1e-6)
    assert module.metrics["train/value_mean"] == pytest.approx(values[mask].mean().item(), rel=1e-6)


def rows(batch: RolloutBatch):  # type: ignore[no-untyped-def]
    from lit_rl.algorithms.ppo import rows_of

    return rows_of(batch)


def test_warm_up_leaves_the_policy_as_it_is_and_trains_the_critic(
    ppo: Callable, train: Callable, tiny_policy: Callable, with_prompts: Callable, critic: Callable
) -> None:
    start, first = weights(tiny_policy(dtype=torch.float64)), weights(critic().model)
    batch = with_prompts()
    module = train(ppo(critic=critic(critic_warmup=2)), [batch, batch])
    assert is_same(weights(module.policy), start) and not is_same(weights(module.critic), first)
    assert module.optimizer_steps == module.policy_version == 0
    assert module.metrics["train/grad_norm"] == 0 < module.metrics["train/critic_grad_norm"]
    again = train(ppo(critic=critic(critic_warmup=2)), [batch] * 3)
    assert not is_same(weights(again.policy), start) and again.optimizer_steps == 1


def test_the_policy_s_optimizer_is_untouched_by_warm_up(
    ppo: Callable, train: Callable, tiny_policy: Callable, with_prompts: Callable, critic: Callable
) -> None:
    """Neither weight decay nor moments move, so that its first update is a first update."""
    adam = partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.5)
    module = train(ppo(critic=critic(critic_warmup=1), optimizer=adam), [with_prompts()])
    assert is_same(weights(module.policy), weights(tiny_policy(dtype=torch.float64)))
    policy_optimizer, critic_optimizer = module.optimizers(use_pl_optimizer=False)
    assert not policy_optimizer.state and not any(p.grad is not None for p in module.policy.parameters())
    assert critic_optimizer.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("own", [1, 5])
def test_a_micro_batch_of_its_own_changes_nothing_for_the_critic_or_the_policy(
    own: int, ppo: Callable, train: Callable, with_prompts: Callable, critic: Callable
) -> None:
    plan = BatchPlan(optimizer_batch_size=6, micro_batch_size=4)
    settings = {"batch": plan, "num_iterations": 2, "policy_loss": ClippedSurrogate(loss_type="grpo")}
    joint = train(ppo(**settings), [with_prompts()])
    apart = train(ppo(critic=critic(micro_batch_size=own), **settings), [with_prompts()])
    for one, other in zip(weights(joint), weights(apart), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)
    for name in ("train/loss", "train/value_loss", "train/policy_loss", "train/value_clip_frac"):
        assert joint.metrics[name] == pytest.approx(apart.metrics[name], rel=1e-9), name


def test_values_move_by_the_clip_range_only_where_that_makes_the_error_smaller(
    ppo: Callable, train: Callable, with_prompts: Callable, critic: Callable
) -> None:
    """Several updates per step: the bound is around the values before the first."""
    plain, clipped = (
        train(ppo(critic=critic(cliprange_value=bound, rate=1.0), num_iterations=4), [with_prompts()])
        for bound in (None, 1e-3)
    )
    assert plain.metrics["train/value_clip_frac"] == 0 < clipped.metrics["train/value_clip_frac"] < 1
    assert not is_same(weights(plain.critic), weights(clipped.critic))


def test_each_network_s_gradient_is_capped_by_itself(
    ppo: Callable, train: Callable, with_prompts: Callable, critic: Callable
) -> None:
    free = train(ppo(), [with_prompts()])
    held = train(ppo(critic=critic(max_grad_norm=1e-3)), [with_prompts()])
    assert is_same(weights(free.policy), weights(held.policy))
    moved = [a - b for a, b in zip(weights(held.critic), weights(critic().model), strict=True)]
    norm = torch.stack([part.square().sum() for part in moved]).sum().sqrt()
    assert norm.item() == pytest.approx(0.1 * 1e-3, rel=1e-3)


def test_the_value_loss_is_weighed(
    ppo: Callable, train: Callable, with_prompts: Callable, critic: Callable
) -> None:
    one, three = (train(ppo(critic=critic(value_loss_coef=c)), [with_prompts()]) for c in (1.0, 3.0))
    for start, a, b in zip(weights(critic().model), weights(one.critic), weights(three.critic), strict=True):
        torch.testing.assert_close(3 * (a - start), b - start, rtol=0, atol=1e-6)  # norms are in float32
    assert is_same(weights(one.policy), weights(three.policy))


def test_the_kl_comes_off_each_token_s_reward(ppo: Callable, train: Callable, with_prompts: Callable) -> None:
    kl = KL(use_kl_in_reward=True, kl_ctrl=KLControl("adaptive", kl_coef=0.5, horizon=20))
    batch = with_prompts()
    module = train(ppo(kl=kl), [batch, batch])
    rollout, mask = module.last_rollout, batch.completion_mask
    cost = (rollout.old_logps - rollout.ref_logps) * mask
    assert cost.abs().max() > 1e-3 and module.metrics["train/kl_coef"] != 0.5
    rewards = terminal_rewards(batch.rewards, batch.completion_len, mask.shape[1])
    rewards = rewards - module.metrics["train/kl_coef"] * cost
    returns = gae(rewards, rollout.values, mask, gamma=0.9, lam=0.8).returns
    torch.testing.assert_close(rollout.returns, returns, rtol=0, atol=1e-6)


def test_rows_without_a_reward_teach_neither(ppo: Callable, train: Callable, with_prompts: Callable) -> None:
    without, masked = with_prompts(), with_prompts()
    without.rewards[5] = torch.nan
    masked.completion_mask[5] = False
    one, other = (weights(train(ppo(), [batch])) for batch in (without, masked))
    assert is_same(one, other)


def test_both_networks_stay_where_they_were_when_an_update_is_not_finite(
    ppo: Callable, train: Callable, tiny_policy: Callable, with_prompts: Callable, critic: Callable
) -> None:
    broken = critic()
    with torch.no_grad():
        broken.model.head.bias.fill_(torch.nan)
    module = train(ppo(critic=broken, on_nonfinite="skip"), [with_prompts()])
    assert module.metrics["train/skipped_updates"] == 1 and module.optimizer_steps == 0
    assert is_same(weights(module.policy), weights(tiny_policy(dtype=torch.float64)))
    with pytest.raises(FloatingPointError, match=r"the policy's .* and the critic's nan at step 1"):
        train(ppo(critic=broken), [with_prompts()])


def test_critic_and_estimator_need_each_other(ppo: Callable, tiny_policy: Callable, plain_sgd: dict) -> None:
    with pytest.raises(ConfigError, match=r"adv_estimator must be 'gae' for PPO \(found 'grpo'\)"):
        ppo(advantage=Advantage())
    with pytest.raises(ConfigError, match=r"'gae' needs a critic, which only algo=ppo has"):
        GRPO(policy=tiny_policy(), advantage=GAE, **plain_sgd)


def test_a_critic_with_another_vocabulary_is_refused(
    ppo: Callable, tiny_policy: Callable, critic: Callable
) -> None:
    other = critic()
    other.model.backbone.set_input_embeddings(torch.nn.Embedding(64, 32))
    with pytest.raises(ConfigError, match=r"algo\.critic\.model\.path .* 103 tokens \(found 64\)"):
        ppo(critic=other)


def test_a_critic_learns_the_returns(
    ppo: Callable, train: Callable, with_prompts: Callable, critic: Callable
) -> None:
    """Alone, on one rollout again and again: it explains all but what tokens after the same prompt share."""
    adam = Critic(
        model=critic(head=0.0).model,
        optim=partial(torch.optim.Adam, lr=3e-3),
        schedule=constant_rate,
        critic_warmup=60,
    )
    module = train(ppo(critic=adam, advantage=Advantage(adv_estimator="gae")), [with_prompts()] * 60)
    assert module.metrics["train/explained_variance"] > 0.7
