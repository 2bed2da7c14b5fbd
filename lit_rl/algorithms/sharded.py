"""FullyShardedStrategy: trainer=fsdp, the weights of every network cut over the processes (FSDP2).

Lightning's own ModelParallelStrategy would write checkpoints of its own form, and knows nothing of the copies
beside the policy. Here a checkpoint is the same whatever the number of processes: whole tensors, so that a
run resumes on another number of them, or on one.
"""

from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lit_rl.batch import RolloutBatch
from lit_rl.distributed import all_max_
from lit_rl.errors import ConfigError
from lit_rl.models.sharding import is_sharded, like, shard_, sharding_of, whole

if TYPE_CHECKING:
    from lit_rl.algorithms.base import RLModule


class FullyShardedStrategy(DDPStrategy):
    """One process per device; each holds its part of weights, gradients and optimizer state.

    Every process has rows of its own, as with trainer=ddp. `model.fsdp_config` says how a model is cut.

    Args:
        data_parallel_size: processes that have rows of their own; null is all.
        tensor_parallel_size: processes that share the rows and cut each layer; only 1 is built.
        process_group_backend: null is gloo on CPU, nccl on GPU, with gloo beside it for weights that rest in
            CPU memory.
        timeout: until a collective fails.

    Raises:
        ConfigError: tensor_parallel_size above 1.
    """

    def __init__(
        self,
        data_parallel_size: int | None = None,
        tensor_parallel_size: int = 1,
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(seconds=1800),
    ) -> None:
        super().__init__(process_group_backend=process_group_backend, timeout=timeout)
        if tensor_parallel_size != 1:
            raise ConfigError(
                f"trainer.strategy.tensor_parallel_size must be 1 (found {tensor_parallel_size!r}): layers "
                "are not cut by trainer=fsdp; rollout.engine.tensor_parallel_size cuts those of vLLM."
            )
        self._data_parallel_size = data_parallel_size
        self._meshes: dict[int, DeviceMesh] = {}

    def _get_process_group_backend(self) -> str:
        if self._process_group_backend is None and self.root_device.type == "cuda":
            return "cpu:gloo,cuda:nccl"
        return super()._get_process_group_backend()

    def setup_environment(self) -> None:
        super().setup_environment()
        if self._data_parallel_size not in (None, self.world_size):
            raise ConfigError(
                f"trainer.strategy.data_parallel_size must be null or {self.world_size}, trainer.devices * "
                f"trainer.num_nodes (found {self._data_parallel_size!r})."
            )

    def mesh(self, group: int) -> DeviceMesh:
        """The processes, in one dimension, or as copies of groups.

        Args:
            group: processes that share one set of weights; -1 is all.
        """
        size = self.world_size if group == -1 else group
        if self.world_size % size:
            raise ConfigError(
                f"model.fsdp_config.fsdp_size must divide the {self.world_size} processes (found {group!r})."
            )
        if size not in self._meshes:
            copies, kind = self.world_size // size, self.root_device.type
            shape, names = ((size,), ("shard",)) if copies == 1 else ((copies, size), ("copy", "shard"))
            self._meshes[size] = init_device_mesh(kind, shape, mesh_dim_names=names)
        return self._meshes[size]

    def setup(self, trainer: L.Trainer) -> None:
        """As DDP's, without its wrapper, which would sum gradients a second time."""
        assert self.accelerator is not None and self.model is not None
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
            networks = networks_of(trainer.lightning_module)
            for optimizer, network in zip(self.optimizers, networks, strict=True):
                if sharding_of(network).optimizer_offload:
                    rest_in_memory_(optimizer, self.root_device)
        self.setup_precision_plugin()

    def model_to_device(self) -> None:
        """Nothing to move but the device's name: `shard_` has put every weight where it rests."""
        assert self.lightning_module is not None
        self.lightning_module._device = self.root_device

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Whole weights. Collective; the values are kept by the first process of each node alone."""
        assert self.lightning_module is not None
        found = dict(super().lightning_module_state_dict())
        names: dict[int, str] = {}
        tied = {}  # further names of a parameter: one tensor in the file, as without sharding
        for name, parameter in self.lightning_module.named_parameters(remove_duplicate=False):
            if names.setdefault(id(parameter), name) != name and found.pop(name, None) is not None:
                tied[name] = names[id(parameter)]
        kept = whole(found, is_kept=self.local_rank == 0)
        return kept | {name: kept[first] for name, first in tied.items()}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """The whole state. Collective, as `lightning_module_state_dict`."""
        return whole(super().optimizer_state(optimizer), is_kept=self.local_rank == 0)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        own = self.lightning_module.state_dict()
        given = {
            name: like(tensor, own[name]) if name in own else tensor
            for name, tensor in checkpoint["state_dict"].items()
        }
        self.lightning_module.load_state_dict(given, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        states = [
            _cut(state, optimizer)
            for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False)
        ]
        super().load_optimizer_state_dict({**checkpoint, "optimizer_states": states})


def _cut(state: dict[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """An optimizer's whole state with each tensor of a parameter's shape cut as that parameter."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    entries = {
        number: {
            name: like(value, parameters[number])
            if isinstance(value, Tensor) and value.shape == parameters[number].shape
            else value
            for name, value in entry.items()
        }
        for number, entry in state["state"].items()
    }
    return {**state, "state": entries}


