"""Models beside the policy that only score: references and teachers.

A role is a plain object, not a module: its model is in no optimizer, wrapper or checkpoint of the policy.
Weights that a role has moved itself are in its `state_dict`.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn

from lit_rl.errors import ConfigError
from lit_rl.functional.distillation import Source
from lit_rl.functional.ema import lerp_
from lit_rl.models.export import save_hf
from lit_rl.models.load import load_policy
from lit_rl.models.score import Rows, completion_hidden, lasting_head_of
from lit_rl.models.scorer import Scorer
from lit_rl.models.sharding import gathered, like, own_part
from lit_rl.models.weights import (
    base_of,
    base_tensors,
    dense_copy,
    has_adapters,
    has_zero_adapters,
    named_base_tensors,
    shared_copy,
)

__all__ = [
    "AdapterOff",
    "AveragedCopy",
    "FrozenCopy",
    "Live",
    "MovingReference",
    "Offloaded",
    "Role",
    "named_base_tensors",
    "reference_of",
    "save_hf",
]


class Role(Scorer):
    """A model to score with: `with role.model() as model: score(model, rows)`."""

    @abstractmethod
    def model(self) -> AbstractContextManager[nn.Module]:
        """The model in eval mode, with gradients off, as long as the context lasts."""

    def ready(self) -> AbstractContextManager[nn.Module]:
        return self.model()

    def sources(self, rows: Rows) -> list[Source]:
        with self.model() as model:
            return [Source(completion_hidden(model, rows), lasting_head_of(model))]

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        _load_(state, {}, self)


class FrozenCopy(Role):
    """The policy as it was. Parameters that do not train are shared with it.

    Args:
        policy: the model to copy.
        is_own: take the model itself instead of a copy; nobody else may use it.
    """

    def __init__(self, policy: nn.Module, *, is_own: bool = False) -> None:
        self._model: nn.Module = policy.requires_grad_(False).eval() if is_own else shared_copy(policy)
        self._own = _tensors_of(self._model) if is_own else _own_tensors(self._model, policy)

    @contextmanager
    def model(self) -> Iterator[nn.Module]:
        with torch.no_grad(), gathered(self._model):
            yield self._model

    def shard_(self, shard: Callable[[nn.Module], None]) -> None:
        shard(self._model)
        self._own = []

    def to_(self, device: torch.device | str) -> None:
        for tensor in self._own:
            tensor.data = tensor.data.to(device)


class AdapterOff(Role):
    """The base model under the policy's LoRA adapters: the initial policy when they started at zero.

    Args:
        policy: a PEFT model.
    """

    def __init__(self, policy: nn.Module) -> None:
        assert has_adapters(policy)
        self._policy = policy

    @contextmanager
    def model(self) -> Iterator[nn.Module]:
        trains = [(p, p.requires_grad) for p in self._policy.parameters()]
        with _scoring(self._policy), self._policy.disable_adapter(), gathered(self._policy):  # type: ignore[operator]
            yield self._policy
        for parameter, requires_grad in trains:  # peft turns all adapters' gradients on again
            parameter.requires_grad_(requires_grad)


class Live(Role):
    """The policy as it is now.

    Args:
        policy: the model.
    """

    def __init__(self, policy: nn.Module) -> None:
        self._policy = policy

    @contextmanager
    def model(self) -> Iterator[nn.Module]:
        with _scoring(self._policy), gathered(self._policy):
            yield self._policy


class AveragedCopy(Role):
    """A running average of the policy, equal to it at the start; kept in float32 whatever the policy's dtype.

    With LoRA the average is over the effective weights (base + scaling * B A), since averages of B and of A
    multiply to something else. Parameters that do not train are shared with the policy.

    Args:
        policy: a Hugging Face or PEFT model.
    """

    is_moving = True

    def __init__(self, policy: nn.Module) -> None:
        self._policy = policy
        self._model: nn.Module = dense_copy(policy)
        self._own = _own_tensors(self._model, policy)
        self._parameters = dict(self._model.named_parameters())
        self._averages: dict[str, Tensor] = {}
        for name, tensor, is_moving in base_tensors(policy):
            if is_moving and name in self._parameters:  # tied weights once
                mine = self._parameters[name]
                dtype = torch.promote_types(mine.dtype, torch.float32)
                self._averages[name] = mine if mine.dtype == dtype else tensor.to(dtype, copy=True)

    @contextmanager
    def model(self) -> Iterator[nn.Module]:
        with torch.no_grad(), gathered(self._model):
            yield self._model

    def shard_(self, shard: Callable[[nn.Module], None]) -> None:
        is_same = {name: average is self._parameters[name] for name, average in self._averages.items()}
        shard(self._model)
        self._own, self._parameters = [], dict(self._model.named_parameters())
        for name, average in self._averages.items():
            mine = self._parameters[name]
            self._averages[name] = mine if is_same[name] else like(average, mine)

    def move_(self, rate: float) -> None:
        """average = (1 - rate) * average + rate * policy (mean teacher, arXiv 1703.01780).

        Args:
            rate: in [0, 1]; 0 keeps the average, 1 copies the policy.
        """
        with gathered(*([self._policy] if has_adapters(self._policy) else [])):  # or their sums are of parts
            for name, tensor, _ in base_tensors(self._policy):
                if name in self._averages:
                    average = self._averages[name]
                    lerp_([own_part(average)], [own_part(like(tensor, average))], rate)
        self._refresh_()

    def to_(self, device: torch.device | str) -> None:
        for tensor in self._own:
            tensor.data = tensor.data.to(device)
        for name, average in self._averages.items():
            if average is not self._parameters[name]:
                self._averages[name] = average.to(device)

    def state_dict(self) -> dict[str, Tensor]:
        return {name: average.detach() for name, average in self._averages.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        _load_(state, self.state_dict(), self)
        self._refresh_()

    @torch.no_grad()
    def _refresh_(self) -> None:
        for name, average in self._averages.items():
            if average is not self._parameters[name]:
                own_part(self._parameters[name]).copy_(own_part(average))


class MovingReference(AveragedCopy):
    """A reference that is mixed with the policy from time to time; a checkpoint holds it once it has moved.

    With LoRA the effective weights are mixed, and the sums are kept in float32, as in `AveragedCopy`.

    Args:
        policy: a Hugging Face or PEFT model.
        start: other weights to begin from, of the policy's architecture; nobody else may use it. None is the
            policy as it is.

    Raises:
        ConfigError: start is of another architecture, so that it cannot be mixed with the policy.
    """

    def __init__(self, policy: nn.Module, start: nn.Module | None = None) -> None:
        if start is not None:
            _check_same_weights(policy, start)
        super().__init__(policy if start is None else start.requires_grad_(True))
        self._policy = policy
        self.is_moving = False

    def mix_(self, alpha: float) -> None:
        """reference = alpha * policy + (1 - alpha) * reference (TR-DPO, arXiv 2404.09656, eq. 6).

        Args:
            alpha: in [0, 1]; 0 keeps the reference, 1 copies the policy.
        """
        self.move_(alpha)
        self.is_moving = True

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if state:
            super().load_state_dict(state)
            self.is_moving = True


class Offloaded(Role):
    """A role whose weights rest in CPU memory and come to the device only to score.

    Args:
        role: has weights of its own.
    """

    def __init__(self, role: Role) -> None:
        self._role = role
        self._device: torch.device | str = "cpu"

    @property
    def is_moving(self) -> bool:  # type: ignore[override]
        return self._role.is_moving

    @contextmanager
    def model(self) -> Iterator[nn.Module]:
        self._role.to_(self._device)
        try:
            with self._role.model() as model:
                yield model
        finally:
            self._role.to_("cpu")

    def mix_(self, alpha: float) -> None:
        """Mix as `MovingReference` does, where the weights rest."""
        assert isinstance(self._role, MovingReference)
        self._role.mix_(alpha)

    def shard_(self, shard: Callable[[nn.Module], None]) -> None:
        self._role.shard_(shard)

    def to_(self, device: torch.device | str) -> None:
        """Remember where to score; the weights stay."""
        self._device = device

    def state_dict(self) -> dict[str, Tensor]:
        return self._role.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._role.load_state_dict(state)


def reference_of(
    policy: nn.Module, path: str | None = None, *, moves: bool = False, trust_remote_code: bool = False
) -> Role:
    """The reference of a policy that has not trained yet.

    One that moves: an average of effective weights. Else, fresh LoRA adapters: the model without them, no
    second copy. Adapters that are trained already, or none: a frozen copy.

    Args:
        policy: the initial policy.
        path: other weights with the same vocabulary, read as model.path is; null is the initial policy.
        moves: it will be mixed with the policy.
        trust_remote_code: run code that comes with those weights.

    Raises:
        ConfigError: the other weights cannot be read, have another vocabulary, or cannot be mixed.
    """
    if path is None:
        if moves:
            return MovingReference(policy)
        return AdapterOff(policy) if has_zero_adapters(policy) else FrozenCopy(policy)
    base = base_of(policy)
    dtype = str(base.dtype).removeprefix("torch.")
    other = load_policy(path, dtype=dtype, trust_remote_code=trust_remote_code)
    sizes = [base_of(m).get_output_embeddings().weight.shape[0] for m in (other, policy)]
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"algo.ref.path must have the policy's vocabulary of {sizes[1]} tokens (found {sizes[0]} in "
            f"{path!r}); name a model with the same tokenizer."
        )
    other = other.to(base.device)
    return MovingReference(policy, other) if moves else FrozenCopy(other, is_own=True)


def _check_same_weights(policy: nn.Module, start: nn.Module) -> None:
    own, theirs = ({t.name: tuple(t.tensor.shape) for t in base_tensors(m)} for m in (policy, start))
    different = sorted(name for name in own.keys() | theirs.keys() if own.get(name) != theirs.get(name))
    if different:
        raise ConfigError(
            f"algo.ref.path must have the policy's architecture when callbacks.reference_sync mixes the two "
            f"(found {len(different)} weights that differ, {different[0]!r} first); name such a model, or "
            "leave the callback out."
        )


def _tensors_of(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def _own_tensors(copy: nn.Module, policy: nn.Module) -> list[Tensor]:
    """Parameters and buffers of a copy that the policy does not share."""
    shared = {id(tensor) for tensor in _tensors_of(policy)}
    return [tensor for tensor in _tensors_of(copy) if id(tensor) not in shared]


@contextmanager
def _scoring(model: nn.Module) -> Iterator[None]:
    """Eval mode and no gradients; each module's mode is put back."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


@torch.no_grad()
def _load_(state: Mapping[str, Tensor], weights: Mapping[str, Tensor], role: Role) -> None:
    if state.keys() != weights.keys():
        different = sorted(state.keys() ^ weights.keys())
        raise ConfigError(
            f"The checkpoint's {type(role).__name__} weights must be those of this model (found "
            f"{len(different)} names on one side only, {different[0]!r} first); resume with the settings "
            "that it was written with."
        )
    for name, tensor in state.items():
        own_part(weights[name]).copy_(own_part(like(tensor, weights[name])))
