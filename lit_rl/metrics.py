"""Metrics of one step: weighted sums on the device, brought together over ranks once, at the end of the
step.
"""

import torch
from torch import Tensor

from lit_rl.distributed import all_max_, all_sum_, gather_objects, is_distributed


class MetricSums:
    """Means, maxima and losses of a step, exact over micro-batches and ranks.

    Nothing is read from the device until `reduce`.

    Args:
        device: where the sums are kept.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self._sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}
        self._minima: set[str] = set()  # names in _maxima that are kept with the other sign
        self._shares: dict[str, Tensor] = {}
        self._weights: dict[str, Tensor] = {}
        self._updates = 0

    def add(self, name: str, total: Tensor | float, count: Tensor | float = 1.0) -> None:
        """Add a sum and the number of things it is over; the metric is sum / count."""
        pair = torch.stack([self._scalar(total), self._scalar(count)])
        self._sums[name] = self._sums[name] + pair if name in self._sums else pair

    def add_max(self, name: str, value: Tensor | float) -> None:
        """Keep the largest value."""
        new = self._scalar(value)
        self._maxima[name] = torch.maximum(self._maxima[name], new) if name in self._maxima else new

    def add_min(self, name: str, value: Tensor | float) -> None:
        """Keep the smallest value."""
        self._minima.add(name)
        self.add_max(name, -torch.as_tensor(value))

    def add_share(self, name: str, value: Tensor | float) -> None:
        """Add a micro-batch's share of a loss; the metric is the loss of an optimizer batch, averaged over
        them."""
        new = self._scalar(value)
        self._shares[name] = self._shares[name] + new if name in self._shares else new

    def add_weights(self, name: str, weights: Tensor) -> None:
        """Add importance weights; the metric is the effective share, (sum)^2 / sum of squares / number."""
        w = weights.detach().double()
        new = torch.stack([self._scalar(value) for value in (w.sum(), w.square().sum(), w.numel())])
        self._weights[name] = self._weights[name] + new if name in self._weights else new

    def end_update(self) -> None:
        """An optimizer batch is complete."""
        self._updates += 1

    def reduce(self) -> dict[str, float]:
        """Every metric over all ranks, by name; a mean is 0 where nothing was counted. Collective."""
        out: dict[str, float] = {}
        self._take_names_of_all_ranks()
        if self._sums:
            table = all_sum_(torch.stack(list(self._sums.values())))
            means = table[:, 0] / torch.where(table[:, 1] == 0, torch.ones_like(table[:, 1]), table[:, 1])
            out.update(zip(self._sums, means.tolist(), strict=True))
        if self._weights:
            total, squares, count = all_sum_(torch.stack(list(self._weights.values()))).unbind(1)
            effective = total**2 / (squares * count).clamp(min=1e-30)
            out.update(zip(self._weights, effective.tolist(), strict=True))
        if self._shares:
            losses = all_sum_(torch.stack(list(self._shares.values()))) / max(self._updates, 1)
            out.update(zip(self._shares, losses.tolist(), strict=True))
        if self._maxima:
            maxima = all_max_(torch.stack(list(self._maxima.values())))
            for name, value in zip(self._maxima, maxima.tolist(), strict=True):
                out[name] = -value if name in self._minima else value
        return out

    def _take_names_of_all_ranks(self) -> None:
        """A name that this rank did not see, such as the metric of a reward function, counts nothing here."""
        if not is_distributed():
            return
        tables = (self._sums, self._weights, self._shares, self._maxima)
        seen = gather_objects(tuple(list(table) for table in tables))
        for kind, (table, nothing) in enumerate(
            zip(tables, ([0.0] * 2, [0.0] * 3, 0.0, -torch.inf), strict=True)
        ):
            names = dict.fromkeys(name for names in seen for name in names[kind])
            ordered = {name: table.get(name, self._scalar(torch.tensor(nothing))) for name in names}
            table.clear()
            table.update(ordered)

    def _scalar(self, value: Tensor | float) -> Tensor:
        return torch.as_tensor(value).detach().to(self.device, torch.float64)
