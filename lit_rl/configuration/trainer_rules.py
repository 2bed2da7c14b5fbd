"""Rules of the trainer, precision and devices."""

import importlib.util

from lit_rl.configuration import batch_rules
from lit_rl.configuration.settings import Settings

FIXED = {
    "max_epochs": (1, "the whole run is one Lightning epoch; set trainer.max_steps or data.total_epochs"),
    "num_sanity_val_steps": (0, "set val_before_train"),
    "check_val_every_n_epoch": (None, "validation counts steps; set trainer.val_check_interval"),
    "use_distributed_sampler": (False, "the data module shares the rows out by itself"),
    "gradient_clip_val": (None, "set algo.max_grad_norm"),
    "accumulate_grad_batches": (1, "set algo.batch.micro_batch_size and algo.batch.optimizer_batch_size"),
    "enable_checkpointing": (False, "set the keys of checkpoint"),
    "enable_model_summary": (False, "the plan says what is trained"),
    "inference_mode": (False, "what validation makes, such as an engine's copy, is used in training"),
}
REPLACED = {
    "callbacks": "set the keys of callbacks",
    "logger": "choose with logger=[...]",
    "plugins": "checkpoints have their own format",
    "default_root_dir": "set run_dir",
    "fast_dev_run": "use debug=fast",
    "overfit_batches": "use debug=overfit",
    "limit_train_batches": "set trainer.max_steps",
    "min_epochs": "set data.total_epochs",
    "gradient_clip_algorithm": "set algo.max_grad_norm",
    "reload_dataloaders_every_n_epochs": "the whole run is one Lightning epoch",
    "barebones": "set logger=none",
}


def fixed_trainer_keys(settings: Settings) -> str | None:
    for name, (value, instead) in FIXED.items():
        found = settings.get(f"trainer.{name}", value)
        if found != value or type(found) is not type(value):
            word = "null" if value is None else str(value).lower()
            return f"trainer.{name} is fixed at {word} (found {found!r}): {instead}."
    for name, instead in REPLACED.items():
        if f"trainer.{name}" in settings:
            return f"trainer.{name} is not for users (found {settings.shown(f'trainer.{name}')}): {instead}."
    return None


def known_strategy(settings: Settings) -> str | None:
    """Rule 43."""
    strategy = settings["trainer.strategy"]
    if strategy == "auto" or isinstance(strategy, dict):
        return None
    return (
        f"trainer.strategy must be auto or a block (found {strategy!r}); use trainer=ddp for several "
        "processes, trainer=fsdp to share the weights out. FSDP1 cannot do several backward passes in a step."
    )


def several_devices(settings: Settings) -> str | None:
    if settings["trainer.strategy"] != "auto" or batch_rules.ranks(settings) == 1:
        return None
    return (
        f"trainer.devices * trainer.num_nodes (found {batch_rules.ranks(settings)}) above 1 needs "
        f"trainer=ddp or fsdp (found trainer.strategy 'auto'); for GPUs: trainer=ddp trainer.accelerator=gpu."
    )


def gradient_reduction(settings: Settings) -> str | None:
    """DDP's own reduction never runs: the module sums gradients once per optimizer step."""
    names = ("find_unused_parameters", "bucket_cap_mb", "static_graph")
    needs = "DDP's own gradient reduction, which the module replaces by one sum per optimizer step"
    return settings.idle([f"trainer.strategy.{name}" for name in names], needs)


def visible_accelerator(settings: Settings) -> str | None:
    wanted = settings["trainer.accelerator"]
    if wanted not in ("gpu", "cuda"):
        return None
    import torch

    if torch.cuda.is_available() or (wanted == "gpu" and torch.backends.mps.is_available()):
        return None
    return f"trainer.accelerator (found {wanted!r}) needs a GPU, and none is visible here; use trainer=cpu."


def true_precision(settings: Settings) -> str | None:
    """Rule 29."""
    names = {"bf16-true": "bfloat16", "16-true": "float16", "64-true": "float64", "32-true": "float32"}
    precision = str(settings["trainer.precision"])
    dtype = settings.get("model.dtype")
    wanted = names.get(precision)
    if wanted is None or dtype in (None, "auto", wanted):
        return None
    return f"trainer.precision {precision!r} needs model.dtype={wanted} (found {dtype!r})."


def activation_offload(settings: Settings) -> str | None:
    """Without a GPU there is nothing to offload from."""
    if not settings.get("model.enable_activation_offload") or settings["trainer.accelerator"] != "cpu":
        return None
    return (
        "model.enable_activation_offload (found True) has no effect with trainer.accelerator 'cpu', where "
        "activations are in CPU memory already; it needs a GPU."
    )


def flash_attention(settings: Settings) -> str | None:
    """Rule 29."""
    if settings.get("model.attn_implementation") != "flash_attention_2":
        return None
    halves = settings.get("model.dtype") in ("bfloat16", "float16")
    has_package = importlib.util.find_spec("flash_attn") is not None
    if settings["trainer.accelerator"] != "cpu" and halves and has_package:
        return None
    return (
        "model.attn_implementation 'flash_attention_2' needs a GPU (trainer.accelerator, found "
        f"{settings['trainer.accelerator']!r}), model.dtype bfloat16 or float16 (found "
        f"{settings.get('model.dtype')!r}) and the package flash-attn "
        f"({'installed' if has_package else 'not installed'}); use sdpa."
    )


def cache_of_a_gpu(settings: Settings) -> str | None:
    """What is given back is a GPU's."""
    if settings["trainer.accelerator"] != "cpu":
        return None
    key = "callbacks.memory.torch_empty_cache_steps"
    return settings.idle([key], "a GPU (found trainer.accelerator=cpu)")
