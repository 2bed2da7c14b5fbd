"""Every loss in every average, as modules to train on stored rollouts; and two whose average is wrong."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from stored_rollouts import constant_rate, fit
from tiny_parts import VOCABULARY, tiny_policy
from transformers import LlamaConfig, LlamaForCausalLM

from lit_rl.algorithms.base import RLModule
from lit_rl.algorithms.grpo import GRPO
from lit_rl.algorithms.ppo import PPO
from lit_rl.algorithms.sdpo import SDPO
from lit_rl.algorithms.sft import SFT
from lit_rl.batch import RolloutBatch
from lit_rl.data.chat import Chat
from lit_rl.functional.masking import Totals, totals_of
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
Build = Callable[..., RLModule]


class Case(NamedTuple):
    """A module to be, and how many steps it takes; more where the first has not everything in its loss."""

    build: Build
    steps: int = 1


def policy(
    loss: PolicyLoss, estimator: str = "grpo", module: type[GRPO] = GRPO, scale: str = "group", **more: Any
) -> Build:
    """Two passes over the rows, so that the ratio moves; nothing in the loss that is not asked for."""
    advantage = Advantage(adv_estimator=estimator, scale_rewards=scale, gamma=0.9)  # type: ignore[arg-type]
    settings = {"num_iterations": 2, **more}
    return partial(
        module, policy_loss=loss, advantage=advantage, sampling=SAMPLING, num_generations=4, **settings
    )


def sdpo(weight: float = 1.0, correction: RolloutCorrection | None = None, **settings: Any) -> Build:
    return partial(
        SDPO,
        distillation=Distillation(distillation_weight=weight, **settings),
        rollout_correction=correction,
        sampling=SAMPLING,
        num_generations=4,
    )


def ppo(loss: PolicyLoss | None = None, micro_batch_size: int | None = None, **more: Any) -> Build:
    """Two passes over the rows, so that ratio and values move; a critic of its own."""

    def build(**base: Any) -> PPO:
        critic = Critic(
            model=value_model(),
            optim=partial(torch.optim.SGD, lr=0.1),
            schedule=constant_rate,
            micro_batch_size=micro_batch_size,
            max_grad_norm=0.0,
            cliprange_value=0.05,
        )
        return PPO(
            critic=critic,
            advantage=Advantage(adv_estimator="gae", gamma=0.9, lam=0.8),
            policy_loss=loss or CLIPPED,
            sampling=SAMPLING,
            num_generations=4,
            num_iterations=2,
            **more,
            **base,
        )

    return build


def value_model() -> ValueModel:
    """Smaller than the policy, with a head that is not zero."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        initializer_range=0.2,
        pad_token_id=0,
    )
    model = ValueModel(LlamaForCausalLM(config).double())
    torch.nn.init.normal_(model.head.weight)
    return model


def corrected(threshold: float = 1.5, **settings: Any) -> RolloutCorrection:
    return RolloutCorrection(rollout_is=True, rollout_is_threshold=threshold, **settings)


class AwayFromReference(GRPO):
    """As after some training. At the reference itself the slope of `abs` is the sign of a rounding error."""

    def build_roles(self) -> None:
        super().build_roles()
        assert self.ref is not None
        generator = torch.Generator().manual_seed(5)
        with self.ref.model() as model, torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


class AwayFromRollout(GRPO):
    """The rows are of an older policy. At ratio 1 the slope of KL-Cov's penalty is that of `abs` at 0."""

    def prepare(self, rollout: RolloutBatch) -> None:
        super().prepare(rollout)
        rollout.old_logps = rollout.rollout_logps


class MeanOfEachMicroBatch(GRPO):
    """Planted: divides by the tokens and rows of the micro-batch."""

    def loss(self, micro_batch: RolloutBatch, totals: Totals) -> torch.Tensor:
        assert micro_batch.completion_mask is not None
        own = totals_of(micro_batch.completion_mask, self.sampling.max_completion_length)
        return super().loss(micro_batch, own)


def module_for(loss: str) -> type[GRPO]:
    return AwayFromRollout if loss == "kl_cov" else GRPO


AVERAGES = ("dapo", "grpo", "dr_grpo", "seq_mean_token_sum")
LOSSES: dict[str, PolicyLoss] = {
    "clipped": ClippedSurrogate(epsilon=0.02, epsilon_high=0.05, dual_clip=1.5),
    "gspo": ClippedSurrogate(epsilon=0.01, importance_sampling_level="sequence"),
    "gpg": GPG(),
    "clip_cov": ClipCov(cov_low=0.0, cov_ratio=0.3),
    "kl_cov": KLCov(cov_ratio=0.3),
    "cispo": CISPO(epsilon=0.01),
    "sapo": SAPO(),
}
MODES: dict[str, dict[str, Any]] = {
    "sampled": {},
    "full": {"distillation_mode": "full_logits", "distillation_alpha": 0.5},
    "topk": {"distillation_mode": "topk_logits", "distillation_topk": 5, "distillation_add_tail": True},
}
CLIPPED = ClippedSurrogate()
IN_REWARD = KL(use_kl_in_reward=True, kl_ctrl=KLControl(kl_coef=0.5))

