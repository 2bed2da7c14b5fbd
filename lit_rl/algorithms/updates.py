"""One optimizer step of the networks that a module trains: gradients of all ranks, caps, finite or not."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lit_rl.distributed import all_sum_, sum_gradients_
from lit_rl.metrics import MetricSums


@dataclass(frozen=True)
class Network:
    """A network that optimizer steps move.

    Attributes:
        name: its role, "policy" or "critic".
        model: its parameters, those included that do not train.
        optimizer: over the others.
        max_grad_norm: cap of the norm of its gradient; 0 is off.
        learns: whether the coming optimizer step moves it.
    """

    name: str
    model: nn.Module
    optimizer: Any
    max_grad_norm: float
    learns: bool = True

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Those that train."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    @property
    def prefix(self) -> str:
        """What its metrics start with."""
        return "train/" if self.name == "policy" else f"train/{self.name}_"


class Outcome(NamedTuple):
    """What came of an optimizer step.

    Attributes:
        loss: over all ranks.
        norms: of the gradients before the cap, by network that learns.
        is_finite: whether all of these are; if not, no weight has moved.
    """

    loss: Tensor
    norms: dict[str, Tensor]
    is_finite: bool

    def complaint(self, step: int) -> str:
        """What to tell the user about one that is not finite.

        Args:
            step: in which it came, from 1.
        """
        norms = " and ".join(f"the {name}'s {norm.item()}" for name, norm in self.norms.items())
        return (
            f"The loss is {self.loss.item()} and the gradient norm {norms} at step {step}; the weights are "
            "unchanged. Set algo.on_nonfinite=skip to leave such updates out, or trainer.detect_anomaly=true "
            "to find the cause."
        )


def step_(networks: list[Network], loss: Tensor) -> Outcome:
    """Sum the gradients over all ranks, cap each network's, take the steps of all or, if not finite, of none.

    Collective: one sum over the gradients of all networks together.

    Args:
        networks: with this rank's gradients, which are zero afterwards. Those that do not learn now have
            none and are left as they are.
        loss: this rank's share of the optimizer batch's loss. It is checked too, since a clamp has a gradient
            of zero where its input is NaN.
    """
    learning = [network for network in networks if network.learns]
    sum_gradients_([parameter for network in learning for parameter in network.parameters])
    loss = all_sum_(loss.double())
    norms = {
        network.name: _whole(nn.utils.clip_grad_norm_(network.parameters, network.max_grad_norm or math.inf))
        for network in learning
    }
    is_finite = bool(sum(norms.values(), start=loss).isfinite())
    for network in learning:
        if is_finite:
            network.optimizer.step()
        network.optimizer.zero_grad()
    return Outcome(loss, norms, is_finite)


def _whole(norm: Tensor) -> Tensor:
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def add_update_metrics(sums: MetricSums, networks: list[Network], done: Outcome) -> None:
    """Loss and gradient norms, means over the updates that were taken, and how many were left out."""
    count = float(done.is_finite)
    sums.add("train/loss", done.loss if done.is_finite else 0.0, count)
    for network in networks:
        norm = done.norms[network.name] if network.learns and done.is_finite else 0.0
        sums.add(f"{network.prefix}grad_norm", norm, count)
    sums.add("train/skipped_updates", 1.0 - count)
    sums.end_update()


def as_list(found: Any) -> list[Any]:
    """What Lightning gives as one thing or as a list of several: a list."""
    return found if isinstance(found, list) else [found]
