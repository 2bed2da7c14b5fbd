"""Rows in verl's schema, and parquet files of them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

Row = dict[str, Any]


@pytest.fixture
def prompt_rows() -> Callable[..., list[Row]]:
    """prompt_rows(n) -> n rows; row i asks `q<i>`, and its ground truth is i."""

    def build(count: int) -> list[Row]:
        return [
            {
                "data_source": "test/even" if i % 2 == 0 else "test/odd",
                "prompt": [{"role": "user", "content": f"q{i}"}],
                "ability": "count",
                "reward_model": {"style": "rule", "ground_truth": str(i)},
                "extra_info": {"index": i},
            }
            for i in range(count)
        ]

    return build


@pytest.fixture
def write_parquet(tmp_path: Path) -> Callable[..., str]:
    """write_parquet(rows, name="train.parquet", row_group_size=1000) -> path."""

    def write(rows: list[Row], name: str = "train.parquet", row_group_size: int = 1000) -> str:
        path = tmp_path / name
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=row_group_size)
        return str(path)

    return write
