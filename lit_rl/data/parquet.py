"""Rows of parquet files, read at random by row group in flat memory; also rows that are in memory already.

A row is a dict of plain Python values; a field that a struct lacks is None. Which row comes when is decided
in `order.py`, along the blocks that this module reports.
"""

import glob
import hashlib
import os
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol, cast

import pyarrow as pa
import pyarrow.parquet as pq

from lit_rl.data.regroup import bytes_per_row, has_large_groups, opened, regrouped
from lit_rl.data.remote import is_url, local_copies
from lit_rl.errors import ConfigError, DataError

CACHE_BYTES = 128 * 2**20
"""Row groups kept in memory by each process."""

CACHE_DIR = "~/.cache/lit_rl"

ASSETS = Path(__file__).resolve().parents[1] / "assets"


class RowTable(Protocol):
    """Anything with a length whose items are dicts: a `datasets.Dataset`, a list of rows."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> dict[str, Any]: ...


RowSource = str | Sequence[str] | RowTable


@dataclass(frozen=True)
class Block:
    """Rows that are read together: one row group.

    Args:
        rows: indices over all files.
        size: bytes in memory.
    """

    rows: Sequence[int]
    size: int


class Rows(ABC):
    """Rows by index, with the names that error messages need."""

    blocks: list[Block]

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> dict[str, Any]:
        """One row as plain Python values."""

    @abstractmethod
    def where(self, index: int) -> str:
        """File and row number (from 0, within the file) of a row."""

    @abstractmethod
    def column_names(self) -> set[str]:
        """Columns that some row has, those included that are not handed out."""

    @abstractmethod
    def fingerprint(self) -> str:
        """A short hash that other rows do not have, wherever they lie; reads next to nothing."""


def open_rows(
    source: RowSource,
    *,
    key: str,
    required: Sequence[str] = (),
    only_required: bool = False,
    max_samples: int = -1,
    cache_dir: str = CACHE_DIR,
) -> Rows:
    """Open files, or wrap rows that are in memory.

    Args:
        source: `embedded`, a file, a glob, a URL, a list of those, or a table of rows.
        key: dotted key that error messages name.
        required: columns that each file (each row in memory) must have.
        only_required: read no other columns.
        max_samples: use the first so many rows; -1 uses all.
        cache_dir: where copies of remote files lie, and of files in row groups too large to read at random.

    Raises:
        ConfigError: not paths, nor rows; or no package for a URL.
        DataError: a file is missing, broken, or lacks a column; a glob matches nothing; there are no rows.
    """
    paths = paths_of(source)
    if paths is None:
        rows: Rows = MemoryRows(cast(RowTable, source), key, required, only_required, max_samples)
    else:
        rows = ParquetRows(
            local_files(paths, key, cache_dir), required, only_required, max_samples, cache_dir=cache_dir
        )
    if not len(rows):
        raise DataError(f"{key} holds no rows (found {_shown(source)}); give at least one row.")
    return rows


class ParquetRows(Rows):
    """Rows of parquet files, in the order of the files.

    The number of rows comes from the footers. A row group is read when one of its rows is asked for, and
    the last ones used are kept while they fit in `cache_bytes`, so memory is flat however long the file is.
    Files in large row groups are read from a copy in smaller ones.

    Args:
        files: paths, or pairs of a path and the name by which messages call it.
        required: columns that each file must have.
        only_required: read no other columns.
        max_samples: use the first so many rows; -1 uses all.
        cache_bytes: memory for row groups; one is always kept.
        cache_dir: where copies lie.
    """

    def __init__(
        self,
        files: Sequence[str | tuple[str, str]],
        required: Sequence[str] = (),
        only_required: bool = False,
        max_samples: int = -1,
        cache_bytes: int = CACHE_BYTES,
        cache_dir: str = CACHE_DIR,
    ) -> None:
        self._cache_bytes, self._cache_dir = cache_bytes, cache_dir
        named = [(file, file) if isinstance(file, str) else file for file in files]
        self._files = [file for file, _ in named]
        self._names: dict[str, str] = {}  # of the files that are read, for messages
        self._column_names: set[str] = set()
        self._required = list(required)
        self._columns = self._required if only_required else None
        self._groups: list[tuple[str, int, int]] = []  # file, number of the row group, first row of the file
        self._cache: OrderedDict[int, pa.Table] = OrderedDict()
        self.blocks = []
        for file, name in named:
            self._add(file, name)
        total = sum(len(block.rows) for block in self.blocks)
        self._length = total if max_samples < 0 else min(total, max_samples)
        self._starts = [0, *accumulate(len(block.rows) for block in self.blocks)]
        clipped = [Block(range(b.rows[0], min(b.rows[-1] + 1, self._length)), b.size) for b in self.blocks]
        self.blocks = [block for block in clipped if len(block.rows)]

    def _add(self, file: str, name: str) -> None:
        with _opened(file, name) as parquet:
            names = parquet.schema_arrow.names
            self._column_names.update(names)
            for column in self._required:
                if column not in names:
                    raise DataError(f"{name} has no column {column!r}; it has {', '.join(names)}.")
            is_large = _first_rows(has_large_groups, parquet, name)
        if is_large:
            file = regrouped(file, self._cache_dir)
        self._names[file] = name
        with _opened(file, name) as parquet:
            row = _first_rows(bytes_per_row, parquet, name)
            start = first = self.blocks[-1].rows[-1] + 1 if self.blocks else 0
            for i in range(parquet.metadata.num_row_groups):
                group = parquet.metadata.row_group(i)
                if group.num_rows:
                    size = max(group.total_byte_size, int(row * group.num_rows))
                    self._groups.append((file, i, first))
                    self.blocks.append(Block(range(start, start + group.num_rows), size))
                    start += group.num_rows

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Any]:
        group = self._group(index)
        row = self._table(group).slice(index - self._starts[group], 1)
        try:
            return row.to_pylist()[0]
        except UnicodeDecodeError as error:
            column = next(name for name in row.column_names if not _is_readable(row[name]))
            raise DataError(
                f"{self.where(index)}, column {column!r} is not UTF-8 ({error.reason}); write it again."
            ) from error

    def where(self, index: int) -> str:
        file, _, first = self._groups[self._group(index)]
        return f"{self._names[file]}, row {index - first}"

    def column_names(self) -> set[str]:
        return set(self._column_names)

    def fingerprint(self) -> str:
        return _short_hash([_footer(file) for file in dict.fromkeys(self._files)])

    def _group(self, index: int) -> int:
        if not 0 <= index < self._length:
            raise IndexError(index)
        return bisect_right(self._starts, index) - 1

    def _table(self, group: int) -> pa.Table:
        if group in self._cache:
            self._cache.move_to_end(group)
            return self._cache[group]
        file, number, _ = self._groups[group]
        try:
            # opened anew, without threads: neither a handle nor a thread pool survives a fork into a worker
            with _opened(file, self._names[file]) as parquet:
                table = parquet.read_row_group(number, columns=self._columns, use_threads=False)
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{self._names[file]}, row group {number} cannot be read ({error}).") from error
        self._cache[group] = table
        while len(self._cache) > 1 and sum(self.blocks[g].size for g in self._cache) > self._cache_bytes:
            self._cache.popitem(last=False)
        return table

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cache": OrderedDict()}


class MemoryRows(Rows):
    """Rows of a table that is in memory: a `datasets.Dataset`, a list of dicts.

    Args:
        table: the rows.
        key: dotted key that error messages name.
        required: columns that each row must have.
        only_required: hand out no other columns.
        max_samples: use the first so many rows; -1 uses all.
    """

    def __init__(
        self,
        table: RowTable,
        key: str,
        required: Sequence[str] = (),
        only_required: bool = False,
        max_samples: int = -1,
    ) -> None:
        self._table, self._key = table, key
        self._required, self._only_required = list(required), only_required
        self._length = len(table) if max_samples < 0 else min(len(table), max_samples)
        self.blocks = [Block(range(self._length), 0)] if self._length else []

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self._length:
            raise IndexError(index)
        row = self._table[index]
        if not isinstance(row, dict):
            raise DataError(f"{self.where(index)} must be a dict of columns (found {type(row).__name__}).")
        for column in self._required:
            if column not in row:
                raise DataError(f"{self.where(index)} has no column {column!r}; it has {', '.join(row)}.")
        return {name: row[name] for name in (self._required if self._only_required else row)}

    def where(self, index: int) -> str:
        return f"{self._key}, row {index}"

    def column_names(self) -> set[str]:
        """Of a list those of all rows, of another table those of its first row."""
        rows = self._table if isinstance(self._table, list) else [self._table[0]]
        return {name for row in rows if isinstance(row, dict) for name in row}

    def fingerprint(self) -> str:
        ends = {0, len(self) // 2, len(self) - 1}
        return _short_hash([repr(sorted(self[index].items())).encode() for index in sorted(ends)])


def _is_readable(values: pa.ChunkedArray) -> bool:
    try:
        values.to_pylist()
    except UnicodeDecodeError:
        return False
    return True


def _footer(file: str) -> bytes:
    """A parquet file's own description: schema, sizes, places and statistics of its columns."""
    with open(file, "rb") as content:
        content.seek(-8, os.SEEK_END)
        length = int.from_bytes(content.read(4), "little")
        content.seek(-8 - length, os.SEEK_END)
        return content.read(length)


