"""Rules between keys: each breach is refused and names every key; nothing legal is refused."""

import pytest
from rule_cases import CASES, PPO_CASES
from sdpo_rule_cases import SDPO_CASES, SEARCH_CASES


@pytest.mark.field("cfg/1")
@pytest.mark.field("cfg/2")
@pytest.mark.field("num/4")
@pytest.mark.field("num/10")
@pytest.mark.parametrize(
    ("line", "parts"), [(f"algo=grpo {line}", parts) for line, parts in CASES]
    + [(f"algo=sdpo {line}", parts) for line, parts in SDPO_CASES]
    + [(f"algo=ppo {line}", parts) for line, parts in PPO_CASES]
    + SEARCH_CASES,
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_a_breach_is_refused_and_names_every_key(refusal, line: str, parts: list[str]) -> None:
    message = refusal(line)
    for part in parts:
        assert part in message
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize(
    "line",
    [
        "algo=grpo",
        "algo=sdpo",
        "trainer=fsdp",
        "algo=ppo data.train_batch_size=8 algo.batch.optimizer_batch_size=null trainer=fsdp",
        "trainer=fsdp model.fsdp_config.fsdp_size=1 model.fsdp_config.min_num_params=1000",
        "algo=grpo debug=fast",
        "algo=sdpo debug=overfit",
        "algo=grpo debug=anomaly",
        "algo=grpo seed=7",
        "algo=grpo algo.kl.beta=0",
        "algo=grpo trainer=ddp",
        "algo=grpo callbacks=[default,reference_sync] callbacks.reference_sync.ref_model_sync_steps=5",
        "algo=grpo callbacks=[default,reference_sync] model.lora.lora_rank=2 algo.ref.path=x",
        "algo=grpo trainer.limit_val_batches=0",
        "algo=grpo trainer.max_steps=-1 data.total_epochs=2",
        "algo=grpo checkpoint.monitor=val/accuracy checkpoint.mode=min",
        "algo=grpo schedule.lr_scheduler_type=cosine schedule.num_cycles=2 schedule.lr_warmup_steps=3",
        "algo=grpo algo.batch.optimizer_batch_size=32 algo.batch.micro_batch_size=4",
        "algo=grpo data.train_batch_size=2 algo.num_generations=2",
        "algo=reinforce_plus_plus algo.num_generations=1 algo.advantage.gamma=0.9",
        "algo=grpo algo.advantage.adv_estimator=reward algo.advantage.gamma=0.9 algo.num_generations=1",
        "algo=grpo algo.advantage.scale_rewards=false",
        "algo=dapo policy_loss=clip_cov algo.policy_loss.cov_low=0.5",
        "algo=grpo algo.kl.kl_loss_type=kl+",
        "algo=grpo algo.kl.kl_loss_type=full algo.dynamic_sampling.max_refills=1",
        "algo=remax algo.num_generations=1",
        "algo=dapo reward=soft_overlong",
        "algo=rloo algo.kl.beta=0 algo.kl.use_kl_in_reward=true algo.kl.kl_ctrl.type=adaptive "
        "algo.kl.kl_ctrl.horizon=5 callbacks=[default,reference_sync]",
        "algo=grpo algo.rollout_correction.rollout_is=true rollout.calculate_log_probs=true "
        "algo.rollout_correction.rollout_is_mode=mask algo.rollout_correction.rollout_is_threshold=2 "
        "algo.rollout_correction.rollout_is_threshold_lower=0.3",
        "algo=sdpo algo.rollout_correction.rollout_is=true rollout.calculate_log_probs=true "
        "algo.rollout_correction.rollout_is_threshold=2",
        "algo=sdpo algo.distillation.distillation_weight=0.5 algo.kl.beta=0.1 algo.policy_loss.epsilon=0.1",
        "algo=sdpo algo.distillation.distillation_mode=topk_logits algo.distillation.distillation_topk=5 "
        "algo.distillation.distillation_add_tail=true algo.distillation.distillation_alpha=0.5",
        "algo=sdpo algo.distillation.distillation_weight=0",
        "algo=sdpo algo.num_iterations=2 algo.distillation.distillation_is_clip=null",
        "algo=sdpo algo.batch.optimizer_batch_size=64 algo.batch.micro_batch_size=8 "
        "algo.distillation.distillation_is_clip=3",
        "algo=sdpo algo.distillation.distillation_is_clip=0.5",
        "algo=sdpo algo.teacher.teacher_model_kind=trust_region algo.teacher.trust_region_mix=0.1",
        "algo=sdpo algo.num_generations=1 algo.reprompt.include_environment_feedback=true",
        "algo=sdpo algo.num_generations=2 algo.reprompt.demonstration=shortest "
        "algo.reprompt.dont_reprompt_on_self_success=false",
        "algo=sdpo algo.reprompt.skip_successful_rows=true",
        "experiment=sdpo_paper algo.reprompt.feedback_source=column data.privileged_context_key=hint",
        "experiment=sdpo_paper algo.distillation.chunk_tokens=64",
        "algo=sft data=chat_sft data.train_files=x.parquet",
        "algo=ppo algo.advantage.lam=0.95 algo.advantage.gamma=0.99 algo.num_generations=2",
        "algo=ppo algo.critic.optim.lr=1e-5 algo.critic.critic_warmup=10 algo.kl.use_kl_in_reward=true "
        "algo.kl.kl_ctrl.type=adaptive",
        "algo=ppo model.lora.lora_rank=4 model.lora.lora_alpha=8 algo.critic.model.lora=null",
        "algo=ppo optim=sgd algo.critic.optim.momentum=0.9",
        "algo=ppo algo.critic.schedule.lr_scheduler_type=cosine algo.critic.schedule.num_cycles=2",
    ],
)
def test_a_legal_combination_is_not_refused(accepted, line: str) -> None:
    accepted(line)


@pytest.mark.field("dist/5")
@pytest.mark.parametrize("refills", ["null", "2"])
def test_rows_that_an_optimizer_batch_does_not_divide_are_refused(refusal, refills: str) -> None:
    """Six rows in optimizer batches of four; a group that is filtered out is refilled, so six stay six."""
    line = "algo=dapo data.train_batch_size=3 algo.num_generations=2 algo.batch.optimizer_batch_size=4 "
    line += "algo.batch.micro_batch_size=1 "
    line += (
        "algo.dynamic_sampling=null" if refills == "null" else f"algo.dynamic_sampling.max_refills={refills}"
    )
    text = refusal(line)
    assert "algo.batch.optimizer_batch_size (found 4) must divide the 6 rows of a step" in text
    assert "Nearest: 3 or 6" in text


def test_responses_of_rows_that_carry_theirs_are_refused(refusal) -> None:
    text = refusal("algo=sft data=chat_sft data.train_files=x.parquet data.val_files=x.parquet task=generate")
    assert "task (found 'generate') needs an algorithm with rollouts (found algo=sft)" in text
