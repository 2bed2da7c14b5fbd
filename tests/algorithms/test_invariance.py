"""A step's gradient does not depend on how its rows are cut, padded or ordered."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from conftest import constant_rate
from transformers import LlamaConfig, LlamaForCausalLM

from lit_rl.algorithms.base import RLModule
from lit_rl.algorithms.grpo import GRPO
from lit_rl.algorithms.ppo import PPO
from lit_rl.algorithms.sdpo import SDPO
from lit_rl.algorithms.sft import SFT
from lit_rl.batch import RolloutBatch
from lit_rl.models.critic import ValueModel
from lit_rl.objectives.advantage import ESTIMATORS, Advantage
from lit_rl.objectives.batch_plan import BatchPlan
from lit_rl.objectives.covariance_losses import ClipCov, KLCov
from lit_rl.objectives.distillation import Distillation
from lit_rl.objectives.kl import KL, KLControl
from lit_rl.objectives.policy import GPG, ClippedSurrogate, PolicyLoss
from lit_rl.objectives.ratio_losses import CISPO, SAPO, GeoMean
from lit_rl.objectives.rollout_correction import RolloutCorrection
from lit_rl.objectives.value import Critic
from lit_rl.rollout.sampling import Sampling

SAMPLING = Sampling(max_completion_length=6, temperature=0.7)


def grpo(loss_type: str, level: str = "token", **more: object) -> Callable[..., RLModule]:
    loss = ClippedSurrogate(loss_type=loss_type, importance_sampling_level=level, entropy_coeff=0.01)  # type: ignore[arg-type]

    def build(**base: object) -> RLModule:
        return GRPO(policy_loss=loss, kl=KL(beta=0.1), sampling=SAMPLING, num_generations=4, **more, **base)

    return build


def policy(
    loss: PolicyLoss | None = None, estimator: str = "grpo", **more: object
) -> Callable[..., RLModule]:
    """Two passes, so that the ratio moves; an estimator over groups or tokens."""
    advantage = Advantage(adv_estimator=estimator, gamma=0.9)  # type: ignore[arg-type]
    settings = {"kl": KL(beta=0.1, kl_loss_type="kl+"), "num_iterations": 2, **more}

    def build(**base: object) -> RLModule:
        return GRPO(
            policy_loss=loss or ClippedSurrogate(entropy_coeff=0.01),
            advantage=advantage,
            sampling=SAMPLING,
            num_generations=4,
            **settings,
            **base,
        )

    return build


def corrected(threshold: float = 1.5, **settings: object) -> RolloutCorrection:
    return RolloutCorrection(rollout_is=True, rollout_is_threshold=threshold, **settings)  # type: ignore[arg-type]


def sdpo(
    weight: float = 1.0, correction: RolloutCorrection | None = None, **settings: object
) -> Callable[..., RLModule]:
    distillation = Distillation(distillation_weight=weight, **settings)  # type: ignore[arg-type]

    def build(**base: object) -> RLModule:
        return SDPO(
            distillation=distillation,
            rollout_correction=correction,
            sampling=SAMPLING,
            num_generations=4,
            **base,
        )

    return build


def ppo(loss: PolicyLoss | None = None, **more: object) -> Callable[..., RLModule]:
    """Two passes, so that ratio and values move."""

    def build(**base: object) -> RLModule:
        settings = {
            "critic": critic(),
            "advantage": Advantage(adv_estimator="gae", gamma=0.9, lam=0.8),
            "policy_loss": loss or ClippedSurrogate(entropy_coeff=0.01),
            "sampling": SAMPLING,
            "num_generations": 4,
            "num_iterations": 2,
        }
        return PPO(**{**settings, **more, **base})  # type: ignore[arg-type]

    return build


def critic() -> Critic:
    """A value model of its own, with a head that is not zero."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        initializer_range=0.2,
        pad_token_id=0,
    )
    model = ValueModel(LlamaForCausalLM(config).double())
    torch.nn.init.normal_(model.head.weight)
    rate = partial(torch.optim.SGD, lr=0.1)
    return Critic(model=model, optim=rate, schedule=constant_rate, max_grad_norm=0.0, cliprange_value=0.05)


