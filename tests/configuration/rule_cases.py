"""Breaches of rules between keys: a command line, and what the refusal must name."""

CASES = [
    (
        "callbacks=[default,collapse_alarm] callbacks.collapse_alarm.max_rollbacks=1",
        ["callbacks.collapse_alarm.max_rollbacks", "callbacks.collapse_alarm.action"],
    ),
    (
        "callbacks=[default,collapse_alarm] callbacks.collapse_alarm.action=rollback checkpoint.save_freq=-1",
        ["callbacks.collapse_alarm.action", "checkpoint.save_freq"],
    ),
    (
        "callbacks=[default,collapse_alarm] callbacks.collapse_alarm.action=rollback "
        "checkpoint.save_contents=[model]",
        ["callbacks.collapse_alarm.action", "checkpoint.save_contents"],
    ),
    (
        "callbacks=[default,memory] callbacks.memory.torch_empty_cache_steps=2",
        ["callbacks.memory.torch_empty_cache_steps", "trainer.accelerator"],
    ),
    (
        "model.kernels.use_remove_padding=true",
        ["model.kernels.use_remove_padding", "model.kernels.share_prefix"],
    ),
    ("data.train_batch_size=3 trainer=ddp", ["data.train_batch_size", "trainer.devices", "2 or 4"]),
    (
        "algo.batch.optimizer_batch_size=24",
        ["algo.batch.optimizer_batch_size", "data.train_batch_size 16", "algo.num_generations 8", "16 or 32"],
    ),
    (
        "algo.batch.optimizer_batch_size=16 algo.batch.micro_batch_size=64",
        ["algo.batch.micro_batch_size", "16"],
    ),
    (
        "algo.batch.micro_batch_size=null algo.batch.micro_batch_tokens=50",
        [
            "algo.batch.micro_batch_tokens",
            "data.max_prompt_length",
            "algo.sampling.max_completion_length",
            "72",
        ],
    ),
    (
        "algo.policy_loss.loss_type=bnpo algo.batch.micro_batch_size=null algo.batch.micro_batch_tokens=500",
        ["algo.policy_loss.loss_type", "algo.batch.micro_batch_tokens"],
    ),
    ("algo.batch.micro_batch_tokens=500", ["algo.batch.micro_batch_size", "algo.batch.micro_batch_tokens"]),
    ("algo.num_generations=1", ["algo.num_generations", "algo.advantage.adv_estimator"]),
    ("algo.sampling.temperature=0", ["algo.sampling.temperature"]),
    ("rollout.val_kwargs.top_p=0.5", ["rollout.val_kwargs.top_p", "rollout.val_kwargs.temperature"]),
    ("algo.sampling.guided_decoding_regex=a", ["algo.sampling.guided_decoding_regex", "rollout=hf"]),
    (
        "algo.sampling.ignore_eos=true algo.mask_truncated_completions=true",
        ["algo.sampling.ignore_eos", "algo.mask_truncated_completions"],
    ),
    (
        "algo.advantage.adv_estimator=none",
        ["algo.advantage.adv_estimator", "algo.distillation.distillation_weight"],
    ),
    (
        "algo.advantage.scale_rewards=none algo.advantage.std_epsilon=0.1",
        ["algo.advantage.std_epsilon", "algo.advantage.scale_rewards"],
    ),
    ("algo.kl.beta=0 algo.kl.kl_loss_type=mse", ["algo.kl.kl_loss_type", "algo.kl.beta"]),
    ("algo.kl.kl_loss_type=kl", ["algo.kl.kl_loss_type", "kl+"]),
    ("algo.kl.use_kl_in_reward=true", ["algo.kl.beta", "algo.kl.use_kl_in_reward"]),
    ("algo.kl.kl_penalty=mse", ["algo.kl.kl_penalty", "algo.kl.use_kl_in_reward"]),
    ("algo.kl.kl_ctrl.kl_coef=0.1", ["algo.kl.kl_ctrl.kl_coef", "algo.kl.use_kl_in_reward"]),
    (
        "algo.kl.beta=0 algo.kl.use_kl_in_reward=true algo.kl.kl_ctrl.horizon=5",
        ["algo.kl.kl_ctrl.horizon", "algo.kl.kl_ctrl.type"],
    ),
    ("algo.advantage.gamma=0.9", ["algo.advantage.gamma", "algo.advantage.adv_estimator"]),
    ("algo.advantage.lam=0.9", ["algo.advantage.lam", "algo.advantage.adv_estimator"]),
    ("algo.advantage.adv_estimator=gae", ["algo.advantage.adv_estimator", "'gae'", "algo=ppo"]),
    (
        "algo.advantage.adv_estimator=opo algo.advantage.scale_rewards=none",
        ["algo.advantage.scale_rewards", "algo.advantage.adv_estimator"],
    ),
    (
        "algo.advantage.adv_estimator=reinforce_plus_plus algo.advantage.std_epsilon=0.1",
        ["algo.advantage.std_epsilon", "algo.advantage.adv_estimator"],
    ),
    (
        "algo.advantage.adv_estimator=rloo algo.num_generations=1",
        ["algo.num_generations", "'rloo'"],
    ),
    ("policy_loss=cispo algo.policy_loss.ratio_cap=5 algo.policy_loss.epsilon=0.1", ["ratio_cap", "epsilon"]),
    ("policy_loss=geo_mean algo.policy_loss.loss_type=dapo", ["algo.policy_loss.loss_type"]),
    (
        "algo.rollout_correction.rollout_is_threshold=2",
        ["algo.rollout_correction.rollout_is_threshold", "algo.rollout_correction.rollout_is=true"],
    ),
    (
        "algo.rollout_correction.rollout_is=true algo.rollout_correction.rollout_is_threshold=2",
        ["algo.rollout_correction.rollout_is", "rollout.calculate_log_probs"],
    ),
    (
        "algo.rollout_correction.rollout_is=true rollout.calculate_log_probs=true algo.sampling.top_k=5 "
        "algo.sampling.top_p=0.9",
        ["algo.rollout_correction.rollout_is", "algo.sampling.top_k", "algo.sampling.top_p"],
    ),
    (
        "algo.rollout_correction.rollout_is=true rollout.calculate_log_probs=true "
        "algo.rollout_correction.rollout_is_mode=none",
        ["rollout_is_veto_threshold", "rollout_is_mode"],
    ),
    (
        "algo.rollout_correction.rollout_is=true rollout.calculate_log_probs=true "
        "algo.rollout_correction.rollout_is_threshold_lower=0.5",
        ["rollout_is_threshold_lower", "rollout_is_mode"],
    ),
    ("algo.kl.beta=0 callbacks=[default,reference_sync]", ["callbacks.reference_sync", "algo.kl.beta"]),
    (
        "algo.advantage.adv_estimator=reward algo.dynamic_sampling.max_refills=2",
        ["algo.dynamic_sampling.max_refills", "algo.advantage.adv_estimator"],
    ),
    ("algo.kl.beta=0 algo.ref.path=x", ["algo.ref.path", "algo.kl.beta"]),
    ("algo.ref.trust_remote_code=true", ["algo.ref.trust_remote_code", "algo.ref.path"]),
    ("algo.ref.param_offload=true", ["algo.ref.param_offload", "trainer.accelerator"]),
    ("model.lora.lora_alpha=3", ["model.lora.lora_alpha", "model.lora.lora_rank"]),
    (
        "+model.gradient_checkpointing_kwargs.use_reentrant=true",
        ["model.gradient_checkpointing_kwargs", "model.gradient_checkpointing"],
    ),
    ("+model.model_init_kwargs.dtype=float16", ["model.model_init_kwargs.dtype", "model.dtype"]),
    ("model.enable_activation_offload=true", ["model.enable_activation_offload"]),
    ("model.kernels.torch_compile_mode=default", ["model.kernels.torch_compile_mode", "torch_compile=true"]),
    ("model.kernels.use_liger_kernel=true", ["model.kernels.use_liger_kernel"]),
    ("model.attn_implementation=flash_attention_2", ["model.attn_implementation", "model.dtype"]),
    ("trainer.precision=bf16-true", ["trainer.precision", "model.dtype"]),
    ("trainer.devices=2", ["trainer.devices", "trainer=ddp"]),
    ("trainer.strategy=fsdp", ["trainer.strategy", "trainer=ddp", "trainer=fsdp"]),
    ("model.fsdp_config.min_num_params=9", ["model.fsdp_config.min_num_params", "trainer=fsdp"]),
    ("trainer=ddp model.fsdp_config.fsdp_size=2", ["model.fsdp_config.fsdp_size", "trainer=fsdp"]),
    ("trainer=fsdp model.fsdp_config.fsdp_size=3", ["model.fsdp_config.fsdp_size", "trainer.devices", "2"]),
    (
        "trainer=fsdp model.fsdp_config.param_offload=true model.fsdp_config.optimizer_offload=true",
        [
            "model.fsdp_config.param_offload",
            "model.fsdp_config.optimizer_offload",
            "trainer.accelerator=cpu",
        ],
    ),
    (
        "trainer=fsdp model.fsdp_config.min_num_params=9 "
        "model.fsdp_config.transformer_layer_cls_to_wrap=[LlamaMLP]",
        ["model.fsdp_config.min_num_params", "model.fsdp_config.transformer_layer_cls_to_wrap"],
    ),
    (
        "trainer=fsdp trainer.strategy.tensor_parallel_size=2",
        ["trainer.strategy.tensor_parallel_size", "rollout.engine.tensor_parallel_size"],
    ),
    (
        "trainer=fsdp trainer.strategy.data_parallel_size=1",
        ["trainer.strategy.data_parallel_size", "model.fsdp_config.fsdp_size"],
    ),
    ("model.ulysses_sequence_parallel_size=2", ["model.ulysses_sequence_parallel_size", "must be 1"]),
    (
        "rollout.engine.ds3_gather_for_generation=false",
        ["rollout.engine.ds3_gather_for_generation", "trainer=deepspeed"],
    ),
    ("trainer=fsdp rollout.engine.dtype=bfloat16", ["rollout.engine.dtype"]),
    ("trainer=fsdp trainer.precision=16-mixed", ["trainer.precision"]),
    ("trainer=fsdp optim=sgd", ["optim.fused"]),
    ("trainer=fsdp model.kernels.torch_compile=true", ["model.kernels.torch_compile"]),
    (
        "trainer=fsdp callbacks=[default,push_to_hub]",
        ["callbacks.push_to_hub", "python -m lit_rl.export"],
    ),
    ("trainer.gradient_clip_val=1", ["trainer.gradient_clip_val", "algo.max_grad_norm"]),
    ("trainer.max_epochs=3", ["trainer.max_epochs", "data.total_epochs"]),
    ("+trainer.fast_dev_run=true", ["trainer.fast_dev_run", "debug=fast"]),
    ("reward.reward_weights=[1,2]", ["reward.reward_weights"]),
    (
        "reward.custom_reward_function.name=mine",
        ["reward.custom_reward_function.name", "reward.custom_reward_function.path"],
    ),
    (
        "data.filter_overlong_prompts_workers=2",
        ["data.filter_overlong_prompts_workers", "data.filter_overlong_prompts"],
    ),
    ("data.shuffle=false data.seed=3", ["data.seed", "data.shuffle"]),
    ("data.loader.prefetch_factor=2", ["data.loader.prefetch_factor", "data.loader.num_workers"]),
    ("data.max_prompt_length=null data.truncation=error", ["data.truncation", "data.max_prompt_length"]),
    (
        "checkpoint.resume_from_path=x",
        ["checkpoint.resume_mode", "checkpoint.resume_from_path"],
    ),
    (
        "checkpoint.save_contents=[model] checkpoint.load_contents=[optimizer]",
        ["checkpoint.load_contents", "checkpoint.save_contents"],
    ),
    ("checkpoint.mode=min", ["checkpoint.mode", "checkpoint.monitor"]),
    (
        "checkpoint.monitor=val/accuracy trainer.limit_val_batches=0",
        ["checkpoint.monitor", "trainer.limit_val_batches"],
    ),
    ("data.total_epochs=7", ["data.total_epochs", "trainer.max_steps"]),
    (
        "trainer.limit_val_batches=0 trainer.val_check_interval=5",
        ["trainer.val_check_interval", "trainer.limit_val_batches"],
    ),
    (
        "schedule.lr_warmup_steps=2 schedule.lr_warmup_steps_ratio=0.5",
        ["schedule.lr_warmup_steps_ratio", "schedule.lr_warmup_steps"],
    ),
    ("schedule.min_lr=1e-7 schedule.min_lr_ratio=0.1", ["schedule.min_lr", "schedule.min_lr_ratio"]),
    ("schedule.lr_warmup_steps=500", ["schedule.lr_warmup_steps", "trainer.max_steps"]),
    ("schedule.lr_warmup_init=1e-7", ["schedule.lr_warmup_init", "schedule.lr_warmup_steps"]),
    ("schedule.num_cycles=2", ["schedule.num_cycles", "schedule.lr_scheduler_type"]),
    (
        "schedule.lr_scheduler_type=constant schedule.lr_decay_steps=3",
        ["schedule.lr_decay_steps", "schedule.lr_scheduler_type"],
    ),
    (
        "schedule.lr_wsd_decay_style=cosine",
        ["schedule.lr_wsd_decay_style", "schedule.lr_scheduler_type"],
    ),
    (
        "schedule.weight_decay_incr_style=linear",
        ["schedule.weight_decay_incr_style", "schedule.end_weight_decay"],
    ),
    ("schedule.min_lr_ratio=1.5", ["schedule.min_lr_ratio", "[0, 1]", "1.5"]),
    ("optim.lr=-1", ["optim", "learning rate", "-1"]),
    ("optim.betas=[0.9,1.5]", ["optim", "beta", "1.5"]),
    ("schedule.end_weight_decay=0.1", ["schedule.end_weight_decay", "schedule.weight_decay_incr_style"]),
]
PPO_CASES = [
    ("algo.advantage.adv_estimator=gpg", ["algo.advantage.adv_estimator", "'gae'", "algo=grpo"]),
    ("algo.advantage.scale_rewards=none", ["algo.advantage.scale_rewards", "algo.advantage.adv_estimator"]),
    ("algo.critic.micro_batch_size=200", ["algo.critic.micro_batch_size", "128"]),
    ("algo.critic.critic_warmup=-1", ["algo.critic.critic_warmup", ">= 0"]),
    ("algo.critic.cliprange_value=0", ["algo.critic.cliprange_value", "null or > 0"]),
    ("algo.critic.value_loss_coef=0", ["algo.critic.value_loss_coef", "> 0"]),
    ("algo.critic.optim.lr=-1", ["algo.critic.optim", "-1"]),
    ("algo.critic.schedule.num_cycles=2", ["algo.critic.schedule.num_cycles", "lr_scheduler_type"]),
    (
        "algo.critic.schedule.lr_warmup_init=0.1",
        ["algo.critic.schedule.lr_warmup_init", "algo.critic.schedule.lr_warmup_steps"],
    ),
    (
        "algo.critic.model.lora.lora_alpha=3",
        ["algo.critic.model.lora.lora_alpha", "algo.critic.model.lora.lora_rank"],
    ),
    (
        'algo.critic.model.gradient_checkpointing_kwargs={"use_reentrant":true}',
        ["algo.critic.model.gradient_checkpointing_kwargs", "algo.critic.model.gradient_checkpointing"],
    ),
    ('algo.critic.model.model_init_kwargs={"dtype":1}', ["algo.critic.model.model_init_kwargs.dtype"]),
    ("algo.critic.model.attn_implementation=flash_attention_2", ["algo.critic.model.attn_implementation"]),
    (
        "schedule.lr_scheduler_type=linear schedule.min_lr=1e-7 schedule.min_lr_ratio=0.1",
        ["schedule.min_lr", "schedule.min_lr_ratio"],
    ),
    ("algo.kl.beta=0.1 algo.kl.use_kl_in_reward=true", ["algo.kl.beta", "algo.kl.use_kl_in_reward"]),
]
