"""A few rows at a time, where an intermediate of a whole (n, V) block would be one block too many."""

from collections.abc import Iterator

from torch import Tensor

_ELEMENTS = 2**21
"""Of a slice, at most; one row at least."""


def row_slices(block: Tensor) -> Iterator[slice]:
    """Slices that together cover the rows of an (n, V) tensor."""
    size = max(_ELEMENTS // max(block.shape[1], 1), 1)
    for start in range(0, len(block), size):
        yield slice(start, min(start + size, len(block)))
