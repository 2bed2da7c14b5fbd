"""NamedRows: several sets of rows one after another, each under a name of its own."""

from bisect import bisect_right
from itertools import accumulate
from typing import Any

from lit_rl.data.parquet import Block, Rows

VALIDATION_SET = "validation_set"
"""Column with the name of the set; metrics are told apart by it, else by the data source."""


class NamedRows(Rows):
    """Rows of several sets; each row says in the column VALIDATION_SET which one it is of.

    Args:
        sets: rows by the name of their set, at least one set.
    """

    def __init__(self, sets: dict[str, Rows]) -> None:
        self._names, self._rows = list(sets), list(sets.values())
        self._starts = [0, *accumulate(len(rows) for rows in self._rows)]
        self.blocks = [
            Block([start + i for i in block.rows], block.size)
            for start, rows in zip(self._starts[:-1], self._rows, strict=True)
            for block in rows.blocks
        ]

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> dict[str, Any]:
        name, rows, row = self._place(index)
        return {**rows[row], VALIDATION_SET: name}

    def where(self, index: int) -> str:
        _, rows, row = self._place(index)
        return rows.where(row)

    def column_names(self) -> set[str]:
        return {VALIDATION_SET}.union(*(rows.column_names() for rows in self._rows))

    def fingerprint(self) -> str:
        return ", ".join(
            f"{name} {rows.fingerprint()}" for name, rows in zip(self._names, self._rows, strict=True)
        )

    def _place(self, index: int) -> tuple[str, Rows, int]:
        """Name and rows of the set, and the row within it."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        which = bisect_right(self._starts, index) - 1
        return self._names[which], self._rows[which], index - self._starts[which]
