"""A long set streams in flat memory. `tests/benchmarks/streaming.py` does the same with 5 GB."""

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest

from lit_rl.data import regroup
from lit_rl.data.parquet import CACHE_BYTES, ParquetRows, open_rows

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "streaming.py"


@pytest.mark.slow
@pytest.mark.parametrize("one_group", [False, True])
def test_three_times_the_cache_is_streamed_in_little_more_than_the_cache(
    one_group: bool, tmp_path: Path
) -> None:
    spec = importlib.util.spec_from_file_location("streaming", SCRIPT)
    assert spec is not None and spec.loader is not None
    streaming = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(streaming)
    size = 3 * CACHE_BYTES
    streaming.make(tmp_path / "set", size / 2**30, 2, 65536, one_group)
    rows, before, after = streaming.streamed(str(tmp_path / "set" / "*.parquet"), str(tmp_path / "cache"))
    assert rows == size // 65536 and before < 2**30
    assert after - before < 1.6 * CACHE_BYTES
    assert (tmp_path / "cache").exists() == one_group


def test_a_file_of_large_row_groups_is_read_from_a_copy_made_once(
    write_parquet: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(regroup, "LARGEST_GROUP", 20_000)
    monkeypatch.setattr(regroup, "NEW_GROUP", 5_000)
    caplog.set_level("INFO")
    rows = [{"prompt": "x" * 100, "number": i, "meta": {"tags": [str(i)]}} for i in range(300)]
    file = write_parquet(rows)  # a dictionary: 300 times the same text is small on disk
    opened = open_rows(file, key="data.train_files", cache_dir=str(tmp_path / "cache"))
    assert [opened[i] for i in range(300)] == rows
    assert all(len(block.rows) < 60 for block in opened.blocks)
    assert opened.where(250) == f"{file}, row 250"
    assert opened.fingerprint() == ParquetRows([file], cache_dir=str(tmp_path / "other")).fingerprint()
    (copy,) = (tmp_path / "cache").rglob("*.parquet")
    written = copy.stat()
    open_rows(file, key="data.train_files", cache_dir=str(tmp_path / "cache"))
    assert copy.stat() == written and caplog.text.count("has row groups of more than") == 2
    write_parquet([{**row, "number": -1} for row in rows])
    assert open_rows(file, key="data.train_files", cache_dir=str(tmp_path / "cache"))[0]["number"] == -1
