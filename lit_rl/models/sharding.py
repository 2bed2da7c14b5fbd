"""FSDP2: the weights of a model cut over processes, and how passes come by the whole ones.

`shard_` cuts a model with torch's `fully_shard`: a pass gathers one unit (a decoder layer) at a time, a
backward sums its gradients over all processes and leaves each process its part. Every such pass is a
collective, so all processes have to make the same number of them. Passes without gradients, whose number is
not the same (rows with a teacher, tokens to write), run inside `gathered`, which brings all weights of a
model together once.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from lit_rl.errors import ConfigError
from lit_rl.models.weights import base_of


@dataclass(frozen=True)
class Sharding:
    """How trainer=fsdp cuts a model (source: verl `actor.fsdp_config`). Without effect in other runs.

    Args:
        transformer_layer_cls_to_wrap: classes of the layers that are gathered on their own; null is the
            decoder layers that the model names.
        min_num_params: instead, every module with at least so many parameters, those of inner such modules
            not counted; 0 is off.
        param_offload: weights, gradients and optimizer state rest in CPU memory, where the optimizer runs; a
            layer comes to the GPU to be used.
        optimizer_offload: the optimizer's state rests in CPU memory between two optimizer steps; with
            param_offload it is there in any case.
        fsdp_size: processes that share one set of weights, with as many sets as there are such groups; -1 is
            all processes.

    Raises:
        ConfigError: a value is out of range, or both ways to choose units are set.
    """

    key: ClassVar[str] = "model.fsdp_config"

    transformer_layer_cls_to_wrap: list[str] | None = None
    min_num_params: int = 0
    param_offload: bool = False
    optimizer_offload: bool = False
    fsdp_size: int = -1

    def __post_init__(self) -> None:
        if self.min_num_params < 0:
            raise ConfigError(f"{self.key}.min_num_params must be >= 0 (found {self.min_num_params!r}).")
        if self.fsdp_size != -1 and self.fsdp_size < 1:
            raise ConfigError(f"{self.key}.fsdp_size must be -1 or >= 1 (found {self.fsdp_size!r}).")
        if self.transformer_layer_cls_to_wrap is not None and self.min_num_params:
            raise ConfigError(
                f"{self.key}.transformer_layer_cls_to_wrap (found {self.transformer_layer_cls_to_wrap!r}) "
                f"and {self.key}.min_num_params (found {self.min_num_params}) are two ways to choose units; "
                "set one."
            )


def set_sharding_(model: nn.Module, sharding: Sharding) -> None:
    """Note how to cut a model, for the time when there is a process group."""
    base_of(model).sharding = sharding


def sharding_of(model: nn.Module) -> Sharding:
    """What was noted; of a critic, for its backbone."""
    return getattr(base_of(getattr(model, "backbone", model)), "sharding", Sharding())


def is_sharded(model: nn.Module) -> bool:
    """Whether `shard_` has cut the model."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def shard_(model: nn.Module, sharding: Sharding, mesh: DeviceMesh, *, offloads: bool | None = None) -> None:
    """Cut a model's parameters over the processes of a mesh, each along its first dimension.

    The output head and the embeddings stay in one unit with what is in no other: a head is read outside of
    its forward, and the two may be one tensor.

    Args:
        model: a Hugging Face causal language model, a PEFT model around one, or a critic; whole, on the CPU
            or on the mesh's device.
        sharding: what is a unit.
        mesh: of one dimension, or of two for copies of groups.
        offloads: weights rest in CPU memory; None is as `sharding` says.

    Raises:
        ConfigError: the model has no layer of the named classes.
    """
    root = model if hasattr(model, "backbone") else base_of(model)
    rests_in_memory = sharding.param_offload if offloads is None else offloads
    policy: OffloadPolicy = CPUOffloadPolicy() if rests_in_memory else OffloadPolicy()
    for unit in [*_units(model, sharding), *_other_dtypes(root), root]:
        dtype = next(unit.parameters()).dtype
        reduced = torch.float32 if dtype in (torch.float16, torch.bfloat16) else None
        fully_shard(
            unit,
            mesh=mesh,
            reshard_after_forward=True,
            mp_policy=MixedPrecisionPolicy(reduce_dtype=reduced),
            offload_policy=policy,
        )
        assert isinstance(unit, FSDPModule)
        unit.set_gradient_divide_factor(1.0)  # losses are shares of the whole batch: their gradients add up
        unit.set_force_sum_reduction_for_comms(True)
        unit.set_reduce_scatter_unused_params(True)
    assert isinstance(root, FSDPModule)
    root._get_fsdp_state()._lazy_init()  # or the first layer to run would take itself for the root


