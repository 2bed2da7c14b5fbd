"""One pass over all rows before the first step, to find those that are left out."""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

from lit_rl.data.parquet import Rows

Judge = Callable[[dict[str, Any], str], str | None]
"""(row, where) -> why the row is left out, or None; raises a DataError for a row that must not be."""

BAD_ROW = "nothing that can be rendered (data.on_bad_row=skip)"


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
    reasons = {i: judge(rows[i], rows.where(i)) for i in range(start, stop)}
    return {i: reason for i, reason in reasons.items() if reason is not None}