CASES = {
    "sft": lambda **base: SFT(**base),
    "grpo": grpo("grpo"),
    "dapo": grpo("dapo"),
    "dr_grpo": grpo("dr_grpo"),
    "seq_mean_token_sum": grpo("seq_mean_token_sum"),
    "gspo": grpo("grpo", level="sequence"),
    "two_iterations": grpo("dapo", num_iterations=2),
    "sdpo_sampled": sdpo(),
    "sdpo_full": sdpo(distillation_mode="full_logits", distillation_alpha=0.5),
    "sdpo_topk": sdpo(distillation_mode="topk_logits", distillation_topk=5, distillation_add_tail=True),
    "sdpo_mixed": sdpo(0.5),
    "sdpo_active_rows": sdpo(distillation_divisor="active_rows"),
    "sdpo_all_rows": sdpo(distillation_divisor="all_rows"),
    **{f"estimator_{name}": policy(estimator=name) for name in ESTIMATORS if name not in ("grpo", "none")},
    "gpg": policy(GPG()),
    "gpg_reinforce_plus_plus": policy(GPG(loss_type="dr_grpo"), "reinforce_plus_plus"),
    "cispo": policy(CISPO(epsilon=0.01)),
    "cispo_ratio_cap": policy(CISPO(ratio_cap=1.01, loss_type="grpo"), "reward"),
    "sapo": policy(SAPO()),
    "sapo_reward": policy(SAPO(loss_type="dapo"), "reward"),
    "geo_mean": policy(GeoMean()),
    "geo_mean_reward": policy(GeoMean(), "reward"),
    "clip_cov": policy(ClipCov(cov_low=0.0, cov_ratio=0.3)),
    "clip_cov_reinforce_plus_plus": policy(ClipCov(cov_low=0.0, cov_ratio=0.3), "reinforce_plus_plus"),
    "kl_cov": policy(KLCov(cov_ratio=0.3)),
    "kl_cov_no_kl": policy(KLCov(cov_ratio=0.3, loss_type="grpo"), "rloo", kl=KL()),
    "gspo_reward": policy(ClippedSurrogate(importance_sampling_level="sequence"), "reward"),
    **{
        f"kl_{name}": policy(kl=KL(beta=0.1, kl_loss_type=name))
        for name in ("abs", "mse", "full", "low_var_kl+")
    },
    **{
        f"kl_in_reward_{name}": policy(
            estimator=name, kl=KL(use_kl_in_reward=True, kl_ctrl=KLControl(kl_coef=0.5)), num_iterations=1
        )
        for name in ("grpo", "reinforce_plus_plus", "reward")
    },
    "kl_in_reward_full": policy(kl=KL(use_kl_in_reward=True, kl_penalty="full"), num_iterations=1),
    "truncated": policy(rollout_correction=corrected()),
    "masked": policy(rollout_correction=corrected(rollout_is_mode="mask")),
    "masked_sequence": policy(
        GeoMean(), rollout_correction=corrected(20.0, rollout_is_mode="mask", rollout_is_level="sequence")
    ),
    "vetoed": policy(
        ClippedSurrogate(loss_type="grpo"),
        rollout_correction=corrected(rollout_is_level="geometric", rollout_is_veto_threshold=0.5),
    ),
    "sdpo_corrected": sdpo(0.5, corrected(rollout_is_mode="mask")),
    "ppo": ppo(),
    **{
        f"ppo_{kind}": ppo(ClippedSurrogate(loss_type=kind))
        for kind in ("grpo", "dr_grpo", "seq_mean_token_sum")
    },
    "ppo_kl": ppo(kl=KL(beta=0.1)),
    "kl_in_reward_ppo": ppo(kl=KL(use_kl_in_reward=True, kl_ctrl=KLControl(kl_coef=0.5))),
    "ppo_masked": ppo(rollout_correction=corrected(rollout_is_mode="mask")),
    "ppo_clip_cov": ppo(ClipCov(cov_low=0.0, cov_ratio=0.3)),
}


def cut(size: int) -> BatchPlan:
    return BatchPlan(micro_batch_size=size)


@pytest.fixture
def weights_after(
    tiny_policy: Callable, train: Callable, plain_sgd: dict
) -> Callable[..., list[torch.Tensor]]:
    def run(
        build: Callable[..., RLModule], batch: RolloutBatch, plan: BatchPlan, steps: int = 1
    ) -> list[torch.Tensor]:
        policy = tiny_policy(dtype=torch.float64)
        module = build(policy=policy, batch=plan, max_grad_norm=0.0, **plain_sgd)
        train(module, [batch] * steps)
        networks = [policy, *([module.critic] if isinstance(module, PPO) else [])]
        return [p.detach().clone() for network in networks for p in network.parameters()]

    return run


