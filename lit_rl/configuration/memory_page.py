"""The memory plan in words: what a run takes, whether it fits, and what to change if it does not."""

import copy
from typing import Any

import psutil
import torch

from lit_rl.configuration import batch_rules
from lit_rl.configuration.memory import Memory, memory_of
from lit_rl.configuration.plan import page
from lit_rl.configuration.settings import Settings
from lit_rl.configuration.sharding_rules import TARGET
from lit_rl.configuration.tree import at
from lit_rl.paths import resolve_model_path

SAVINGS = (  # key, the value that takes less memory; the cheapest in time first
    ("algo.batch.micro_batch_size", 1),
    ("model.gradient_checkpointing", True),
    ("rollout.engine.max_num_seqs", 8),
    ("model.lora.lora_rank", 16),
    ("model.dtype", "bfloat16"),
)
CAUSES = {
    "generation": "rollout.engine.max_num_seqs",
    "validation": "data.val_batch_size, rollout.engine.max_num_seqs",
    "scoring": "algo.batch.score_micro_batch_size",
    "update": "algo.batch.micro_batch_size, model.gradient_checkpointing",
}


def memory_page(settings: Settings, tree: dict[str, Any], datamodule: Any) -> str:
    """The page that `plan=true` adds to the plan.

    Args:
        settings: the checked configuration.
        tree: the same with links expanded.
        datamodule: built.
    """
    reason = _unknown(tree)
    if reason is not None:
        return page([("memory", [f"not known before the run: {reason}"])])
    ranks = batch_rules.ranks(settings)
    memory, free = memory_of(tree, datamodule, ranks), free_bytes(tree)
    share = free // ranks if _is_cpu(tree) else free
    return page(
        [("memory", [*_sentences(memory), _verdict(memory, share), _less(tree, datamodule, ranks, memory)])]
    )


def free_bytes(tree: dict[str, Any]) -> int:
    """Bytes that are free now where the run would be, all its ranks together on a CPU."""
    return psutil.virtual_memory().available if _is_cpu(tree) else torch.cuda.mem_get_info()[0]


def _is_cpu(tree: dict[str, Any]) -> bool:
    return tree["trainer"]["accelerator"] == "cpu" or not torch.cuda.is_available()


def _unknown(tree: dict[str, Any]) -> str | None:
    """Why there is nothing to follow on the meta device."""
    if not tree["model"]["_target_"].endswith("models.load.load_policy"):
        return f"model is made by {tree['model']['_target_']}"
    if isinstance(strategy := tree["trainer"]["strategy"], dict) and strategy["_target_"].endswith(TARGET):
        return "trainer=fsdp brings weights together layer by layer, which is not followed"
    path = tree["model"]["path"]
    if not resolve_model_path(path).is_local:
        return f"model.path {path!r} is not on this machine yet"
    if tree["model"]["model_init_kwargs"]:
        return "model.model_init_kwargs may change how weights are held"
    return None


def _sentences(memory: Memory) -> list[str]:
    parts = ", ".join(f"{name} {shown(size)}" for name, size in memory.parts.items())
    lines = [f"always: {parts}"]
    for name, size in memory.phases.items():
        inside = f", of it keys and values {shown(memory.caches[name])}" if name in memory.caches else ""
        inside = ", activations and logits of a micro-batch, gradients" if name == "update" else inside
        lines.append(f"on top, {name}: {shown(size)}{inside}  ({CAUSES[name]})")
    return [*lines, memory.rows]


def _verdict(memory: Memory, free: int) -> str:
    fits = "it fits" if memory.total < free else "it does not fit: change something of the next line"
    return (
        f"at most {shown(memory.total)} of tensors on a rank, beside the process; {shown(free)} free: {fits}"
    )


def _less(tree: dict[str, Any], datamodule: Any, ranks: int, memory: Memory) -> str:
    """What each saving alone would bring the total to; those that save nothing are left out."""
    found = []
    for key, value in SAVINGS:
        changed = _changed(tree, key, value)
        if changed is None:
            continue
        total = memory_of(changed, datamodule, ranks).total
        if total < 0.95 * memory.total:
            found.append(f"{key}={str(value).lower()} {shown(total)}")
    return f"with one change: {', '.join(found)}" if found else "no single key saves more than a twentieth"


def _changed(tree: dict[str, Any], key: str, value: Any) -> dict[str, Any] | None:
    """The tree with one value changed; None where that is no saving or no choice here."""
    place, _, name = key.rpartition(".")
    node = at(tree, place)
    if not isinstance(node, dict) or name not in node or node[name] == value:
        return None
    if key == "algo.batch.micro_batch_size" and (node[name] is None or node[name] <= value):
        return None
    if key == "rollout.engine.max_num_seqs" and node[name] <= value:
        return None
    if key == "model.lora.lora_rank" and node[name] > 0:
        return None
    changed = copy.deepcopy(tree)
    at(changed, place)[name] = value
    return changed


def shown(size: int) -> str:
    """Bytes for a reader."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6)):
        if size >= scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size / 1e3:.3g} kB"
