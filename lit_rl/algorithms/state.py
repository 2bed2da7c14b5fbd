"""What a checkpoint holds beyond the policy's weights and Lightning's own state, and how it comes back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from lit_rl.algorithms.quantized_state import packed, unpacked
from lit_rl.errors import DataError
from lit_rl.models.sharding import whole

if TYPE_CHECKING:
    from lit_rl.algorithms.base import RLModule


class Stateful(Protocol):
    """A moving part outside the policy's parameters, as a checkpoint sees it."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Any) -> None: ...


def add_state(module: RLModule, checkpoint: dict[str, Any]) -> None:
    """Add counters and moving copies; leave out the frozen weights that `model.path` brings back.

    Args:
        module: the running module.
        checkpoint: Lightning's dictionary, edited in place; plain values and tensors only.
    """
    frozen = [name for name, parameter in module.named_parameters() if not parameter.requires_grad]
    for name in frozen:
        checkpoint["state_dict"].pop(name, None)
    if "optimizer_states" in checkpoint:
        checkpoint["optimizer_states"] = packed(checkpoint["optimizer_states"])
    checkpoint["lit_rl"] = {
        "algorithm": type(module).__name__,
        "optimizer_steps": module.optimizer_steps,
        "seconds": dict(module.clock.total),
        "left_out": frozen,
        "roles": whole({name: role.state_dict() for name, role in module.stateful.items()}),
    }


def take_state(module: RLModule, checkpoint: dict[str, Any]) -> None:
    """Take counters and copies back, and refill the weights that the file names as left out.

    Args:
        module: freshly built; its frozen weights are those of `model.path`.
        checkpoint: as `add_state` left it.

    Raises:
        DataError: another algorithm wrote it, or it holds a copy that this run does not have.
    """
    saved = checkpoint["lit_rl"]
    if saved["algorithm"] != type(module).__name__:
        raise DataError(
            f"The checkpoint was written by {saved['algorithm']}, this run is {type(module).__name__}; "
            f"resume with the same algo, or start afresh with checkpoint.resume_mode=disable."
        )
    if "optimizer_states" in checkpoint:
        checkpoint["optimizer_states"] = unpacked(checkpoint["optimizer_states"])
    own = module.state_dict()
    if checkpoint["state_dict"]:
        checkpoint["state_dict"].update({name: own[name] for name in saved["left_out"]})
    module.optimizer_steps = saved["optimizer_steps"]
    module.clock.total.update(saved["seconds"])
    for name, state in saved["roles"].items():
        role = getattr(module, name)
        if role is None:
            raise DataError(f"The checkpoint holds a {name!r} and this run has none; its settings differ.")
        role.load_state_dict(state)
