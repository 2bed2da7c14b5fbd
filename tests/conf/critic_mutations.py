"""Another legal value for each key of PPO's critic, with what else must be set; of mutations.py."""

CRITIC = "algo.critic"
ADAPTERS = ("model.lora.lora_rank=2",)
SHAPES = {shape: (f"schedule.lr_scheduler_type={shape}",) for shape in ("linear", "cosine", "wsd")}
GROWTH = ("schedule.weight_decay_incr_style=linear", "schedule.end_weight_decay=0.5")
TWO_UPDATES = ("algo.num_iterations=2", "algo.critic.optim.lr=1e-2")

MIRRORED = {
    "model.path": ("no_such_folder",),
    "model.dtype": ("bfloat16",),
    "model.attn_implementation": ("eager",),
    "model.model_config": ("{rms_norm_eps: 0.1}",),
    "model.model_init_kwargs": ("{no_such_argument: 1}",),
    "model.external_lib": ("no_such_package",),
    "model.disable_dropout": ("false", "model.model_config={attention_dropout: 0.5}"),
    "model.freeze_moe_router": ("true",),
    "model.neftune_noise_alpha": (5.0,),
    "model.gradient_checkpointing": ("true",),
    "model.gradient_checkpointing_kwargs": ("{use_reentrant: true}", "model.gradient_checkpointing=true"),
    "model.enable_activation_offload": ("true",),
    "model.kernels.impl_backend": ("triton", "model.kernels.use_fused_kernels=true"),
    "model.kernels.use_liger_kernel": ("true",),
    "model.kernels.liger_kernel_config": ("{rms_norm: true}",),
    "model.kernels.torch_compile_backend": ("eager",),
    "model.kernels.torch_compile_mode": ("default",),
    "model.fsdp_config.transformer_layer_cls_to_wrap": ("[LlamaDecoderLayer]",),
    "model.fsdp_config.min_num_params": (1,),
    "model.fsdp_config.param_offload": ("true",),
    "model.fsdp_config.optimizer_offload": ("true",),
    "model.fsdp_config.fsdp_size": (2,),
    "model.ulysses_sequence_parallel_size": (2,),
    "model.lora.lora_rank": (2,),
    "model.lora.lora_alpha": (64, *ADAPTERS),
    "model.lora.lora_dropout": (0.5, *ADAPTERS, "model.disable_dropout=false"),
    "model.lora.target_modules": ("[q_proj]", *ADAPTERS),
    "model.lora.peft_kwargs": ("{use_rslora: true}", *ADAPTERS),
    "optim.lr": (1e-4,),
    "optim.weight_decay": (0.5,),
    "optim.betas": ("[0.1, 0.5]",),
    "optim.eps": (1.0,),
    "schedule.lr_scheduler_type": ("linear",),
    "schedule.lr_warmup_steps": (2,),
    "schedule.lr_warmup_steps_ratio": (1.0,),
    "schedule.lr_warmup_init": (1e-2, "schedule.lr_warmup_steps=2"),
    "schedule.min_lr": (1e-4, *SHAPES["linear"]),
    "schedule.min_lr_ratio": (0.5, *SHAPES["linear"]),
    "schedule.num_cycles": (1.5, *SHAPES["cosine"]),
    "schedule.lr_decay_steps": (1, *SHAPES["linear"]),
    "schedule.lr_wsd_decay_style": ("linear", *SHAPES["wsd"], "schedule.lr_wsd_decay_steps=2"),
    "schedule.lr_wsd_decay_steps": (2, *SHAPES["wsd"]),
    "schedule.weight_decay_incr_style": ("linear", "schedule.end_weight_decay=0.9"),
    "schedule.end_weight_decay": (0.9, *GROWTH),
}
OWN = {
    "critic_warmup": (1,),
    "micro_batch_size": (3,),
    "max_grad_norm": (1e-3,),
    "cliprange_value": (1e-6, *TWO_UPDATES),
    "value_loss_coef": (9.0,),
}


def critic_values() -> dict[str, tuple[str, tuple[str, ...]]]:
    """(value, what is set in both runs) by key."""
    mirrored = {
        f"{CRITIC}.{key}": (str(value), tuple(f"{CRITIC}.{word}" for word in context))
        for key, (value, *context) in MIRRORED.items()
    }
    own = {f"{CRITIC}.{key}": (str(value), tuple(context)) for key, (value, *context) in OWN.items()}
    return {**mirrored, **own}
