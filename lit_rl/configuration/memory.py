"""The memory plan: what a run will hold at once, part by part, before any weights are read.

The model is built on the meta device and its passes are followed there with the code that trains. Left out is
what is no tensor of the run: the process with its libraries, what a kernel needs for itself, fragmentation,
and engines outside this process.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lit_rl.batch import RolloutBatch
from lit_rl.configuration.build import built
from lit_rl.configuration.signature import resolved
from lit_rl.configuration.tree import NODE_KEYS, at
from lit_rl.functional.distillation import Source
from lit_rl.functional.logps import Head, token_logps
from lit_rl.memory import MetaPass, parameter_bytes, peak_of
from lit_rl.models.flat_attention import shares_prefixes
from lit_rl.models.parameters import decay_groups
from lit_rl.models.score import completion_hidden, head_of, rows_of
from lit_rl.models.weights import base_of, base_tensors, has_adapters
from lit_rl.rollout.memory import DecodingMemory, decoding_memory
from lit_rl.rollout.prepacked import prepacked_bytes

SEEN_ROWS = 256  # training rows that prompt lengths are taken from


@dataclass
class Memory:
    """Bytes on one rank.

    Attributes:
        parts: what stays from step to step, by name.
        phases: what comes on top, by name; one phase at a time. Gradients belong to the update.
        caches: keys and values, the part that they have in a phase.
        rows: the shape of a step, in words.
    """

    parts: dict[str, int] = field(default_factory=dict)
    phases: dict[str, int] = field(default_factory=dict)
    caches: dict[str, int] = field(default_factory=dict)
    rows: str = ""

    @property
    def total(self) -> int:
        """Everything at once, at most."""
        return sum(self.parts.values()) + max(self.phases.values(), default=0)


@dataclass
class Shape:
    """The rows of an optimizer batch on one rank, every one at its limit.

    Attributes:
        rows: with prompts, completions and, where a teacher reads in this process, its prompts.
        pieces: micro-batches, the largest first.
        prompts, completions: P and P * G of a step on this rank.
        prompt_tokens, completion_tokens: S and T.
    """

    rows: RolloutBatch
    pieces: list[RolloutBatch]
    prompts: int
    completions: int
    prompt_tokens: int
    completion_tokens: int


def memory_of(tree: dict[str, Any], datamodule: Any, ranks: int = 1) -> Memory:
    """What a run takes on each rank.

    Args:
        tree: the checked configuration, links expanded.
        datamodule: built; its first rows say how long prompts are.
        ranks: data-parallel ranks.
    """
    policy, critic = _skeletons(tree)
    shape = _shape(tree, datamodule, ranks, policy)
    engine = _engine(tree)
    memory = Memory(_parts(tree, policy, critic), rows=_words(shape))
    if engine is not None:
        own, wanted = base_of(policy).dtype, engine.get("dtype", "auto")
        dtype = own if wanted == "auto" else getattr(torch, wanted)
        if dtype is not own:
            memory.parts[f"decoding copy in {wanted}"] = dtype.itemsize * _numbers(policy.parameters())
        prepacked = 0 if _is_gpu(tree) else prepacked_bytes(base_of(policy), dtype)
        for name, work in _generations(tree, shape, policy, engine).items():
            found = work()
            memory.phases[name], memory.caches[name] = found.peak + prepacked, found.cache
    memory.phases["scoring"] = peak_of(partial(_scored, tree, policy, shape))
    memory.phases["update"] = peak_of(partial(_updated, tree, policy, critic, shape))
    trained = [model for model in (policy, critic) if model is not None]
    gradients = sum(parameter_bytes(model, is_trained=True) for model in trained)
    memory.phases["update"] = max(memory.phases["update"], gradients)
    return memory


# ------------------------------------------------------------------------------------------------------ parts


def _skeletons(tree: dict[str, Any]) -> tuple[nn.Module, nn.Module | None]:
    """Policy and critic on the meta device."""
    critic = at(tree, "algo.critic.model")
    with torch.device("meta"):
        return _skeleton(tree["model"]), _skeleton(critic) if critic else None


def _skeleton(node: dict[str, Any]) -> nn.Module:
    """The model of a node; what it computes again in a backward runs as in the forward."""
    arguments = {name: value for name, value in node.items() if name not in NODE_KEYS}
    settings = ("lora", "kernels", "fsdp_config")
    blocks = {name: built(value) for name, value in arguments.items() if name in settings}
    if node["gradient_checkpointing"]:
        given = node["gradient_checkpointing_kwargs"] or {}
        arguments["gradient_checkpointing_kwargs"] = {**given, "context_fn": _recomputing}
    return resolved(node["_target_"])(**{**arguments, **blocks})


def _recomputing() -> tuple[AbstractContextManager, AbstractContextManager]:
    return nullcontext(), MetaPass()  # torch runs a backward without function modes


def _parts(tree: dict[str, Any], policy: nn.Module, critic: nn.Module | None) -> dict[str, int]:
    parts = {
        "weights": parameter_bytes(policy),
        "optimizer": optimizer_bytes(tree["optim"], policy),
    }
    parts.update(_copies(tree, policy))
    if critic is not None:
        parts["critic"] = parameter_bytes(critic)
        parts["critic's optimizer"] = optimizer_bytes(tree["algo"]["critic"]["optim"], critic)
    return {name: size for name, size in parts.items() if size}


def optimizer_bytes(node: dict[str, Any], model: nn.Module) -> int:
    """State of an optimizer after a step, taken on the meta device; its fused form has the same.

    Args:
        node: makes the optimizer from parameter groups.
        model: on the meta device.
    """
    plain = {name: value for name, value in node.items() if name != "fused"}
    optimizer = built(plain)(decay_groups(model))
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    tensors = [value for state in optimizer.state.values() for value in state.values()]
    return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor))


def _copies(tree: dict[str, Any], policy: nn.Module) -> dict[str, int]:
    """Weights of the other roles, as `models.roles` keeps them."""
    algo, copies = tree["algo"], {}
    weight = at(algo, "distillation.distillation_weight") or 0.0
    is_kept = (at(algo, "kl.beta") or 0.0) > 0 or bool(at(algo, "kl.use_kl_in_reward"))
    if is_kept and weight < 1:
        path, moves = at(algo, "ref.path"), "reference_sync" in tree["callbacks"]
        kept = _averaged(policy) if moves else parameter_bytes(policy) if path else _frozen(policy)
        copies["reference"] = 0 if algo["ref"]["param_offload"] and _is_gpu(tree) else kept
    if weight > 0:
        kind = algo["teacher"]["teacher_model_kind"]
        copies["teacher"] = {"ema": _averaged, "live": lambda _: 0}.get(kind, _frozen)(policy)
    return copies


def _frozen(policy: nn.Module) -> int:
    return 0 if has_adapters(policy) else parameter_bytes(policy, is_trained=True)


def _averaged(policy: nn.Module) -> int:
    """Sums in float32, and a model in the policy's dtype where that is another."""
    moving = {t.tensor.untyped_storage()._cdata: t.tensor for t in base_tensors(policy) if t.is_moving}
    numbers, own = _numbers(moving.values()), base_of(policy).dtype
    size = torch.promote_types(own, torch.float32).itemsize
    return numbers * (size if size == own.itemsize else size + own.itemsize)


