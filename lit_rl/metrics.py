"""Metrics of one step: weighted sums on the device, brought together over ranks once, at the end of the step."""

import torch
from torch import Tensor

from lit_rl.distributed import all_max_, all_sum_


class MetricSums:
    """Weighted means and maxima of a step, exact over micro-batches and ranks.

    Nothing is read from the device until `reduce`, which makes two collectives, so every rank must have
    added the same names.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}

    def add(self, name: str, total: Tensor | float, count: Tensor | float = 1.0) -> None:
        """Add a sum and the number of things it is over; the metric is sum / count."""
        pair = torch.stack([_scalar(total), _scalar(count)])
        self._sums[name] = self._sums[name] + pair if name in self._sums else pair

    def add_max(self, name: str, value: Tensor | float) -> None:
        """Keep the largest value."""
        value = _scalar(value)
        self._maxima[name] = torch.maximum(self._maxima[name], value) if name in self._maxima else value

    def reduce(self) -> dict[str, float]:
        """Means (0 where nothing was counted) and maxima over all ranks, by name. Collective."""
        out: dict[str, float] = {}
        if self._sums:
            table = all_sum_(torch.stack(list(self._sums.values())))
            means = table[:, 0] / torch.where(table[:, 1] == 0, torch.ones_like(table[:, 1]), table[:, 1])
            out.update(zip(self._sums, means.tolist(), strict=True))
        if self._maxima:
            out.update(
                zip(self._maxima, all_max_(torch.stack(list(self._maxima.values()))).tolist(), strict=True)
            )
        return out


def _scalar(value: Tensor | float) -> Tensor:
    return torch.as_tensor(value).detach().to("cpu", torch.float64, non_blocking=True)
