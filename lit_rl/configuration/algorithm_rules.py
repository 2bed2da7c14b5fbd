"""Rules of the algorithm, its sampling and its model. Of its objectives: objective_rules."""

from lit_rl.configuration.settings import Settings


def sampling_can_be_learned_from(settings: Settings) -> str | None:
    """Rule 5."""
    if settings.get("algo.sampling.temperature", 1.0) == 0:
        return (
            "algo.sampling.temperature must be > 0 (found 0): greedy completions have no probability to "
            "learn from; for greedy validation set rollout.val_kwargs.temperature=0."
        )
    if settings.get("rollout.val_kwargs.temperature", 1.0) != 0:
        return None
    keys = [f"rollout.val_kwargs.{name}" for name in ("top_p", "top_k", "min_p")]
    return settings.idle(keys, "rollout.val_kwargs.temperature above 0 (found 0, which is greedy)")


def guided_decoding(settings: Settings) -> str | None:
    """Rule 6."""
    for key in ("algo.sampling.guided_decoding_regex", "rollout.val_kwargs.guided_decoding_regex"):
        if settings.get(key) is not None and settings.choices.get("rollout", "hf") == "hf":
            return f"{key} (found {settings.shown(key)}) needs a vLLM engine; rollout=hf has none."
    return None


def gathering(settings: Settings) -> str | None:
    """Rule 7."""
    key = "rollout.engine.ds3_gather_for_generation"
    if settings.get(key, True):
        return None
    return (
        f"{key} (found False) needs trainer=deepspeed, which is not built; with trainer=fsdp the weights are "
        "always brought together to write."
    )


def every_row_truncated(settings: Settings) -> str | None:
    """Rule 8."""
    if not (settings.get("algo.sampling.ignore_eos") and settings.get("algo.mask_truncated_completions")):
        return None
    return (
        "algo.sampling.ignore_eos and algo.mask_truncated_completions exclude each other: every row would "
        "reach the length limit and drop out."
    )


def supervised_only(settings: Settings) -> str | None:
    """Rule 27."""
    prompts = not str(settings["data._target_"]).endswith(".SFTDataModule")
    if _is_sft(settings) == prompts:
        needs = "rows with completions: data=chat_sft" if prompts else "prompts: data=arithmetic, for example"
        return f"algo (found {settings['algo._target_']}) needs {needs} (found {settings['data._target_']})."
    if _is_sft(settings) and settings.get("task") == "generate":
        return "task (found 'generate') needs an algorithm with rollouts (found algo=sft): algo=grpo, say."
    if _is_sft(settings):
        keys = [*settings.set_below("rollout"), *settings.set_below("reward")]
        return settings.idle(keys, "an algorithm with rollouts (found algo=sft)")
    keys = [
        "algo.label_smoothing_factor",
        "algo.packing",
        "model.neftune_noise_alpha",
        "algo.critic.model.neftune_noise_alpha",
        "data.messages_key",
        "data.max_length",
    ]
    return settings.idle(keys, "algo=sft")


def _is_sft(settings: Settings) -> bool:
    return str(settings["algo._target_"]).endswith(".SFT")


def model_switches(settings: Settings) -> str | None:
    """Rule 28."""
    if settings.get("model.lora.lora_rank", 0) == 0:
        keys = settings.set_below("model.lora")
        if (message := settings.idle(keys, "model.lora.lora_rank above 0 (found 0)")) is not None:
            return message
    for key, switch in (
        ("model.gradient_checkpointing_kwargs", "model.gradient_checkpointing"),
        ("model.kernels.impl_backend", "model.kernels.use_fused_kernels"),
        ("model.kernels.liger_kernel_config", "model.kernels.use_liger_kernel"),
        ("model.kernels.torch_compile_backend", "model.kernels.torch_compile"),
        ("model.kernels.torch_compile_mode", "model.kernels.torch_compile"),
    ):
        if not settings.get(switch) and (message := settings.idle([key], f"{switch}=true")) is not None:
            return message
    for block in ("model.kernels", "algo.critic.model.kernels"):
        if settings.get(f"{block}.use_remove_padding") and settings.get(f"{block}.share_prefix"):
            return (
                f"{block}.use_remove_padding (found True) has no effect here; it needs {block}.share_prefix="
                "false (found True), which leaves no padding either."
            )
    return None


REPEATS = {
    "model.model_init_kwargs": {
        "dtype": "model.dtype",
        "torch_dtype": "model.dtype",
        "attn_implementation": "model.attn_implementation",
        "trust_remote_code": "model.trust_remote_code",
    },
    "model.lora.peft_kwargs": {
        "r": "model.lora.lora_rank",
        "lora_alpha": "model.lora.lora_alpha",
        "lora_dropout": "model.lora.lora_dropout",
        "target_modules": "model.lora.target_modules",
    },
}


def repeated_keys(settings: Settings) -> str | None:
    """An entry of a free-form key repeats a key of its own."""
    for key, names in REPEATS.items():
        for name in settings.get(key) or {}:
            if name in names:
                return (
                    f"{key}.{name} (found {settings.shown(f'{key}.{name}')}) repeats {names[name]}; set that."
                )
    return None