def shard_networks_(module: "RLModule") -> None:
    """Under trainer=fsdp: cut what is trained and the copies beside it, once, before optimizers are made.

    Args:
        module: its networks and roles are whole.
    """
    strategy = module.trainer.strategy
    if not isinstance(strategy, FullyShardedStrategy) or is_sharded(module.policy):
        return
    if isinstance(module.optimizer, Optimizer):
        raise ConfigError(
            "With trainer=fsdp the module's optimizer must be a callable over parameters (found a "
            f"{type(module.optimizer).__name__}, over weights that are whole); give functools.partial(...)."
        )
    own = sharding_of(module.policy)
    mesh = strategy.mesh(own.fsdp_size)
    for role in (module.ref, module.teacher):
        if role is not None:
            role.shard_(lambda model: shard_(model, own, mesh, offloads=False))
    for network in networks_of(module):
        shard_(network, sharding_of(network), strategy.mesh(sharding_of(network).fsdp_size))


def networks_of(module: L.LightningModule) -> list[nn.Module]:
    """What is trained, in the order of the optimizers."""
    return [network for network in module.children() if any(p.requires_grad for p in network.parameters())]


def rest_in_memory_(optimizer: Optimizer, device: torch.device) -> None:
    """Keep the optimizer's state in CPU memory but while it steps.

    Args:
        optimizer: over cut parameters.
        device: where it steps.
    """

    def moved(to: torch.device) -> None:
        for state in optimizer.state.values():
            for value in state.values():
                if isinstance(value, DTensor):
                    value._local_tensor = value._local_tensor.to(to)

    optimizer.register_step_pre_hook(lambda *_: moved(device))
    optimizer.register_step_post_hook(lambda *_: moved(torch.device("cpu")))


def even(pieces: list[RolloutBatch], policy: nn.Module) -> list[RolloutBatch]:
    """The micro-batches of this process, and idle ones until every process has as many. Collective.

    A pass of a sharded network is a collective. An idle micro-batch counts no token.

    Args:
        pieces: at least one.
        policy: if it is not sharded, the pieces stay as they are.
    """
    if not is_sharded(policy):
        return pieces
    most = int(all_max_(torch.tensor(len(pieces), device=pieces[0].prompt_ids.device)))
    return pieces + [idle(pieces[0])] * (most - len(pieces))


def idle(piece: RolloutBatch) -> RolloutBatch:
    """One row of a micro-batch with no token that counts."""
    row = piece.select([0])
    assert row.completion_mask is not None
    row.completion_mask = torch.zeros_like(row.completion_mask)
    if row.self_distillation_mask is not None:
        row.self_distillation_mask = torch.zeros_like(row.self_distillation_mask)
    return row
