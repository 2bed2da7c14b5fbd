"""Raw rows from files of lines or parquet, and parquet files of finished rows; a part at a time."""

import json
import os
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from lit_rl.data.parquet import CACHE_DIR, ParquetRows, local_files
from lit_rl.errors import DataError

ROWS_AT_ONCE = 1000


def raw_rows(paths: list[str], key: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Rows, each with its file and place.

    Args:
        paths: files, globs, URLs; lines of JSON where the name ends in .jsonl or .json, else parquet.
        key: what error messages call them.

    Raises:
        DataError: there is no such file, it is broken, or a line is no JSON object.
    """
    for file, name in local_files(paths, key, CACHE_DIR):
        if name.partition("?")[0].endswith((".jsonl", ".json")):
            yield from _lines(file, name)
        else:
            rows = ParquetRows([(file, name)])
            yield from ((rows[i], rows.where(i)) for i in range(len(rows)))


def _lines(file: str, name: str) -> Iterator[tuple[dict[str, Any], str]]:
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, 1):
            where = f"{name}, line {number}"
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8"))
            except UnicodeDecodeError as error:
                raise DataError(f"{where} is not UTF-8 ({error.reason}); convert the file.") from error
            except json.JSONDecodeError as error:
                raise DataError(f"{where} is no JSON ({error}).") from error
            if not isinstance(row, dict):
                raise DataError(f"{where} must be a JSON object (found {type(row).__name__}).")
            yield row, where


def write(rows: Iterable[dict[str, Any]], path: Path) -> int:
    """Write a parquet file, whole or not at all; returns the number of rows.

    Raises:
        DataError: there are no rows, or one has other columns or types than the first ones.
    """
    rows = iter(rows)
    first = list(islice(rows, ROWS_AT_ONCE))
    if not first:
        raise DataError(f"{path} would hold no rows.")
    schema = pa.Table.from_pylist(first).schema
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    done = 0
    with pq.ParquetWriter(part, schema) as writer:
        for some in chain([first], iter(lambda: list(islice(rows, ROWS_AT_ONCE)), [])):
            try:
                writer.write_table(pa.Table.from_pylist(some, schema=schema))
            except (pa.ArrowException, ValueError, TypeError) as error:
                raise DataError(f"{path}: rows {done} to {done + len(some)} do not fit ({error}).") from error
            done += len(some)
    os.replace(part, path)
    return done
