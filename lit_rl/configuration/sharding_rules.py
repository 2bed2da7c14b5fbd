"""Rules of trainer=fsdp, and of the ways to share a model over devices that are not built."""

from lit_rl.configuration import batch_rules
from lit_rl.configuration.settings import Settings

TARGET = "FullyShardedStrategy"
BLOCK = "model.fsdp_config"
OFFLOADS = (f"{BLOCK}.param_offload", f"{BLOCK}.optimizer_offload")


def is_fsdp(settings: Settings) -> bool:
    """Whether weights are cut over the processes."""
    strategy = settings["trainer.strategy"]
    return isinstance(strategy, dict) and str(strategy.get("_target_", "")).endswith(f".{TARGET}")


def fsdp_config(settings: Settings) -> str | None:
    """Rule 30."""
    if not is_fsdp(settings):
        return settings.idle(settings.set_below(BLOCK), "trainer=fsdp")
    if settings["trainer.accelerator"] == "cpu":
        needs = "a GPU to rest beside (found trainer.accelerator=cpu, where all weights are in CPU memory)"
        if (message := settings.idle(OFFLOADS, needs)) is not None:
            return message
    size, world = settings.get(f"{BLOCK}.fsdp_size", -1), batch_rules.ranks(settings)
    if size == -1 or size < 1 or world % size == 0:
        return None
    legal = [n for n in range(1, world + 1) if world % n == 0]
    return (
        f"{BLOCK}.fsdp_size (found {size}) must be -1 or divide trainer.devices * trainer.num_nodes (found "
        f"{world}). Nearest: {batch_rules.nearest(size, legal)}."
    )


def parallel_sizes(settings: Settings) -> str | None:
    """Rule 30, of the trainer's own sizes."""
    if not is_fsdp(settings):
        return None
    data, tensor = (
        settings.get(f"trainer.strategy.{name}_parallel_size", default)
        for name, default in (("data", None), ("tensor", 1))
    )
    world = batch_rules.ranks(settings)
    if tensor != 1:
        return (
            f"trainer.strategy.tensor_parallel_size (found {tensor}) must be 1: trainer=fsdp brings whole "
            "layers together in turn and does not cut them; more processes (trainer.devices) divide the "
            "memory, and rollout.engine.tensor_parallel_size cuts the layers of a vLLM engine."
        )
    if data not in (None, world):
        return (
            f"trainer.strategy.data_parallel_size (found {data}) must be null or trainer.devices * "
            f"trainer.num_nodes (found {world}): every process has rows of its own. For groups that share "
            f"one set of weights set {BLOCK}.fsdp_size."
        )
    return None


def sequence_parallel(settings: Settings) -> str | None:
    """Rule 31."""
    key = "model.ulysses_sequence_parallel_size"
    size = settings.get(key, 1)
    if size == 1:
        return None
    return (
        f"{key} (found {size}) must be 1: no process shares a sequence with another one here; for long rows "
        "set model.gradient_checkpointing=true and algo.batch.micro_batch_size=1."
    )


def without_fsdp(settings: Settings) -> str | None:
    """What needs whole weights on one process, or other tensors than those that are cut."""
    if not is_fsdp(settings):
        return None
    precision, optim = str(settings["trainer.precision"]), str(settings["optim._target_"])
    dtype = settings.get("rollout.engine.dtype", "auto")
    refused = {
        f"trainer.precision (found {precision!r}) must not scale losses": precision == "16-mixed",
        f"optim (found {optim}) must be an optimizer of torch": not optim.startswith("torch."),
        "model.kernels.torch_compile (found True) must be false: nobody tried it over cut weights": (
            bool(settings.get("model.kernels.torch_compile"))
        ),
        "optim.fused (found True) must be false with optim=sgd, whose kernel does not take cut weights": (
            optim.endswith(".SGD") and bool(settings.get("optim.fused"))
        ),
        f"rollout.engine.dtype (found {dtype!r}) must be auto with rollout=hf, or it copies the policy": (
            str(settings.get("rollout.engine._target_", "")).endswith(".HFEngine") and dtype != "auto"
        ),
        "callbacks.push_to_hub (found on) must be off, since it copies the policy; push the run's checkpoint "
        "with `python -m lit_rl.export` afterwards": settings.get("callbacks.push_to_hub") is not None,
        f"task (found {settings['task']!r}) must not be search, which puts weights back": (
            settings["task"] == "search"
        ),
    }
    found = [text for text, is_refused in refused.items() if is_refused]
    return f"With trainer=fsdp {' and '.join(found)}." if found else None