CASES: dict[str, Case] = {
    "sft": Case(SFT),
    **{
        f"{name}_{average}": Case(policy(replace(loss, loss_type=average), module=module_for(name)))  # type: ignore[type-var]
        for name, loss in LOSSES.items()
        for average in AVERAGES
    },
    "geo_mean": Case(policy(GeoMean())),
    **{
        f"kl_and_entropy_{average}": Case(
            policy(
                ClippedSurrogate(loss_type=average, entropy_coeff=0.01),  # type: ignore[arg-type]
                module=AwayFromReference,
                kl=KL(beta=0.1),
            )
        )
        for average in AVERAGES
    },
    **{
        f"kl_{name}": Case(
            policy(CLIPPED, module=AwayFromReference, kl=KL(beta=0.1, kl_loss_type=name))  # type: ignore[arg-type]
        )
        for name in ("abs", "mse", "full", "kl+", "low_var_kl+")
    },
    **{
        f"kl_in_reward_{name}": Case(
            policy(CLIPPED, name, module=AwayFromReference, kl=IN_REWARD, num_iterations=1)
        )
        for name in ("grpo", "reinforce_plus_plus", "reward")
    },
    "kl_in_reward_full": Case(
        policy(
            CLIPPED,
            module=AwayFromReference,
            kl=KL(use_kl_in_reward=True, kl_penalty="full"),
            num_iterations=1,
        )
    ),
    **{
        f"estimator_{name}": Case(policy(CLIPPED, name))
        for name in ESTIMATORS
        if name not in ("grpo", "none")
    },
    "estimator_grpo_batch_scale": Case(policy(CLIPPED, scale="batch")),
    **{
        f"{name}_token_credit": Case(policy(loss, "reward", module=module_for(name)))
        for name, loss in {**LOSSES, "geo_mean": GeoMean()}.items()
    },
    "cispo_ratio_cap": Case(policy(CISPO(ratio_cap=1.01), "reward")),
    **{
        f"truncated_{average}": Case(
            policy(ClippedSurrogate(loss_type=average), rollout_correction=corrected())
        )  # type: ignore[arg-type]
        for average in AVERAGES
    },
    "masked": Case(policy(CLIPPED, rollout_correction=corrected(rollout_is_mode="mask"))),
    "masked_sequence": Case(
        policy(
            GeoMean(), rollout_correction=corrected(20.0, rollout_is_mode="mask", rollout_is_level="sequence")
        )
    ),
    "vetoed": Case(
        policy(
            ClippedSurrogate(loss_type="grpo"),
            rollout_correction=corrected(rollout_is_level="geometric", rollout_is_veto_threshold=0.5),
        )
    ),
    **{
        f"sdpo_{mode}_{divisor}": Case(sdpo(distillation_divisor=divisor, **settings))
        for mode, settings in MODES.items()
        for divisor in ("active_tokens", "active_rows", "all_rows")
    },
    **{
        f"ppo_{average}": Case(ppo(ClippedSurrogate(loss_type=average)))  # type: ignore[arg-type]
        for average in AVERAGES
    },
    "ppo_kl_and_entropy": Case(ppo(ClippedSurrogate(entropy_coeff=0.01), kl=KL(beta=0.1))),
    "kl_in_reward_ppo": Case(ppo(kl=IN_REWARD), steps=2),
    "ppo_masked": Case(ppo(rollout_correction=corrected(rollout_is_mode="mask"))),
    "ppo_clip_cov": Case(ppo(ClipCov(cov_low=0.0, cov_ratio=0.3))),
    "ppo_pieces_of_the_critic": Case(ppo(micro_batch_size=2)),
    "sdpo_mixed": Case(sdpo(0.5)),
    "sdpo_corrected": Case(sdpo(0.5, corrected(rollout_is_mode="mask"))),
}
CONTROLS: dict[str, Case] = {
    "bnpo": Case(policy(ClippedSurrogate(loss_type="bnpo"))),
    "mean_of_each_micro_batch": Case(policy(CLIPPED, module=MeanOfEachMicroBatch)),
}


def gradient(case: Case, batch: RolloutBatch, plan: BatchPlan, chat: Chat, ranks: int = 1) -> torch.Tensor:
    """What the steps add up to, over all trained parameters: SGD at rate 1 from the same float64 weights.

    Args:
        case: what is trained.
        batch: rows of this rank.
        plan: how they are cut.
        chat: tokenizer and template.
        ranks: as in `fit`.

    Returns:
        (N,) float64.
    """
    module = case.build(
        policy=tiny_policy(dtype=torch.float64, layers=1),
        batch=plan,
        max_grad_norm=0.0,
        optimizer=partial(torch.optim.SGD, lr=1.0),
        scheduler=constant_rate,
    )
    trained = [p for p in module.parameters() if p.requires_grad]
    before = [p.detach().clone() for p in trained]
    fit(module, [batch] * case.steps, chat, ranks=ranks)
    return torch.cat([(a - b.detach()).flatten() for a, b in zip(before, trained, strict=True)])
