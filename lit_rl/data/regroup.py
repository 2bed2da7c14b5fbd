"""Row groups of a size that can be read at random: a file of too large ones is written again, once."""

import hashlib
import logging
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from filelock import FileLock

log = logging.getLogger(__name__)

LARGEST_GROUP = 96 * 2**20
"""Bytes of a row group in memory, above which its file is written again."""
NEW_GROUP = 16 * 2**20
"""Bytes of the row groups that are written."""
SAMPLE = 64
"""Rows that are looked at to learn how large a row is in memory."""


def opened(file: str) -> pq.ParquetFile:
    """The file, of which no more is read ahead than a few pages."""
    return pq.ParquetFile(file, buffer_size=2**20, pre_buffer=False)


def bytes_per_row(parquet: pq.ParquetFile) -> float:
    """Size in memory of a row, by the first ones: a dictionary in the file may hide it."""
    groups = [0] if parquet.metadata.num_row_groups else []
    for batch in parquet.iter_batches(batch_size=SAMPLE, row_groups=groups, use_threads=False):
        return float(batch.nbytes / max(1, batch.num_rows))
    return 0.0


def has_large_groups(parquet: pq.ParquetFile) -> bool:
    """Whether reading one row of some group would read more than LARGEST_GROUP."""
    groups = [parquet.metadata.row_group(i) for i in range(parquet.metadata.num_row_groups)]
    row = bytes_per_row(parquet)
    return any(max(g.total_byte_size, row * g.num_rows) > LARGEST_GROUP and g.num_rows > 1 for g in groups)


def regrouped(file: str, cache_dir: str) -> str:
    """A copy of the file in row groups of about NEW_GROUP bytes, made in flat memory the first time.

    Args:
        file: path; a file of another place, size or time has another copy.
        cache_dir: where copies lie.
    """
    stat = os.stat(file)
    version = repr((os.path.realpath(file), stat.st_size, stat.st_mtime_ns))
    name = hashlib.sha256(version.encode()).hexdigest()[:16]
    copy = Path(cache_dir).expanduser() / "regrouped" / f"{name}.parquet"
    copy.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(copy.with_suffix(".lock")):
        if not copy.exists():
            log.info("%s has row groups of more than %d MiB: writing %s", file, LARGEST_GROUP >> 20, copy)
            part = copy.with_suffix(".part")
            _write_again(file, str(part))
            os.replace(part, copy)
    return str(copy)


def _write_again(file: str, target: str) -> None:
    with opened(file) as parquet:
        step = max(1, int(NEW_GROUP / max(1.0, bytes_per_row(parquet))))
        with pq.ParquetWriter(target, parquet.schema_arrow) as writer:
            for batch in parquet.iter_batches(batch_size=step, use_threads=False):
                writer.write_table(pa.Table.from_batches([batch]), row_group_size=step)