def _numbers(tensors: Any) -> int:
    return sum(tensor.numel() for tensor in tensors)


def _is_gpu(tree: dict[str, Any]) -> bool:
    return tree["trainer"]["accelerator"] != "cpu" and torch.cuda.is_available()


# ------------------------------------------------------------------------------------------------------- rows


def _shape(tree: dict[str, Any], datamodule: Any, ranks: int, policy: nn.Module) -> Shape:
    algo, group = tree["algo"], tree["algo"].get("num_generations", 1)
    known = datamodule.train_rows(range(min(SEEN_ROWS, datamodule.num_rows()["train"])))
    prompt_tokens = int(known.prompt_len.max())
    if "sampling" in algo:
        completion_tokens = algo["sampling"]["max_completion_length"]
    else:
        completion_tokens = int(known.completion_len.max())
    prompts = tree["data"]["train_batch_size"] // ranks
    completions = prompts * group
    size = (algo["batch"]["optimizer_batch_size"] or completions * ranks) // ranks
    rows = _rows(size, group, prompt_tokens, completion_tokens)
    is_taught = (at(algo, "distillation.distillation_weight") or 0.0) > 0
    if is_taught and not algo["teacher"]["use_teacher_server"]:
        rows.teacher_prompt_ids, rows.teacher_prompt_len = _teacher_prompts(tree, datamodule, rows)
    pieces = list(built(algo["batch"]).micro_batches(rows, is_sharing=shares_prefixes(policy)))
    return Shape(rows, pieces, prompts, completions, prompt_tokens, completion_tokens)


def _rows(size: int, group: int, prompt_tokens: int, completion_tokens: int) -> RolloutBatch:
    prompt = torch.arange(size) // group
    full = torch.full((size,), completion_tokens)
    return RolloutBatch(
        prompt_ids=prompt[:, None].expand(-1, prompt_tokens).contiguous(),
        prompt_len=torch.full((size,), prompt_tokens),
        prompt_row=prompt,
        num_generations=group,
        completion_ids=torch.zeros(size, completion_tokens, dtype=torch.long),
        completion_len=full,
        completion_mask=torch.ones(size, completion_tokens, dtype=torch.bool),
    )


