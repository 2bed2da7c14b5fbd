"""What shares a model out over processes, in TRL's arguments and verl's: by weights, tensors, sequences."""

import json
from pathlib import Path
from typing import Any

from lit_rl.migrate.draft import DIFFERS, NOT_YET, TAKEN, Draft
from lit_rl.migrate.rows import by_name

BLOCK = "model.fsdp_config"
ULYSSES = "model.ulysses_sequence_parallel_size"
OF_FSDP1 = (
    *("backward_prefetch", "forward_prefetch", "limit_all_gathers", "sync_module_states", "use_orig_params"),
    *("cpu_ram_efficient_loading", "xla", "xla_fsdp_settings", "xla_fsdp_grad_ckpt", "xla_fsdp_v2"),
)
"""Entries of `fsdp_config` that FSDP2 has no use for, without the prefix that accelerate puts before them."""


def fsdp(draft: Draft, key: str, value: Any, args: dict[str, Any], sizes: Any) -> None:
    """TRL's `fsdp`: a switch, or words such as "full_shard auto_wrap offload"."""
    words = value.split() if isinstance(value, str) else [str(word) for word in value or []]
    if value is not True and not words:
        draft.say(key, value, TAKEN, "nothing: trainer keeps its choice.")
        return
    draft.choose(key, value, "trainer", "fsdp")
    for word in words:
        if word == "offload":
            draft.take(key, value, f"{BLOCK}.param_offload", True)
        elif word in ("shard_grad_op", "hybrid_shard_zero2"):
            draft.say(key, value, DIFFERS, "so: weights are cut again after each pass, not after the step.")
        if word.startswith("hybrid_shard"):
            draft.say(key, value, DIFFERS, f"so: give {BLOCK}.fsdp_size, the devices of a node.")


def fsdp_config(draft: Draft, key: str, value: Any, args: dict[str, Any], sizes: Any) -> None:
    """TRL's `fsdp_config`: entries by name, given as a map or a JSON file."""
    entries = json.loads(Path(value).read_text()) if isinstance(value, str) else dict(value or {})
    if not entries:
        draft.say(key, value, TAKEN, f"nothing: {BLOCK} keeps its defaults.")
    for name, below in entries.items():
        _fsdp_entry(draft, f"{key}.{name}", name.removeprefix("fsdp_"), below)


def _fsdp_entry(draft: Draft, theirs: str, name: str, value: Any) -> None:
    if name == "transformer_layer_cls_to_wrap":
        names = value.split(",") if isinstance(value, str) else value
        draft.take(theirs, value, f"{BLOCK}.{name}", [text.strip() for text in names] if names else None)
    elif name == "min_num_params":
        draft.take(theirs, value, f"{BLOCK}.{name}", int(value))
    elif name == "offload_params":
        draft.take(theirs, value, f"{BLOCK}.param_offload", value)
    elif name == "activation_checkpointing":
        draft.take(theirs, value, "model.gradient_checkpointing", value)
    elif name == "version":
        text = "trainer=fsdp, which is FSDP2." if value == 2 else "so: trainer=fsdp is FSDP2, not FSDP1."
        draft.say(theirs, value, TAKEN if value == 2 else DIFFERS, text)
    elif name == "reshard_after_forward" and value in (True, "FULL_SHARD"):
        draft.say(theirs, value, TAKEN, "nothing: weights are cut again after each pass.")
    elif name in OF_FSDP1:
        draft.say(theirs, value, NOT_YET, "and not with FSDP2, which has no such choice; take it out.")
    else:
        draft.say(theirs, value, NOT_YET, f"{BLOCK} has nothing for it.")


def parallelism_config(draft: Draft, key: str, value: Any, args: dict[str, Any], sizes: Any) -> None:
    """TRL's `parallelism_config`: sizes by data, tensor and sequence; only the first may exceed 1."""
    entries = dict(value or {})
    if not entries:
        draft.say(key, value, TAKEN, "nothing: every process has rows of its own.")
        return
    copies, shard = (entries.pop(f"dp_{name}_size", None) or 1 for name in ("replicate", "shard"))
    if copies * shard > 1:
        draft.choose(key, value, "trainer", "fsdp" if shard > 1 else "ddp")
    if shard > 1:
        draft.take(key, value, "trainer.strategy.data_parallel_size", copies * shard)
        if copies > 1:
            draft.take(key, value, f"{BLOCK}.fsdp_size", shard)
    ours = {"tp_size": "trainer.strategy.tensor_parallel_size", "cp_size": ULYSSES, "sp_size": ULYSSES}
    for name, size in entries.items():
        if name not in ours:
            draft.say(f"{key}.{name}", size, NOT_YET, "no counterpart; take it out.")
        elif size in (None, 1):
            draft.say(f"{key}.{name}", size, TAKEN, f"nothing: {ours[name]} is 1.")
        else:
            _say_only_one(draft, f"{key}.{name}", size, ours[name])


def ulysses(draft: Draft, key: str, value: Any, args: dict[str, Any]) -> None:
    """verl's `ulysses_sequence_parallel_size`."""
    if isinstance(value, int) and value > 1:
        _say_only_one(draft, key, value, ULYSSES)
    else:
        draft.take(key, value, ULYSSES, value, by_name("verl")[key])


def offload(draft: Draft, key: str, value: Any, args: dict[str, Any]) -> None:
    """verl's two SFT switches, which count together."""
    if all(args.get(f"model.fsdp_config.{name}", False) for name in ("cpu_offload", "offload_params")):
        draft.take(key, value, f"{BLOCK}.param_offload", True)
        draft.take(key, value, f"{BLOCK}.optimizer_offload", True)
        draft.choose(key, value, "trainer", "fsdp")
    else:
        draft.say(key, value, TAKEN, "nothing: off.")


def _say_only_one(draft: Draft, theirs: str, found: Any, ours: str) -> None:
    draft.say(theirs, found, NOT_YET, f"{ours} must be 1: trainer=fsdp gives each process its own rows.")


TRL = {"fsdp": fsdp, "fsdp_config": fsdp_config, "parallelism_config": parallelism_config}
VERL = {f"actor_rollout_ref.{role}.ulysses_sequence_parallel_size": ulysses for role in ("actor", "ref")}
