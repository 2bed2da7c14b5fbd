"""Orders by a column: sources mixed with weights, and a curriculum. Like every order, without state."""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import merge
from itertools import chain, islice
from math import ceil, isfinite

import torch
from torch import Tensor

from lit_rl.data.order import Order, RowOrder, counted
from lit_rl.data.parquet import CACHE_BYTES, Block, Rows
from lit_rl.errors import ConfigError, DataError
from lit_rl.seeding import derived_generator, derived_seed


@dataclass(frozen=True)
class Curriculum:
    """Rows by ascending value, in every data epoch.

    Shuffled, rows of equal value come in a new order in each epoch; else in the order of the files. Reading
    jumps between row groups, unless the files themselves are sorted by the column.

    Args:
        rows: (N,) long, indices.
        values: (N,) float.
        shuffle: see above.
        seed: of the data order.
    """

    rows: Tensor
    values: Tensor
    shuffle: bool
    seed: int

    def __len__(self) -> int:
        return len(self.rows)

    def epoch(self, index: int) -> Iterator[int]:
        """Every row once, in the order of data epoch `index`, counted from 0."""
        places = torch.arange(len(self.rows))
        if self.shuffle:
            places = torch.randperm(len(self.rows), generator=derived_generator(self.seed, "ties", index))
        return counted(self.rows[places[self.values[places].argsort(stable=True)]])


@dataclass(frozen=True)
class Mix:
    """Several sources, each in an order of its own, in fixed shares.

    A data epoch has as many rows as there are in all. Each source gives its share of them, rounded so that
    the sum is right and spread evenly over the epoch. A source is run through again and again at a pace of
    its own: with twice its natural share, its rows come twice per epoch.

    Args:
        orders: one for each source.
        weights: one for each, above 0; only their ratios matter.
    """

    orders: Sequence[Order]
    weights: Sequence[float]

    def __len__(self) -> int:
        return sum(len(order) for order in self.orders)

    @property
    def counts(self) -> list[int]:
        """Rows of each source in one data epoch: the shares, by largest remainders."""
        exact = [weight / sum(self.weights) * len(self) for weight in self.weights]
        counts = [int(share) for share in exact]
        by_remainder = sorted(range(len(exact)), key=lambda s: (counts[s] - exact[s], s))
        for s in by_remainder[: len(self) - sum(counts)]:
            counts[s] += 1
        return counts

    def epoch(self, index: int) -> Iterator[int]:
        """`len(self)` rows, those of data epoch `index`, counted from 0."""
        counts = self.counts
        sources = [_from(order, index * n) for order, n in zip(self.orders, counts, strict=True)]
        for _, s in merge(*(_places(s, n) for s, n in enumerate(counts))):
            yield next(sources[s])


def _places(source: int, count: int) -> Iterator[tuple[float, int]]:
    """Where the rows of a source lie in an epoch, between 0 and 1."""
    return (((i + 0.5) / count, source) for i in range(count))


def _from(order: Order, start: int) -> Iterator[int]:
    """The order's epochs one after another, from row number `start` on."""
    epoch, offset = divmod(start, len(order))
    while True:
        yield from islice(order.epoch(epoch), offset, None)
        epoch, offset = epoch + 1, 0


