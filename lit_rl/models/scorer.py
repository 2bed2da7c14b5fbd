"""Scorer: what a teacher or a reference is to the losses."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from lit_rl.functional.distillation import Source
from lit_rl.models.score import Rows


class Scorer(ABC):
    """Next-token distributions to compare the policy's with, of one model or of several mixed."""

    is_moving: bool = False
    """True when its weights are no longer those it was made with, so that they have to be saved."""

    @abstractmethod
    def sources(self, rows: Rows) -> list[Source]:
        """What its logits at each completion token are made of, without gradient.

        Args:
            rows: prompts, the scorer's own, and completions; row by row, in each row by position.
        """

    def ready(self) -> AbstractContextManager[object]:
        """Holds its weights together for several calls; their number may differ between processes."""
        return nullcontext()

    def shard_(self, shard: Callable[[nn.Module], None]) -> None:  # noqa: B027
        """Cut weights of its own over the processes.

        Args:
            shard: cuts a model as the policy will be.
        """

    def to_(self, device: torch.device | str) -> None:  # noqa: B027
        """Move weights of its own to the device."""

    def state_dict(self) -> dict[str, Tensor]:
        """The weights that it has moved, by name, sharing memory; empty for one that never moves."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Undo `state_dict`, bit for bit.

        Raises:
            ConfigError: the state is not this scorer's.
        """
        assert not state, "a scorer without weights of its own has no state"
