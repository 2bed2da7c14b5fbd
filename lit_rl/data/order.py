"""Which row comes when: orders without state, and how steps and ranks share them.

The order is a function of (seed, data epoch), so a place in it is one number, to which a resumed run counts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count, islice, pairwise
from typing import Protocol

import torch
from torch import Tensor

from lit_rl.data.parquet import CACHE_BYTES, Block
from lit_rl.seeding import derived_generator


class Order(Protocol):
    """Which row comes when, in any number of data epochs, each of `len(order)` rows."""

    def __len__(self) -> int: ...

    def epoch(self, index: int) -> Iterator[int]: ...


@dataclass(frozen=True)
class RowOrder:
    """The order of the rows in each pass over the data.

    Shuffled, blocks are permuted and taken in windows of at most `window_bytes`; the rows of a window are
    permuted together. Data of up to that size is one window: any order is equally likely. For larger data
    this is a block shuffle: the rows of a window come near each other, and reading needs the memory of one
    window.

    Args:
        blocks: the rows, by what is read together.
        shuffle: False keeps the order of the files.
        seed: of the data order.
        window_bytes: size of a window, at least one block.
    """

    blocks: list[Block]
    shuffle: bool
    seed: int
    window_bytes: int = CACHE_BYTES

    def __len__(self) -> int:
        return sum(len(block.rows) for block in self.blocks)

    def epoch(self, index: int) -> Iterator[int]:
        """Every row once, in the order of data epoch `index`, counted from 0."""
        if not self.shuffle:
            yield from chain.from_iterable(block.rows for block in self.blocks)
            return
        generator = derived_generator(self.seed, "data order", index)
        order = torch.randperm(len(self.blocks), generator=generator).tolist()
        for window in self._windows(order):
            rows = torch.cat([torch.tensor(self.blocks[i].rows) for i in window])
            yield from counted(rows[torch.randperm(len(rows), generator=generator)])

    def _windows(self, order: list[int]) -> Iterator[list[int]]:
        window: list[int] = []
        size = 0
        for i in order:
            if window and size + self.blocks[i].size > self.window_bytes:
                yield window
                window, size = [], 0
            window.append(i)
            size += self.blocks[i].size
        yield window


def counted(rows: Tensor) -> Iterator[int]:
    """The numbers of a (N,) tensor, without a list of all of them."""
    return chain.from_iterable(part.tolist() for part in rows.split(4096))


def rows_not_in_use(order: Order, start: int, count_wanted: int, in_use: set[int]) -> tuple[list[int], int]:
    """The next rows of the order, run through again and again, that are not in use.

    Args:
        order: of the rows.
        start: rows taken or passed over before, counted over all passes.
        count_wanted: rows to take.
        in_use: rows to pass over.

    Returns:
        the rows, fewer where all others are in use; and the next start.
    """
    rows: list[int] = []
    taken = set(in_use)
    epoch, offset = divmod(start, len(order))
    endless = islice(chain.from_iterable(order.epoch(e) for e in count(epoch)), offset, None)
    while len(rows) < count_wanted and len(taken) < len(order):
        row = next(endless)
        start += 1
        if row not in taken:
            taken.add(row)
            rows.append(row)
    return rows, start


class TrainBatches:
    """The rows that this rank takes in each step of the run.

    Steps run on across data epochs, so no row is left out at the end of one. In a step that holds the end
    of one epoch and the start of the next, a row that is in the step already waits for the following step:
    a step never holds a prompt twice. Rank r of W takes entries r, r + W, ... of each step, so all ranks
    together serve what one process would.

    Args:
        order: of the rows; at least `batch_size` of them.
        batch_size: rows per step over all ranks; W divides it.
        steps: length of the run.
        rank: index of this process.
        world_size: W.
    """

    def __init__(
        self, order: Order, *, batch_size: int, steps: int, rank: int = 0, world_size: int = 1
    ) -> None:
        assert batch_size % world_size == 0 and batch_size <= len(order)
        self._order, self._batch_size, self._steps = order, batch_size, steps
        self._rank, self._world_size = rank, world_size

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[list[int]]:
        rows: Iterator[int] = chain.from_iterable(self._order.epoch(epoch) for epoch in count())
        for _ in range(self._steps):
            batch: dict[int, None] = {}
            waiting: list[int] = []
            while len(batch) < self._batch_size:
                row = next(rows)
                if row in batch:
                    waiting.append(row)
                batch[row] = None
            if waiting:
                rows = chain(waiting, rows)
            yield list(batch)[self._rank :: self._world_size]


def validation_batches(
    rows: Sequence[int], *, batch_size: int, rank: int = 0, world_size: int = 1
) -> list[list[int]]:
    """The rows that this rank validates, in batches: every row once over all ranks, none twice.

    Rank r of W takes rows r, r + W, ... All ranks make the same number of batches, of nearly equal size, so
    that a collective in a batch finds every rank. (With one row per rank and batch, a batch holds two where
    the rows do not divide by W.)

    Args:
        rows: all rows; at least W.
        batch_size: rows per batch over all ranks.
        rank: index of this process.
        world_size: W.
    """
    assert len(rows) >= world_size
    batches = min(-(-len(rows) // batch_size), len(rows) // world_size)
    mine = list(rows[rank::world_size])
    cuts = [len(mine) * i // batches for i in range(batches + 1)]
    return [mine[start:stop] for start, stop in pairwise(cuts)]