def _units(model: nn.Module, sharding: Sharding) -> list[nn.Module]:
    """Modules that are gathered on their own, inner ones first."""
    base = base_of(getattr(model, "backbone", model))
    ends = {id(base.get_input_embeddings()), id(base.get_output_embeddings())}
    inner = [module for module in base.modules() if ends.isdisjoint(id(m) for m in module.modules())]
    if sharding.min_num_params:
        return _large(inner, sharding.min_num_params)
    names = sharding.transformer_layer_cls_to_wrap or sorted(base._no_split_modules or ())
    units = [module for module in inner if type(module).__name__ in names]
    found = {type(module).__name__ for module in units}
    if sharding.transformer_layer_cls_to_wrap and found != set(names):
        known = sorted({type(module).__name__ for module in inner})
        raise ConfigError(
            f"{sharding.key}.transformer_layer_cls_to_wrap must name classes of layers in the model (found "
            f"{sorted(set(names) - found)!r}, of which {type(base).__name__} has none); it has "
            f"{', '.join(known)}."
        )
    return units[::-1]  # modules() names outer ones first


def _large(modules: list[nn.Module], size: int) -> list[nn.Module]:
    """Modules with at least so many parameters outside of the smaller ones that are in the list."""
    taken: set[int] = set()
    units = []
    for module in reversed(modules):
        own = {id(p): p.numel() for p in module.parameters() if id(p) not in taken}
        if sum(own.values()) >= size and not isinstance(module, nn.ModuleList | nn.ModuleDict):
            taken |= own.keys()
            units.append(module)
    return units


def _other_dtypes(root: nn.Module) -> list[nn.Module]:
    """A critic's head, which is in float32 over a body that need not be: a unit has one dtype."""
    return [root.head] if hasattr(root, "backbone") else []  # type: ignore[list-item]


# ------------------------------------------------------------------------------------------- whole weights


@contextmanager
def gathered(*models: nn.Module) -> Iterator[None]:
    """All weights of the models on every process, for passes without gradients. Collective, at begin and end.

    Inside, parameters are plain whole tensors and passes are no collectives. Models that are not sharded, or
    gathered already, stay as they are.
    """
    units = [unit for model in models for unit in model.modules() if isinstance(unit, FSDPModule)]
    if not units:
        yield
        return
    cut = [unit for unit in units if not _is_whole(unit)]
    for unit in cut:
        unit.set_reshard_after_forward(False, recurse=False)
        unit.unshard()
    try:
        yield
    finally:
        for unit in cut:
            unit.reshard()
            unit.set_reshard_after_forward(True, recurse=False)
        for model in models:
            if not any(parameter.requires_grad for parameter in model.parameters()):
                _forget_passes_(model)


def ready_(base: nn.Module) -> None:
    """Bring a model's embeddings and head together, which a pass uses outside of the model's own forward.

    The next backward cuts them again.
    """
    if isinstance(base, FSDPModule):
        base.unshard()


def _is_whole(unit: FSDPModule) -> bool:
    return all(group.is_unsharded for group in unit._get_fsdp_state()._fsdp_param_groups)


def _forget_passes_(model: nn.Module) -> None:
    """Drop torch's record of passes, which it keeps for a backward that a frozen model never has."""
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            state = unit._get_fsdp_state()
            state._comm_ctx.post_forward_order.clear()
            for group in state._fsdp_param_groups:
                group._post_forward_indices.clear()


def own_part(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor, sharing memory; a plain tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def like(tensor: Tensor, own: Tensor) -> Tensor:
    """A whole tensor, the same on every process, cut as another one is; not a collective."""
    if not isinstance(own, DTensor) or isinstance(tensor, DTensor):
        return tensor
    there = tensor.detach().to(own.device_mesh.device_type)
    return distribute_tensor(there, own.device_mesh, own.placements, src_data_rank=None)


def whole(tree: Any, *, is_kept: bool = True) -> Any:
    """The tree with every cut tensor brought together in CPU memory. Collective.

    Args:
        tree: nested mappings and lists.
        is_kept: this process needs the values; else they are only shapes.
    """
    if isinstance(tree, Mapping):
        return {key: whole(value, is_kept=is_kept) for key, value in tree.items()}
    if isinstance(tree, list):
        return [whole(value, is_kept=is_kept) for value in tree]
    if not isinstance(tree, DTensor):
        return tree
    together = tree.full_tensor().detach()
    return together.cpu() if is_kept else together.to("meta")
