"""BatchPlan: how the rows of a step are cut into optimizer batches and micro-batches."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lit_rl.batch import RolloutBatch, prompt_numbers
from lit_rl.errors import ConfigError
from lit_rl.models.shared_prefix import is_shorter


@dataclass(frozen=True)
class BatchPlan:
    """Batch arithmetic below the step.

    `optimizer_batch_size` changes what is learned. The micro-batch keys trade memory for time and nothing
    else: losses are normalised by the whole optimizer batch over all ranks.

    Args:
        optimizer_batch_size: rows over all ranks per optimizer step; null is the whole step.
        micro_batch_size: rows per forward and backward on one device.
        micro_batch_tokens: instead of rows: prompt and completion tokens, the padding up to a piece's longest
            row included; rows are sorted by length. Where rows share prompts (model.kernels.share_prefix),
            each prompt of a piece counts once and nothing is padded.
        score_micro_batch_size: rows per pass without gradient; null is as above.
        score_micro_batch_tokens: the same in tokens.
        shuffle: permute the rows before each pass over them, seeded.

    Raises:
        ConfigError: a size below 1, or not exactly one micro-batch key.
    """

    key: ClassVar[str] = "algo.batch"

    optimizer_batch_size: int | None = None
    micro_batch_size: int | None = 8
    micro_batch_tokens: int | None = None
    score_micro_batch_size: int | None = None
    score_micro_batch_tokens: int | None = None
    shuffle: bool = False

    def __post_init__(self) -> None:
        sizes = ("optimizer_batch_size", "micro_batch_size", "micro_batch_tokens")
        for name in (*sizes, "score_micro_batch_size", "score_micro_batch_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{self.key}.{name} must be null or >= 1 (found {value!r}).")
        if (self.micro_batch_size is None) == (self.micro_batch_tokens is None):
            raise ConfigError(
                f"Exactly one of {self.key}.micro_batch_size (found {self.micro_batch_size!r}) and "
                f"{self.key}.micro_batch_tokens (found {self.micro_batch_tokens!r}) must not be null."
            )
        if self.score_micro_batch_size is not None and self.score_micro_batch_tokens is not None:
            raise ConfigError(
                f"At most one of {self.key}.score_micro_batch_size (found {self.score_micro_batch_size}) and "
                f"{self.key}.score_micro_batch_tokens (found {self.score_micro_batch_tokens}) may be set."
            )

    def optimizer_steps(self, rows: int, num_iterations: int, num_ranks: int = 1) -> int:
        """Optimizer steps per step for this many rows on this rank: I * K."""
        return num_iterations * -(-rows // self._rows_per_optimizer_step(rows, num_ranks))

    def optimizer_batches(
        self, rows: int, *, num_ranks: int = 1, generator: torch.Generator | None = None
    ) -> Iterator[Tensor]:
        """Row positions of each optimizer batch of one pass, on this rank.

        Args:
            rows: rows of the step on this rank.
            num_ranks: data-parallel ranks that share an optimizer batch.
            generator: draws the permutation when `shuffle` is on.
        """
        order = torch.randperm(rows, generator=generator) if self.shuffle else torch.arange(rows)
        yield from order.split(self._rows_per_optimizer_step(rows, num_ranks))

    def micro_batches(self, batch: RolloutBatch, *, is_sharing: bool = False) -> Iterator[RolloutBatch]:
        """The rows of an optimizer batch in the pieces that pass forward and backward together.

        Args:
            batch: the rows.
            is_sharing: the model computes a prompt once for its rows.
        """
        size, tokens = self.micro_batch_size, self.micro_batch_tokens
        for index in _cuts(batch, size, tokens, is_sharing):
            yield batch.select(index) if len(index) < len(batch) or tokens is not None else batch

    def score_batches(self, batch: RolloutBatch, *, is_sharing: bool = False) -> Iterator[Tensor]:
        """Row positions of the pieces of a pass without gradient; arguments as in `micro_batches`."""
        size, tokens = self.score_micro_batch_size, self.score_micro_batch_tokens
        if size is None and tokens is None:
            size, tokens = self.micro_batch_size, self.micro_batch_tokens
        yield from _cuts(batch, size, tokens, is_sharing)

    def micro_steps(self, rows: int, num_ranks: int = 1) -> int:
        """Micro-batches in one pass over the rows of this rank, K * A; with `micro_batch_tokens`, K."""
        per_update = self._rows_per_optimizer_step(rows, num_ranks)
        pieces = -(-per_update // self.micro_batch_size) if self.micro_batch_size else 1
        return -(-rows // per_update) * pieces

    def _rows_per_optimizer_step(self, rows: int, num_ranks: int) -> int:
        if self.optimizer_batch_size is None:
            return max(rows, 1)
        return max(self.optimizer_batch_size // num_ranks, 1)


def _cuts(batch: RolloutBatch, size: int | None, tokens: int | None, is_sharing: bool) -> Iterator[Tensor]:
    if size is not None:
        yield from torch.arange(len(batch)).split(size)
        return
    assert tokens is not None and batch.completion_len is not None
    prompts, completions = batch.prompt_len.tolist(), batch.completion_len.tolist()
    numbers = prompt_numbers(batch.prompt_ids, batch.prompt_len) if is_sharing else range(len(prompts))
    order = _by_length([p + c for p, c in zip(prompts, completions, strict=True)], list(numbers))
    piece: list[int] = []
    for row in order:
        if piece and _tokens([*piece, row], prompts, completions, numbers) > tokens:
            yield torch.tensor(piece)
            piece = []
        piece.append(row)
    if piece:
        yield torch.tensor(piece)


def _by_length(lengths: list[int], groups: list[int]) -> list[int]:
    """Rows from long to short, those of a group together."""
    longest: dict[int, int] = {}
    for length, group in zip(lengths, groups, strict=True):
        longest[group] = max(length, longest.get(group, 0))
    return sorted(range(len(lengths)), key=lambda row: (-longest[groups[row]], groups[row], -lengths[row]))


def _tokens(piece: list[int], prompts: list[int], completions: list[int], groups: Sequence[int]) -> int:
    """What a piece costs: as rows padded to the longest, or as a flat sequence where that is shorter."""
    padded = len(piece) * max(prompts[row] + completions[row] for row in piece)
    once = {groups[row]: prompts[row] for row in piece}
    flat = sum(once.values()) + sum(completions[row] for row in piece)
    return flat if len(once) < len(piece) and is_shorter(flat, padded) else padded