def _short_hash(parts: list[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()[:12]


def _opened(file: str, name: str) -> pq.ParquetFile:
    try:
        return opened(file)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{name} is not a readable parquet file ({error}); write it again.") from error


def _first_rows(measure: Callable[[pq.ParquetFile], Any], parquet: pq.ParquetFile, name: str) -> Any:
    try:
        return measure(parquet)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{name}, row group 0 cannot be read ({error}).") from error


def paths_of(source: RowSource) -> list[str] | None:
    """The paths, or None for a table of rows."""
    if isinstance(source, str):
        return [source]
    is_paths = isinstance(source, list | tuple) and len(source) > 0 and isinstance(source[0], str)
    return list(cast(Sequence[str], source)) if is_paths else None


def local_files(paths: list[str], key: str, cache_dir: str) -> list[tuple[str, str]]:
    """Each file on this machine, with the name by which the user knows it.

    Args:
        paths: `embedded`, paths, globs, URLs.
        key: dotted key that error messages name.
        cache_dir: where copies of remote files lie.

    Raises:
        ConfigError: not a path, or no package for a URL.
        DataError: there is no such file.
    """
    files: list[tuple[str, str]] = []
    for path in paths:
        if not isinstance(path, str):
            raise ConfigError(f"{key} must be paths, or one table of rows (found {path!r}).")
        if is_url(path):
            files += local_copies(path, key=key, cache_dir=cache_dir).items()
            continue
        if path == "embedded" or path.startswith("embedded/"):
            path = str(ASSETS / f"{_embedded_split(path, key)}.parquet")
        path = str(Path(path).expanduser())
        matches = sorted(glob.glob(path, recursive=True)) if glob.has_magic(path) else [path]
        if not matches:
            raise DataError(f"{key} matches no file (found {path!r}); check the pattern.")
        files += [(match, match) for match in matches]
    for file, _ in files:
        if not Path(file).is_file():
            raise DataError(
                f"{key} must be existing parquet files (found {file!r}, which is not a file){_hint(file)}."
            )
    return files


def _hint(file: str) -> str:
    """How to make a file that the configuration expects of itself."""
    prepared = Path(CACHE_DIR).expanduser()
    if not Path(file).is_relative_to(prepared):
        return ""
    return f"; python -m lit_rl.data.prepare {Path(file).relative_to(prepared).parts[0]} makes it"


def _embedded_split(path: str, key: str) -> str:
    """`embedded` is the split that the key is for; `embedded/NAME` is that one."""
    split = path.partition("/")[2] or ("val" if key.startswith("data.val_files") else "train")
    if split not in ("train", "val", "hard"):
        raise ConfigError(f"{key} must be embedded/train, embedded/val or embedded/hard (found {path!r}).")
    return split


def _shown(source: Any) -> str:
    return (
        repr(source) if isinstance(source, str | list) and len(repr(source)) < 200 else type(source).__name__
    )
