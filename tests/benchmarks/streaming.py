"""Streams a parquet set made on the spot, once, in training order: rows, and the memory of the process.

    python tests/benchmarks/streaming.py --gigabytes 5 --files 4 --out outputs/streaming

With `--one-group` each file is one row group, as many writers leave it; it is then read from a copy.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

BYTES_AT_ONCE = 16 * 2**20


def make(folder: Path, gigabytes: float, files: int, row_bytes: int, one_group: bool) -> list[Path]:
    """Files of rows that cannot be compressed.

    Args:
        folder: where they go.
        gigabytes: of all together.
        files: how many.
        row_bytes: size of a row.
        one_group: each file is one row group, and is made in memory.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows, at_once = int(gigabytes * 2**30 / row_bytes / files), BYTES_AT_ONCE // row_bytes
    paths = [folder / f"part-{i}.parquet" for i in range(files)]
    for number, path in enumerate(paths):
        parts = (
            _rows(number * rows + start, min(at_once, rows - start), row_bytes)
            for start in range(0, rows, at_once)
        )
        with pq.ParquetWriter(path, _rows(0, 1, row_bytes).schema, compression="none") as writer:
            for table in [pa.concat_tables(parts)] if one_group else parts:
                writer.write_table(table, row_group_size=rows)
    return paths


def _rows(start: int, count: int, row_bytes: int) -> pa.Table:
    return pa.table(
        {
            "prompt": [f"question {i}" for i in range(start, start + count)],
            "blob": [os.urandom(row_bytes // 2).hex() for _ in range(count)],
        }
    )


def stream(pattern: str, cache_dir: str) -> None:
    """Print rows, and the highest memory of this process before and after, in bytes."""
    from lit_rl.data.prompts import PromptDataModule

    data = PromptDataModule(
        train_files=pattern, val_files=None, train_batch_size=64, total_epochs=1, cache_dir=cache_dir
    )
    data.setup("fit")
    before = _highest()
    rows = {row for batch in data.train_dataloader() for row in batch.prompt_row.tolist()}
    print(len(rows), before, _highest())


def streamed(pattern: str, cache_dir: str) -> tuple[int, int, int]:
    """What `stream` prints, in a process of its own."""
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import streaming; "
    code += f"streaming.stream({pattern!r}, {cache_dir!r})"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    rows, before, after = map(int, done.stdout.split()[-3:])
    return rows, before, after


def _highest() -> int:
    """Of this program alone: `ru_maxrss` would begin with what its parent had."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gigabytes", type=float, default=5)
    parser.add_argument("--files", type=int, default=4)
    parser.add_argument("--row-bytes", type=int, default=16384)
    parser.add_argument("--one-group", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("outputs/streaming"))
    args = parser.parse_args()
    paths = make(args.out / "set", args.gigabytes, args.files, args.row_bytes, args.one_group)
    size = sum(path.stat().st_size for path in paths)
    start = time.monotonic()
    rows, before, after = streamed(str(args.out / "set" / "*.parquet"), str(args.out / "cache"))
    print(f"{size / 2**30:.2f} GB on disk, {rows} rows, {time.monotonic() - start:.0f} s")
    print(f"memory: {before / 2**20:.0f} MB before the first row, {after / 2**20:.0f} MB at most")


if __name__ == "__main__":
    main()
