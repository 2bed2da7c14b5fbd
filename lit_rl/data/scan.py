"""One pass over all rows before the first step, to find those that are left out."""

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, Protocol

from lit_rl.data.parquet import Rows
from lit_rl.errors import DataError


class Judge(Protocol):
    """Decides about a row: why it is left out, or None; raises a DataError for one that must not be bad."""

    @property
    def skip_bad(self) -> bool: ...

    def __call__(self, row: dict[str, Any], where: str) -> str | None: ...


BAD_ROW = "nothing that can be read and rendered (data.on_bad_row=skip)"


def dropped_rows(rows: Rows, judge: Judge, *, workers: int = 1) -> dict[int, str]:
    """The rows that are left out, with the reason.

    Args:
        rows: all rows.
        judge: decides about one.
        workers: processes; 1 does it in this one.

    Raises:
        DataError: the judge refused a row.
    """
    if workers == 1:
        return _judged(rows, judge, 0, len(rows))
    step = max(1, -(-len(rows) // (workers * 4)))
    starts = range(0, len(rows), step)
    dropped: dict[int, str] = {}
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        parts = [pool.submit(_judged, rows, judge, start, min(start + step, len(rows))) for start in starts]
        for part in parts:
            dropped.update(part.result())
    return dropped


def _judged(rows: Rows, judge: Judge, start: int, stop: int) -> dict[int, str]:
    reasons = {i: _reason(rows, judge, i) for i in range(start, stop)}
    return {i: reason for i, reason in reasons.items() if reason is not None}


def _reason(rows: Rows, judge: Judge, index: int) -> str | None:
    try:
        row = rows[index]
    except DataError:
        if judge.skip_bad:
            return BAD_ROW
        raise
    return judge(row, rows.where(index))
