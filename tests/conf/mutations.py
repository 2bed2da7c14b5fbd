"""Another legal value for each key, with what else must be set for it to matter."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from critic_mutations import critic_values

REWARDS = """
from torch.utils.data import Dataset

def length(data_source, solution_str, ground_truth, extra_info=None):
    return len(solution_str) / 10

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return len(solution_str) / 5

def other(data_source, solution_str, ground_truth, extra_info=None):
    return float("1" in solution_str)

def columns(prompts, completions, **columns):
    return [sum(len(str(values)) for values in columns.values()) / 1000] * len(prompts)

class Rows(list, Dataset):
    def __init__(self, data_files):
        super().__init__({"prompt": f"{i}+1=", "data_source": "lit_rl/arithmetic"} for i in range(16))

def broken(data_source, solution_str, ground_truth, extra_info=None):
    raise ValueError("broken")
"""

NETWORKS = """
from lit_rl.rewards.network import SequenceClassifier


class Shifted(SequenceClassifier):
    def scores(self, rows, device):
        return super().scores(rows, device) + 1


class Halved(SequenceClassifier):
    def scores(self, rows, device):
        return super().scores(rows, device) / 2
"""
OTHER_TEMPLATE = "{% for m in messages %}{{ m.content }} {% endfor %}"


@dataclass(frozen=True)
class Mutation:
    """A value as on the command line; what is set in both runs; whether a finished run is resumed by both."""

    value: str
    context: tuple[str, ...] = ()
    resumed: bool = False


def to(value: Any, *context: str, resumed: bool = False) -> Mutation:
    return Mutation(str(value), context, resumed)


def by_type(key: str, value: Any) -> Mutation:
    """A legal guess where the table says nothing."""
    if isinstance(value, bool):
        return to(str(not value).lower())
    if isinstance(value, int):
        return to(value + 1)
    if isinstance(value, float):
        return to(value / 2 if value else 0.5)
    raise KeyError(f"{key} needs an entry in mutations.py (default {value!r})")


def table(folder: Path) -> dict[str, Mutation]:
    """Mutations by key.

    Args:
        folder: holds `rewards.py` with REWARDS, `networks.py` with NETWORKS, and the classifiers
            `reward_model` and `other_reward_model`, the second with OTHER_TEMPLATE.
    """
    own = f"reward.custom_reward_function.path={folder / 'rewards.py'}"
    length, broken, columns = (
        f"reward.custom_reward_function.name={name}" for name in ("length", "broken", "columns")
    )
    classifier = (
        "reward.reward_model.enable=true",
        f"reward.reward_model.path={folder / 'reward_model'}",
    )
    own_network = f"reward.reward_model.custom_cls.path={folder / 'networks.py'}"
    shifted = "reward.reward_model.custom_cls.name=Shifted"
    varied = ("rollout.val_kwargs.temperature=2.0",)
    lora = ("model.lora.lora_rank=2",)
    two_updates = ("algo.num_iterations=2", "algo.batch.optimizer_batch_size=8", "optim.lr=1e-3")
    in_reward = ("algo.kl.beta=0", "algo.kl.use_kl_in_reward=true", "optim.lr=1e-3")
    adaptive = (*in_reward, "algo.kl.kl_ctrl.type=adaptive")
    corrected = (
        "rollout.calculate_log_probs=true",
        "algo.rollout_correction.rollout_is=true",
        "algo.rollout_correction.rollout_is_threshold=1.0000001",
        "rollout.engine.dtype=bfloat16",
    )
    cosine = ("schedule.lr_scheduler_type=cosine",)
    wsd = ("schedule.lr_scheduler_type=wsd", "schedule.lr_wsd_decay_steps=3")
    coins = ("reward=random", "reward.reward_funcs.random.probability=1.0")
    by_tokens = ("algo.batch.micro_batch_size=null",)
    critic = {key: Mutation(value, context) for key, (value, context) in critic_values().items()}
    return {
        **critic,
        "task": to("validate"),
        "project_name": to("other"),
        "experiment_name": to("other"),
        "log_level": to("warning"),
        "float32_matmul_precision": to("medium"),
        "run_dir": to("elsewhere"),
        # algo
        "algo.num_generations": to(2),
        "algo.num_iterations": to(2),
        "algo.mask_truncated_completions": to("true", "algo.sampling.max_completion_length=2", own, length),
        "algo.max_grad_norm": to(1e-3, "optim=sgd", "optim.lr=1.0"),
        "algo.on_nonfinite": to("skip"),
        "algo.batch.optimizer_batch_size": to(8),
        "algo.batch.micro_batch_size": to(2),
        "algo.batch.micro_batch_tokens": to(80, *by_tokens),
        "algo.batch.score_micro_batch_size": to(3, *two_updates),
        "algo.batch.score_micro_batch_tokens": to(80, *two_updates),
        "algo.batch.shuffle": to("true", "algo.batch.optimizer_batch_size=8"),
        "algo.sampling.temperature": to(1.3),
        "algo.sampling.top_p": to(0.5),
        "algo.sampling.top_k": to(1),
        "algo.sampling.min_p": to(0.9),
        "algo.sampling.max_completion_length": to(2),
        "algo.sampling.repetition_penalty": to(3.0),
        "algo.sampling.stop_token_ids": to("[24,25,26,27,28,29]"),
        "algo.sampling.stop": to("['1']"),
        "algo.sampling.guided_decoding_regex": to("'[0-9]+'"),
        "algo.sampling.generation_kwargs": to("{temperature: 0.5}"),
        "algo.advantage.adv_estimator": to("none"),
        "algo.advantage.scale_rewards": to("batch"),
        "algo.advantage.std_epsilon": to(1.0, "optim=sgd", "optim.lr=0.1"),
        "algo.policy_loss.epsilon": to(1e-6, *two_updates),
        "algo.policy_loss.epsilon_high": to(1e-6, *two_updates),
        "algo.policy_loss.dual_clip": to(1.0001, *two_updates),
        "algo.policy_loss.loss_type": to("dr_grpo", "optim=sgd", "optim.lr=0.1"),
        "algo.policy_loss.importance_sampling_level": to("sequence", *two_updates),
        "algo.policy_loss.entropy_coeff": to(0.1),
        "algo.kl.beta": to(0.5),
        "algo.kl.kl_loss_type": to("mse", "optim.lr=1e-3"),
        "algo.kl.use_kl_in_reward": to("true", "algo.kl.beta=0"),
        "algo.kl.kl_penalty": to("abs", *in_reward),
        "algo.kl.kl_ctrl.type": to("adaptive", *in_reward),
        "algo.kl.kl_ctrl.kl_coef": to(0.5, *in_reward),
        "algo.kl.kl_ctrl.horizon": to(20, *adaptive),
        "algo.kl.kl_ctrl.target_kl": to(1e-6, *adaptive, "algo.kl.kl_ctrl.horizon=100"),
        "algo.dynamic_sampling.max_refills": to(2, "optim.lr=1e-3"),
        "algo.ref.path": to("no_such_folder"),
        "algo.advantage.lam": to(0.5),
        "algo.advantage.gamma": to(0.5, "algo.advantage.adv_estimator=reinforce_plus_plus"),
        "algo.rollout_correction.rollout_is": to("true", corrected[0], corrected[3]),
        "algo.rollout_correction.rollout_is_level": to("sequence", *corrected),
        "algo.rollout_correction.rollout_is_mode": to("mask", *corrected),
        "algo.rollout_correction.rollout_is_threshold": to(1.001, *corrected),
        "algo.rollout_correction.rollout_is_threshold_lower": to(
            0.99999,
            *corrected,
            "algo.rollout_correction.rollout_is_threshold=2.0",
            "algo.rollout_correction.rollout_is_mode=mask",
        ),
        "algo.rollout_correction.rollout_is_veto_threshold": to(0.9999, *corrected),
        # sft
        "algo.label_smoothing_factor": to(0.1),
        "algo.packing": to("true"),
        # other policy losses
        "algo.policy_loss.ratio_cap": to(0.9, *two_updates),
        "algo.policy_loss.cov_ratio": to(0.5, *two_updates, "algo.policy_loss.cov_low=-9"),
        "algo.policy_loss.cov_low": to(-9.0, *two_updates, "algo.policy_loss.cov_ratio=0.5"),
        "algo.policy_loss.cov_high": to(
            1e-4, *two_updates, "algo.policy_loss.cov_ratio=0.5", "algo.policy_loss.cov_low=0"
        ),
        "algo.policy_loss.kl_coef": to(9.0, *two_updates, "algo.policy_loss.cov_ratio=0.5"),
        "algo.policy_loss.tau_pos": to(9.0, *two_updates),
        "algo.policy_loss.tau_neg": to(9.0, *two_updates),
        # sdpo
        "algo.distillation.distillation_weight": to(0.5),
        "algo.distillation.distillation_alpha": to(0.5, "algo.distillation.distillation_mode=full_logits"),
        "algo.distillation.distillation_mode": to("full_logits"),
        "algo.distillation.distillation_is_clip": to(0.5, *two_updates),
        "algo.distillation.distillation_topk": to(3, "algo.distillation.distillation_mode=topk_logits"),
        "algo.distillation.distillation_add_tail": to(
            "true", "algo.distillation.distillation_mode=topk_logits", "algo.distillation.distillation_topk=2"
        ),
        "algo.distillation.distillation_divisor": to("all_rows", "optim=sgd", "optim.lr=0.1"),
        "algo.distillation.rows": to("failed", "algo.distillation.distillation_weight=0.5"),
        "algo.distillation.prompt_weight": to("sqrt_pq", "optim=sgd", "optim.lr=0.1"),
        "algo.distillation.gate": to("prompt", "callbacks=[default,teacher_gap]"),
        "algo.teacher.teacher_model_kind": to("base", "optim.lr=1e-2"),
        "algo.teacher.teacher_update_rate": to(0.9, "optim.lr=1e-2"),
        "algo.teacher.teacher_sync_steps": to(2, "optim.lr=1e-2"),
        "algo.teacher.trust_region_mix": to(
            0.9, "algo.teacher.teacher_model_kind=trust_region", "optim.lr=1e-2"
        ),
        "algo.teacher.use_teacher_server": to("true", "algo.teacher.teacher_model_kind=live"),
        "algo.reprompt.skip_successful_rows": to(
            "true", own, length, "algo.reprompt.success_reward_threshold=0"
        ),
        "algo.reprompt.feedback_source": to("column", "algo.reprompt.include_environment_feedback=true"),
        "algo.reprompt.use_successful_as_teacher": to(
            "false", "algo.reprompt.include_environment_feedback=true"
        ),
        "algo.reprompt.success_reward_threshold": to(0.1, own, length),
        "algo.reprompt.dont_reprompt_on_self_success": to(
            "false", own, length, "algo.reprompt.success_reward_threshold=0", "algo.sampling.temperature=2"
        ),
        "algo.reprompt.demonstration": to(
            "shortest", own, length, "algo.reprompt.success_reward_threshold=0", "algo.sampling.temperature=2"
        ),
        "algo.reprompt.max_reprompt_len": to(20, "data.max_prompt_length=16"),
        "algo.reprompt.reprompt_template": to("'{prompt}{solution}{feedback} Again'"),
        "algo.reprompt.solution_template": to("' Right {successful_previous_attempt} '"),
        "algo.reprompt.feedback_template": to(
            "' Wrong {feedback_raw} '", "algo.reprompt.include_environment_feedback=true"
        ),
        "algo.reprompt.environment_feedback_only_without_solution": to(
            "true", "algo.reprompt.include_environment_feedback=true"
        ),
        # model
        "model.path": to("no_such_folder"),
        "model.dtype": to("bfloat16", "trainer.precision=bf16-mixed"),
        "model.attn_implementation": to("eager"),
        "model.model_config": to("{rms_norm_eps: 0.1}"),
        "model.model_init_kwargs": to("{no_such_argument: 1}"),
        "model.neftune_noise_alpha": to(5.0),
        "model.external_lib": to("no_such_package"),
        "model.disable_dropout": to("false", "+model.model_config.attention_dropout=0.5"),
        "model.gradient_checkpointing_kwargs": to(
            "{use_reentrant: true}", "model.gradient_checkpointing=true"
        ),
        "model.enable_activation_offload": to("true"),
        "model.kernels.impl_backend": to("triton", "model.kernels.use_fused_kernels=true"),
        "model.kernels.use_liger_kernel": to("true"),
        "model.kernels.liger_kernel_config": to("{rms_norm: true}"),
        "model.kernels.torch_compile_backend": to("eager"),
        "model.kernels.torch_compile_mode": to("default"),
        "model.fsdp_config.transformer_layer_cls_to_wrap": to("[LlamaDecoderLayer]"),
        "model.fsdp_config.fsdp_size": to(2),
        "model.lora.lora_rank": to(2),
        "model.lora.lora_alpha": to(64, *lora, "optim.lr=1e-2"),
        "model.lora.lora_dropout": to(0.5, *lora, "model.disable_dropout=false"),
        "model.lora.target_modules": to("[q_proj]", *lora),
        "model.lora.peft_kwargs": to("{use_rslora: true}", *lora, "optim.lr=1e-2"),
        # data
        "data.train_files": to("no_such_file.parquet"),
        "data.val_files": to("null"),
        "data.train_max_samples": to(5),
        "data.val_max_samples": to(3),
        "data.total_epochs": to(0.5, "trainer.max_steps=-1", "data.train_max_samples=8"),
        "data.train_batch_size": to(2),
        "data.val_batch_size": to(2),
        "data.max_prompt_length": to(6),
        "data.truncation": to("right", "data.max_prompt_length=8"),
        "data.filter_overlong_prompts": to("true", "data.max_prompt_length=9"),
        "data.seed": to(7),
        "data.prompt_key": to("question"),
        "data.data_source_key": to("ability"),
        "data.reward_model_key": to("answer"),
        "data.privileged_context_key": to("hint"),
        "data.image_key": to("extra_info"),
        "data.source_weights": to("{lit_rl/arithmetic_add: 1.0, lit_rl/arithmetic_sub: 3.0}"),
        "data.curriculum_key": to("ability"),
        "data.return_raw_input_ids": to("true", own, columns),
        "data.return_raw_chat": to("true", own, columns),
        "data.return_full_prompt": to("true", own, columns),
        "data.remove_unused_columns": to("true", own, columns),
        "data.custom_cls.path": to(folder / "rewards.py", "data.custom_cls.name=Rows"),
        "data.custom_cls.name": to("Rows", f"data.custom_cls.path={folder / 'rewards.py'}"),
        "data.task": to("leg_counting"),
        "data.train_size": to(16),
        "data.val_size": to(3),
        "data.question": to("'57+67=?'"),
        "data.ground_truth": to(115),
        "data.source": to("lit_rl/question"),
        "data.tokenizer": to("no_such_folder"),
        "data.chat_template_kwargs": to("{x: 1}"),
        "data.on_bad_row": to("skip"),
        "data.loader.pin_memory": to("false"),
        "data.loader.prefetch_factor": to(3, "data.loader.num_workers=1"),
        "data.loader.persistent_workers": to("true", "data.loader.num_workers=1"),
        "data.loader.multiprocessing_context": to("spawn", "data.loader.num_workers=1"),
        "data.loader.in_order": to("false", "data.loader.num_workers=1"),
        "data.filter_overlong_prompts_workers": to(2, "data.filter_overlong_prompts=true"),
        "data.messages_key": to("turns"),
        "data.max_length": to(12),
        # reward
        "reward.reward_funcs.by_source.sources": to(
            "{other: {_target_: lit_rl.rewards.arithmetic.Arithmetic}}"
        ),
        "reward.reward_weights": to("[0.5]"),
        "reward.custom_reward_function.path": to(folder / "rewards.py"),
        "reward.custom_reward_function.name": to("other", own, length),
        "reward.on_error": to("zero", own, broken),
        "reward.reward_model.enable": to("true", classifier[1]),
        "reward.reward_model.path": to(folder / "other_reward_model", *classifier),
        "reward.reward_model.external_lib": to("no_such_package", *classifier),
        "reward.reward_model.input_tokenizer": to(
            folder / "other_reward_model",
            classifier[0],
            f"reward.reward_model.path={folder / 'other_reward_model'}",
        ),
        "reward.reward_model.tokenizer": to(folder / "other_reward_model", *classifier),
        "reward.reward_model.max_length": to(2, *classifier),
        "reward.reward_model.custom_cls.path": to(folder / "networks.py", *classifier, shifted),
        "reward.reward_model.custom_cls.name": to("Halved", *classifier, own_network, shifted),
        # rollout
        "rollout.val_kwargs.n": to(2, *varied),
        "rollout.val_kwargs.temperature": to(1.5),
        "rollout.val_kwargs.top_p": to(0.1, *varied),
        "rollout.val_kwargs.top_k": to(1, *varied),
        "rollout.val_kwargs.min_p": to(0.9, *varied),
        "rollout.val_kwargs.max_completion_length": to(1),
        "rollout.val_kwargs.repetition_penalty": to(5.0),
        "rollout.val_kwargs.ignore_eos": to("true"),
        "rollout.val_kwargs.stop_token_ids": to("[20,21,22,23,24,25,26,27,28,29,30,31]"),
        "rollout.val_kwargs.stop": to("['1','2','3','4','5','6','7','8','9']"),
        "rollout.val_kwargs.guided_decoding_regex": to("'[0-9]+'"),
        "rollout.val_kwargs.generation_kwargs": to("{max_new_tokens: 1}"),
        "rollout.check_every_n_steps": to(0),
        "rollout.max_staleness": to(1),
        "rollout.environment": to(
            "{_target_: lit_rl.rollout.tools.ToolEnvironment, role: user,"
            " tools: [lit_rl.assets.calculator.calculator]}"
        ),
        "rollout.engine.dtype": to("bfloat16"),
        "rollout.engine.max_num_seqs": to(3),
        "rollout.engine.cache_implementation": to("static"),
        # checkpoint
        "checkpoint.default_local_dir": to(folder / "elsewhere"),
        "checkpoint.save_contents": to("[model]"),
        "checkpoint.load_contents": to("[model]", "trainer.max_steps=4", resumed=True),
        "checkpoint.save_freq": to(1),
        "checkpoint.save_every_minutes": to(1e-9),
        "checkpoint.max_to_keep": to(1),
        "checkpoint.load_best_model_at_end": to(
            "true", "checkpoint.monitor=val/completion_len", "optim.lr=3e-2", "trainer.val_check_interval=1"
        ),
        "checkpoint.default_hdfs_dir": to(folder / "elsewhere"),
        "checkpoint.use_checkpoint_opt_param_scheduler": to("false", "trainer.max_steps=5", resumed=True),
        "checkpoint.monitor": to("val/accuracy"),
        "checkpoint.mode": to(
            "min", "checkpoint.monitor=val/completion_len", "optim.lr=3e-2", "trainer.val_check_interval=1"
        ),
        "checkpoint.resume_mode": to("disable", "trainer.max_steps=4", resumed=True),
        "checkpoint.resume_from_path": to("no_such_folder", "checkpoint.resume_mode=resume_path"),
        # optim, schedule
        "optim.lr": to(1e-3),
        "optim.weight_decay": to(0.5, "optim.lr=1e-2"),
        "optim.betas": to("[0.1, 0.5]"),
        "optim.eps": to(1.0),
        "schedule.lr_scheduler_type": to("constant"),
        "schedule.lr_warmup_steps": to(2),
        "schedule.lr_warmup_steps_ratio": to(0.7),
        "schedule.lr_warmup_init": to(1e-3, "schedule.lr_warmup_steps=3"),
        "schedule.min_lr": to(1e-5),
        "schedule.min_lr_ratio": to(0.5),
        "schedule.num_cycles": to(1.5, *cosine),
        "schedule.lr_decay_steps": to(1),
        "schedule.lr_wsd_decay_style": to("linear", *wsd),
        "schedule.lr_wsd_decay_steps": to(2, *wsd),
        "schedule.weight_decay_incr_style": to("linear", "optim.lr=1e-2", "schedule.end_weight_decay=0.9"),
        "schedule.end_weight_decay": to(
            0.9, "optim.lr=1e-2", "schedule.weight_decay_incr_style=linear", "schedule.end_weight_decay=0.5"
        ),
        # callbacks, trainer
        "callbacks.log_completions.every_n_steps": to(2),
        "callbacks.log_completions.num_rows": to(2),
        "callbacks.log_completions.log_val_generations": to(2),
        "callbacks.diagnostics.diagnostics_warning_interval": to(1, *coins),
        "callbacks.diagnostics.diagnostics_flat_tolerance": to(
            1.0, "callbacks.diagnostics.diagnostics_warning_interval=1"
        ),
        "callbacks.memory.torch_empty_cache_steps": to(1),
        "callbacks.teacher_gap.every_n_steps": to(1),
        "callbacks.teacher_gap.num_prompts": to(1),
        "callbacks.test_time_search.max_attempts": to(8),
        "callbacks.test_time_search.baselines": to("[best_of_k]"),
        "callbacks.test_time_search.num_seeds": to(2),
        "callbacks.test_time_search.max_dialogue_len": to(20),
        "callbacks.test_time_search.pass_rate_samples": to(0),
        "trainer.accelerator": to("gpu"),
        "trainer.precision": to("bf16-mixed"),
        "trainer.strategy": to("ddp"),
        "trainer.max_steps": to(2),
        "trainer.max_time": to("'00:00:00:00'"),
        "trainer.val_check_interval": to(1),
        "trainer.limit_val_batches": to(0),
        "trainer.log_every_n_steps": to(2),
        "trainer.deterministic": to("true"),
        "trainer.profiler": to("simple"),
        "trainer.check_val_every_n_epoch": to(1),
        "trainer.gradient_clip_val": to(1.0),
    }