@dataclass(frozen=True)
class ColumnOrders:
    """What the columns say about the order of rows, read once.

    Args:
        parts: blocks by source; one part where sources are not mixed.
        weights: by source; None does not mix.
        values: of the curriculum, by source, for the rows of its blocks; None has no curriculum.
    """

    parts: Mapping[str, list[Block]]
    weights: Mapping[str, float] | None
    values: Mapping[str, Tensor] | None

    @property
    def blocks(self) -> list[Block]:
        """The rows of all parts."""
        return list(chain.from_iterable(self.parts.values()))

    def order(self, *, shuffle: bool, seed: int, with_curriculum: bool = True) -> Order:
        """The order that these make.

        Args:
            shuffle: see RowOrder and Curriculum.
            seed: of the order.
            with_curriculum: False leaves it out.
        """
        orders: list[Order] = []
        for name, blocks in self.parts.items():
            own = seed if self.weights is None else derived_seed(seed, "source", name)
            if self.values is not None and with_curriculum:
                rows = torch.tensor([row for block in blocks for row in block.rows])
                orders.append(Curriculum(rows, self.values[name], shuffle, own))
            else:
                orders.append(RowOrder(blocks, shuffle, own, CACHE_BYTES // len(self.parts)))
        return orders[0] if self.weights is None else Mix(orders, [self.weights[n] for n in self.parts])

    def check(self, batch_size: int) -> None:
        """Refuse shares for which a step would need a row twice.

        Raises:
            ConfigError: a source has fewer rows than its share of a step.
        """
        order = self.order(shuffle=False, seed=0, with_curriculum=False)
        if not isinstance(order, Mix):
            return
        for name, source, count in zip(self.parts, order.orders, order.counts, strict=True):
            wanted = ceil(batch_size * count / len(order))
            if len(source) < wanted:
                raise ConfigError(
                    f"data.source_weights.{name} asks for {wanted} of the {batch_size} rows of a step, and "
                    f"the source has {len(source)}; give it less weight, or the step fewer rows "
                    "(data.train_batch_size)."
                )


def check_weights(weights: Mapping[str, float]) -> None:
    """Raise a ConfigError unless these can be weights of sources."""
    for name, weight in weights.items():
        if not isfinite(weight) or weight < 0:
            raise ConfigError(f"data.source_weights.{name} must be >= 0 (found {weight!r}).")
    if not any(weights.values()):
        raise ConfigError(f"data.source_weights must hold a weight above 0 (found {dict(weights)}).")


def blocks_by_source(
    rows: Rows, blocks: Sequence[Block], column: str, weights: Mapping[str, float]
) -> dict[str, list[Block]]:
    """The rows of each source whose weight is above 0.

    Args:
        rows: read from here; only `column` needs to be there.
        blocks: the rows that are used.
        column: names the source.
        weights: by source.

    Raises:
        ConfigError: a source without weight, or a weight without source.
        DataError: a row without source.
    """
    found: dict[str, list[Block]] = {}
    for block in blocks:
        members: dict[str, array[int]] = {}
        for i in block.rows:
            name = rows[i][column]
            if not isinstance(name, str):
                raise DataError(f"{rows.where(i)}, column {column!r} must be a text (found {name!r}).")
            members.setdefault(name, array("q")).append(i)
        for name, mine in members.items():
            found.setdefault(name, []).append(Block(mine, block.size))
    if missing := sorted(found.keys() - weights.keys()):
        raise ConfigError(
            f"data.source_weights must name every source in the column {column!r} (found no weight for "
            f"{', '.join(missing)}); 0 leaves one out."
        )
    if unknown := sorted(weights.keys() - found.keys()):
        raise ConfigError(
            f"data.source_weights names {', '.join(unknown)}, which the column {column!r} never does; there "
            f"are {', '.join(sorted(found))}."
        )
    return {name: found[name] for name in sorted(found) if weights[name] > 0}


def curriculum_values(rows: Rows, blocks: Sequence[Block], column: str) -> Tensor:
    """(N,) the numbers of a column, for the rows of the blocks.

    Args:
        rows: read from here; only `column` needs to be there.
        blocks: the rows that are used.
        column: numbers.

    Raises:
        DataError: a row has none.
    """
    values = array("d")
    for i in (row for block in blocks for row in block.rows):
        value = rows[i][column]
        if not isinstance(value, int | float) or not isfinite(value):
            raise DataError(f"{rows.where(i)}, column {column!r} must be a number (found {value!r}).")
        values.append(value)
    return torch.tensor(values, dtype=torch.float64)
