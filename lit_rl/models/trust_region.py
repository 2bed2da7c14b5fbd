"""TrustRegion: a teacher that is the initial policy, drawn toward the current one."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from lit_rl.functional.distillation import Source
from lit_rl.models.roles import Live, reference_of
from lit_rl.models.score import Rows
from lit_rl.models.scorer import Scorer


class TrustRegion(Scorer):
    """`(1 - mix) initial + mix current`, of the two models' logits: a geometric mixture of probabilities.

    It follows the policy no further than its share, and nothing of it has to be saved. The two models are
    asked one after the other. Source: the teacher of that name in the code of Huebotter et al., arXiv
    2601.20802.

    Args:
        policy: the initial policy.
        mix: share of the current policy, in [0, 1].
    """

    def __init__(self, policy: nn.Module, mix: float) -> None:
        self._initial, self._current = reference_of(policy), Live(policy)
        self._mix = mix

    def sources(self, rows: Rows) -> list[Source]:
        parts = ((self._initial, 1 - self._mix), (self._current, self._mix))
        return [
            source._replace(share=share)
            for role, share in parts
            if share > 0
            for source in role.sources(rows)
        ]

    @contextmanager
    def ready(self) -> Iterator[None]:
        with self._initial.ready(), self._current.ready():
            yield

    def shard_(self, shard: Callable[[nn.Module], None]) -> None:
        self._initial.shard_(shard)

    def to_(self, device: torch.device | str) -> None:
        self._initial.to_(device)
