"""Which rows are distilled and how much each prompt counts: gates of the teacher, weights by pass rate."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lit_rl.distributed import all_sum_


class TeacherGate(ABC):
    """Keeps the teacher away from rows for which it is no better than the student.

    `callbacks.teacher_gap` measures; without a measurement the gate is open.
    """

    is_moving: bool = False
    """True when a checkpoint has to hold its state."""

    @abstractmethod
    def is_open(self, prompt_row: Tensor) -> Tensor:
        """(B,) bool, the rows that may be distilled.

        Args:
            prompt_row: (B,) long, the prompt of each row.
        """

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs; nothing for a gate that is measured anew in each step."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Undo `state_dict`."""


class RunGate(TeacherGate):
    """One answer for all rows: open while the last measurement on validation rows found the teacher better.

    Attributes:
        gap: accuracy with the teacher's prompts minus accuracy with the student's; None before the first.
    """

    is_moving = True

    def __init__(self) -> None:
        self.gap: float | None = None

    def is_open(self, prompt_row: Tensor) -> Tensor:
        return torch.full_like(prompt_row, self.gap is None or self.gap > 0, dtype=torch.bool)

    def state_dict(self) -> dict[str, Any]:
        return {"gap": self.gap}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.gap = state["gap"]


class PromptGate(TeacherGate):
    """An answer for each prompt of the step, measured in that step.

    Attributes:
        gaps: by prompt row, accuracy with the teacher's prompts minus the group's pass rate.
    """

    def __init__(self) -> None:
        self.gaps: dict[int, float] = {}

    def is_open(self, prompt_row: Tensor) -> Tensor:
        is_open = [self.gaps.get(row, 1.0) > 0 for row in prompt_row.tolist()]
        return torch.tensor(is_open, dtype=torch.bool, device=prompt_row.device)


def pass_rate_weights(is_success: Tensor, num_generations: int) -> Tensor:
    """(B,) float, sqrt(p (1 - p)) of each row's group, divided by its mean over the prompts of all ranks.

    p is the share of successes in the group. The mean of the weights over prompts is 1, so that the size of
    the loss stays; a group of equal outcomes has weight 0, and with nothing but such groups all weights are
    0. Source: Liu et al., Restoring the Sweet Spot (SC-SDPO), arXiv 2605.27765; the division is its
    batch-adaptive normalization as we read it. Collective.

    Args:
        is_success: (B,) bool, the rows of a prompt adjacent.
        num_generations: G.
    """
    rates = is_success.view(-1, num_generations).double().mean(1)  # (P,)
    weights = (rates * (1 - rates)).sqrt()
    total, count = all_sum_(torch.stack([weights.sum(), weights.new_tensor(len(weights))]))
    mean = total / count
    scaled = weights / torch.where(mean > 0, mean, torch.ones_like(mean))
    return scaled.float().repeat_interleave(num_generations)