def _teacher_prompts(tree: dict[str, Any], datamodule: Any, rows: RolloutBatch) -> tuple[Tensor, Tensor]:
    """The question, a solution at the limit, and the words of the template around them."""
    reprompt = tree["algo"]["reprompt"]
    words = f"{reprompt['reprompt_template']}{reprompt['solution_template']}"
    template = len(datamodule.chat.tokenizer(words, add_special_tokens=False)["input_ids"])
    wanted = rows.prompt_ids.shape[1] + rows.completion_ids.shape[1] + template  # type: ignore[union-attr]
    width = min(wanted, reprompt["max_reprompt_len"])
    return rows.prompt_row[:, None].expand(-1, width).contiguous(), torch.full((len(rows),), width)


def _words(shape: Shape) -> str:
    return (
        f"{len(shape.pieces[0])} rows in a micro-batch, of {shape.prompt_tokens} prompt tokens (the longest "
        f"of the first {SEEN_ROWS} rows) and {shape.completion_tokens} completion tokens (the limit)"
    )


# ----------------------------------------------------------------------------------------------------- phases


def _engine(tree: dict[str, Any]) -> dict[str, Any] | None:
    """The settings of an engine that decodes with the training model or its copy; None for another one."""
    node = at(tree, "rollout.engine")
    return node if node and node["_target_"].endswith(".HFEngine") and "sampling" in tree["algo"] else None


def _generations(
    tree: dict[str, Any], shape: Shape, policy: nn.Module, engine: dict[str, Any]
) -> dict[str, Callable[[], DecodingMemory]]:
    """Training and validation, as functions that find out what they take."""
    sampling = built(tree["algo"]["sampling"]).effective()
    counts = {"generation": (shape.prompts, shape.completions, sampling)}
    if tree["trainer"]["val_check_interval"] and tree["data"]["val_files"] is not None:
        own = built(tree["rollout"]["val_kwargs"])
        prompts = tree["data"]["val_batch_size"]
        counts["validation"] = (prompts, prompts * own.n, own.over(sampling).effective())
    model, most = base_of(policy), engine["max_num_seqs"]
    return {
        name: partial(
            decoding_memory,
            model,
            settings,
            prompts=min(prompts, most),
            rows=min(rows, most),
            prompt_tokens=shape.prompt_tokens,
            cache_implementation=engine["cache_implementation"],
        )
        for name, (prompts, rows, settings) in counts.items()
    }


@torch.no_grad()
def _scored(tree: dict[str, Any], policy: nn.Module, shape: Shape) -> None:
    """A pass without gradient, with the longer prompts of the teacher where there is one."""
    batch = built(tree["algo"]["batch"])
    rows = _as_teacher(shape.rows) if shape.rows.teacher_prompt_ids is not None else shape.rows
    piece = rows.select(next(iter(batch.score_batches(rows, is_sharing=shares_prefixes(policy)))))
    hidden = completion_hidden(policy, rows_of(piece))
    token_logps(hidden, head_of(policy), _targets(hidden), temperature=_temperature(tree))


def _updated(tree: dict[str, Any], policy: nn.Module, critic: nn.Module | None, shape: Shape) -> None:
    """Forward and backward of the first micro-batches; the second finds the gradients of the first."""
    for piece in shape.pieces[:2]:
        loss = _policy_loss(tree, policy, piece)
        if critic is not None:
            values: Any = critic
            loss = loss + values.head(completion_hidden(values.backbone, rows_of(piece)).float()).sum()
        loss.backward()
    for model in (policy, critic):
        if model is not None:
            model.zero_grad()


def _policy_loss(tree: dict[str, Any], policy: nn.Module, piece: RolloutBatch) -> Tensor:
    settings, temperature, theirs = at(tree, "algo.distillation"), _temperature(tree), None
    has_gaps = settings and settings["distillation_weight"] > 0 and not built(settings).is_sampled
    if has_gaps and piece.teacher_prompt_ids is not None:
        with torch.no_grad():
            theirs = completion_hidden(policy, rows_of(_as_teacher(piece)))
    hidden, head = completion_hidden(policy, rows_of(piece)), head_of(policy)
    if has_gaps:
        # Where a server teaches, a second pass stands in for its entries, which are fewer.
        of_teacher = Head(head.weight.detach(), None, head.multiplier, head.softcap)
        sources = [Source(hidden.detach() if theirs is None else theirs, of_teacher)]
        gaps = built(settings).gaps(hidden, head, sources, _targets(hidden), temperature)
        loss = gaps.divergence.sum()
        return loss if settings["distillation_weight"] == 1 else loss + gaps.logps.sum()
    logps, _ = token_logps(hidden, head, _targets(hidden), temperature=temperature, with_entropy=True)
    return logps.sum()


def _as_teacher(rows: RolloutBatch) -> RolloutBatch:
    assert rows.teacher_prompt_ids is not None and rows.teacher_prompt_len is not None
    return replace(rows, prompt_ids=rows.teacher_prompt_ids, prompt_len=rows.teacher_prompt_len)


def _targets(hidden: Tensor) -> Tensor:
    return torch.zeros(len(hidden), dtype=torch.long, device=hidden.device)


def _temperature(tree: dict[str, Any]) -> float:
    return at(tree, "algo.sampling.temperature") or 1.0