def assert_equal(a: list[torch.Tensor], b: list[torch.Tensor], tolerance: float = 1e-10) -> None:
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", CASES)
def test_micro_batches_give_the_full_batch_gradient(
    name: str, weights_after: Callable, with_prompts: Callable
) -> None:
    steps = 2 if name.startswith("kl_in_reward") else 1  # the first has no KL
    whole = weights_after(CASES[name], with_prompts(), cut(12), steps)
    start = weights_after(CASES[name], with_prompts(seed=1), cut(12), steps)
    assert any((a - b).abs().max() > 1e-6 for a, b in zip(whole, start, strict=True)), (
        "the step moved nothing"
    )
    for plan in (cut(1), cut(3), cut(7), BatchPlan(micro_batch_size=None, micro_batch_tokens=25)):
        assert_equal(whole, weights_after(CASES[name], with_prompts(), plan, steps))


@pytest.mark.parametrize("name", ["grpo", "sft", "sdpo_sampled", "ppo"])
def test_padding_is_never_read(name: str, weights_after: Callable, with_prompts: Callable) -> None:
    whole = weights_after(CASES[name], with_prompts(), cut(5))
    batch = with_prompts()
    junk = torch.full((len(batch), 3), 77)
    batch.prompt_ids = torch.cat([junk, batch.prompt_ids], 1)
    batch.completion_ids = torch.cat([batch.completion_ids, junk], 1)
    batch.completion_mask = torch.cat([batch.completion_mask, junk == 0], 1)
    batch.rollout_logps = torch.cat([batch.rollout_logps, junk.double()], 1)
    assert_equal(whole, weights_after(CASES[name], batch, cut(5)))


def test_bnpo_depends_on_the_cut_as_documented(weights_after: Callable, with_prompts: Callable) -> None:
    whole = weights_after(grpo("bnpo"), with_prompts(), cut(12))
    pieces = weights_after(grpo("bnpo"), with_prompts(), cut(3))
    assert max((a - b).abs().max() for a, b in zip(whole, pieces, strict=True)) > 1e-6


@pytest.mark.field("num/2")
@pytest.mark.parametrize("name", ["grpo", "dapo", "dr_grpo", "seq_mean_token_sum", "gspo", "sft"])
def test_a_batch_without_counted_tokens_changes_nothing(
    name: str, weights_after: Callable, tiny_policy: Callable, with_prompts: Callable
) -> None:
    batch = with_prompts()
    batch.completion_mask = torch.zeros_like(batch.completion_mask)
    after = weights_after(CASES[name], batch, cut(5))
    assert_equal(after, list(tiny_policy(dtype=torch.float64).parameters()), tolerance=0.0)


class EveryRow(GRPO):
    """GRPO that passes every row, whatever its advantage."""

    def rows_in_loss(self, rows: RolloutBatch) -> RolloutBatch:
        return rows


@pytest.mark.parametrize(
    "loss",
    [
        ClippedSurrogate(loss_type="grpo"),
        ClippedSurrogate(loss_type="dapo"),
        ClippedSurrogate(loss_type="dr_grpo"),
        GPG(),
        CISPO(),
        SAPO(),
        GeoMean(),
        ClipCov(cov_low=0.0, cov_ratio=0.3),
        KLCov(cov_ratio=0.3),
    ],
    ids=lambda loss: f"{type(loss).__name__}_{loss.loss_type}",
)
def test_leaving_out_rows_without_credit_changes_nothing(
    loss: PolicyLoss, weights_after: Callable, with_prompts: Callable
) -> None:
    batch = with_prompts()
    batch.rewards[:4] = 1.0  # a group without spread
    ways = [
        lambda way=way, **base: way(
            policy_loss=loss, sampling=SAMPLING, num_generations=4, num_iterations=2, **base
        )
        for way in (GRPO, EveryRow)
    ]
    assert_equal(*(weights_after(build, batch, cut(5)) for build in ways))


def test_what_the_engine_s_mismatch_rejects_leaves_the_divisor_too(
    weights_after: Callable, with_prompts: Callable
) -> None:
    """As if the loss mask had been that from the start, over the whole optimizer batch."""
    batch = with_prompts()
    rejecting = policy(rollout_correction=corrected(rollout_is_mode="mask"), num_iterations=1)
    module = {}

    def build(**base: object) -> RLModule:
        return module.setdefault("it", rejecting(**base))

    rejected = weights_after(build, batch, cut(5))
    rollout = module["it"].last_rollout
    kept = rollout.completion_mask
    assert 0 < (batch.completion_mask & ~kept).sum() < batch.completion_mask.sum()
    # the same rows, masked beforehand, with a mode that rejects nothing more
    batch.completion_mask = kept
    plain = policy(
        rollout_correction=RolloutCorrection(rollout_is=True, rollout_is_threshold=1e9), num_iterations=1
    )
    assert_equal(rejected, weights_after(plain, batch, cut(5)))
