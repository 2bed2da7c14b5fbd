"""Models beside the policy that only score: references and teachers.

A role is a plain object, not a module: its model is in no optimizer, wrapper or checkpoint of the policy.
Weights that a role has moved itself are in its `state_dict`.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn

from lit_rl.errors import ConfigError
from lit_rl.functional.ema import lerp_
from lit_rl.models.export import save_hf
from lit_rl.models.load import load_policy
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
    "Role",
    "named_base_tensors",
    "reference_of",
    "save_hf",
]


class Role(ABC):
    """A model to score with: `with role.model() as model: score(model, rows)`."""

    is_moving: bool = False
    """True when its weights are no longer those it was made with, so that they have to be saved."""

    @abstractmethod
    def model(self) -> AbstractContextManager[nn.Module]:
        """The model in eval mode, with gradients off, as long as the context lasts."""

    def mix_(self, policy: nn.Module, alpha: float) -> None:
        """reference = alpha * policy + (1 - alpha) * reference (TR-DPO, arXiv 2404.09656, eq. 6).

        Args:
            policy: the policy.
            alpha: in [0, 1]; 0 keeps the reference, 1 copies the policy.

        Raises:
            ConfigError: the reference has no weights of its own that could be mixed.
        """
        raise ConfigError(
            "callbacks.reference_sync needs a reference with weights of its own, and with LoRA adapters it "
            "has none (found model.lora.lora_rank > 0, or an adapter as model.path); train all weights, or "
            "leave the callback out."
        )

    def to_(self, device: torch.device | str) -> None:  # noqa: B027
        """Move weights of its own to the device."""

    def state_dict(self) -> dict[str, Tensor]:
        """The weights that it has moved, by name, sharing memory; empty for a role that never moves."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Undo `state_dict`, bit for bit.

        Raises:
            ConfigError: the state is not this role's.
        """
        _load_(state, {}, self)


class FrozenCopy(Role):
    """The policy as it was, until it is mixed with a later one. Parameters that do not train are shared.

    Args:
        policy: the model to copy.
        is_own: take the model itself instead of a copy; nobody else may use it.
    """

    def __init__(self, policy: nn.Module, *, is_own: bool = False) -> None:
        self._moving = [n for n, p in policy.named_parameters() if p.requires_grad]
        self._model: nn.Module = policy.requires_grad_(False).eval() if is_own else shared_copy(policy)

    @contextmanager
    def model(self) -> Iterator[nn.Module]:
        with torch.no_grad():
            yield self._model

    def mix_(self, policy: nn.Module, alpha: float) -> None:
        if has_adapters(policy) or has_adapters(self._model):
            super().mix_(policy, alpha)
        theirs = dict(policy.named_parameters())
        lerp_(self._weights().values(), [theirs[name].detach() for name in self._moving], alpha)
        self.is_moving = True

    def to_(self, device: torch.device | str) -> None:
        self._model.to(device)

    def state_dict(self) -> dict[str, Tensor]:
        return self._weights() if self.is_moving else {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if state:
            _load_(state, self._weights(), self)
            self.is_moving = True

    def _weights(self) -> dict[str, Tensor]:
        mine = dict(self._model.named_parameters())
        return {name: mine[name].detach() for name in self._moving}


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
        with _scoring(self._policy), self._policy.disable_adapter():  # type: ignore[operator]
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
        with _scoring(self._policy):
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
        self._parameters = dict(self._model.named_parameters())
        self._averages: dict[str, Tensor] = {}
        for name, tensor, is_moving in base_tensors(policy):
            if is_moving and name in self._parameters:  # tied weights once
                mine = self._parameters[name]
                dtype = torch.promote_types(mine.dtype, torch.float32)
                self._averages[name] = mine if mine.dtype == dtype else tensor.to(dtype, copy=True)

    @contextmanager
    def model(self) -> Iterator[nn.Module]:
        with torch.no_grad():
            yield self._model

    def move_(self, rate: float) -> None:
        """average = (1 - rate) * average + rate * policy (mean teacher, arXiv 1703.01780).

        Args:
            rate: in [0, 1]; 0 keeps the average, 1 copies the policy.
        """
        for name, tensor, _ in base_tensors(self._policy):
            if name in self._averages:
                lerp_([self._averages[name]], [tensor], rate)
        self._refresh_()

    def to_(self, device: torch.device | str) -> None:
        self._model.to(device)
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
                self._parameters[name].copy_(average)


def reference_of(policy: nn.Module, path: str | None = None, *, trust_remote_code: bool = False) -> Role:
    """The reference of a policy that has not trained yet.

    Fresh LoRA adapters: the model without them, no second copy. Adapters that are trained already, or none: a
    frozen copy.

    Args:
        policy: the initial policy.
        path: other weights with the same vocabulary, read as model.path is; null is the initial policy.
        trust_remote_code: run code that comes with those weights.

    Raises:
        ConfigError: the other weights cannot be read, or have another vocabulary.
    """
    if path is None:
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
    return FrozenCopy(other.to(base.device), is_own=True)


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
        weights[name].copy_(tensor)
