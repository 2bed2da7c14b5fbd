import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from lit_rl.data.parquet import ParquetRows, open_rows
from lit_rl.errors import ConfigError, DataError

KEY = "data.train_files"


def numbered(start: int, stop: int) -> list[dict]:
    return [{"prompt": f"q{i}", "number": i} for i in range(start, stop)]


@pytest.fixture
def three_files(write_parquet: Callable[..., str]) -> list[str]:
    """23 rows: 10, 1 and 12, in row groups of 4."""
    cuts = [(0, 10), (10, 11), (11, 23)]
    return [write_parquet(numbered(*cut), f"part{i}.parquet", 4) for i, cut in enumerate(cuts)]


def test_every_row_of_several_files_comes_back_at_its_index_in_any_order(three_files: list[str]) -> None:
    rows = open_rows(three_files, key=KEY)
    assert len(rows) == 23
    assert [rows[i]["number"] for i in reversed(range(23))] == list(reversed(range(23)))
    assert [len(block.rows) for block in rows.blocks] == [4, 4, 2, 1, 4, 4, 4]
    assert [i for block in rows.blocks for i in block.rows] == list(range(23))


def test_a_glob_takes_the_files_in_order_of_name(three_files: list[str], tmp_path: Path) -> None:
    rows = open_rows(str(tmp_path / "part*.parquet"), key=KEY)
    assert [rows[i]["number"] for i in range(23)] == list(range(23))


def test_a_place_is_named_by_file_and_row_within_the_file(three_files: list[str]) -> None:
    rows = open_rows([*three_files, three_files[0]], key=KEY)
    assert rows.where(9) == f"{three_files[0]}, row 9"
    assert rows.where(12) == f"{three_files[2]}, row 1"
    assert rows.where(24) == f"{three_files[0]}, row 1"


@pytest.mark.parametrize("count", [1, 4, 9, 11, 22, 23, 99])
def test_max_samples_uses_the_first_rows(three_files: list[str], count: int) -> None:
    rows = open_rows(three_files, key=KEY, max_samples=count)
    assert len(rows) == min(count, 23)
    assert [i for block in rows.blocks for i in block.rows] == list(range(min(count, 23)))
    with pytest.raises(IndexError):
        rows[min(count, 23)]


@pytest.mark.field("data/5")
def test_nested_values_are_plain_python_and_missing_fields_none(write_parquet: Callable[..., str]) -> None:
    written = [
        {"prompt": "a", "answer": "1", "meta": {"level": 2, "topic": "x"}, "tags": ["u", "v"]},
        {"prompt": "b", "answer": "2", "meta": {"level": 3}, "tags": []},
        {"prompt": "c", "answer": None, "meta": None, "tags": None},
    ]
    rows = open_rows(write_parquet(written), key=KEY)
    assert rows[0] == written[0]
    assert rows[1]["meta"] == {"level": 3, "topic": None} and rows[1]["tags"] == []
    assert rows[2] == {"prompt": "c", "answer": None, "meta": None, "tags": None}
    assert type(rows[0]["meta"]["level"]) is int and type(rows[0]["tags"]) is list


def test_memory_stays_within_the_cache_however_long_the_file(write_parquet: Callable[..., str]) -> None:
    path = write_parquet(numbered(0, 400), row_group_size=10)
    size = ParquetRows([path]).blocks[0].size
    rows = ParquetRows([path], cache_bytes=3 * size)
    for i in range(400):
        assert rows[i]["number"] == i
        assert len(rows._cache) <= 3
    assert len(pickle.dumps(rows)) < 20_000  # a loader worker gets footers, not rows
    assert len(ParquetRows([path], cache_bytes=0)._cache) == 0


def test_a_row_group_is_read_once_while_it_is_in_the_cache(write_parquet: Callable[..., str]) -> None:
    path = write_parquet(numbered(0, 8), row_group_size=4)
    rows = ParquetRows([path])
    first = [rows[i] for i in range(8)]
    Path(path).unlink()
    assert [rows[i] for i in range(8)] == first


def test_only_required_columns_are_read_when_asked_for(three_files: list[str]) -> None:
    assert open_rows(three_files, key=KEY, required=["prompt"], only_required=True)[3] == {"prompt": "q3"}
    assert open_rows(numbered(0, 4), key=KEY, required=["prompt"], only_required=True)[3] == {"prompt": "q3"}


def test_rows_in_memory_and_a_dataset_serve_the_same_rows(write_parquet: Callable[..., str]) -> None:
    import datasets

    in_file, in_memory = open_rows(write_parquet(numbered(0, 5)), key=KEY), open_rows(numbered(0, 5), key=KEY)
    dataset = open_rows(datasets.Dataset.from_list(numbered(0, 5)), key=KEY)
    assert (
        [in_memory[i] for i in range(5)] == [in_file[i] for i in range(5)] == [dataset[i] for i in range(5)]
    )
    assert in_memory.where(2) == "data.train_files, row 2"


def test_embedded_is_the_split_of_its_key() -> None:
    train, val = open_rows("embedded", key=KEY), open_rows("embedded", key="data.val_files")
    hard = open_rows("embedded/hard", key=KEY)
    assert len({len(train), len(val), len(hard)}) == 3
    assert set(train[0]) >= {"data_source", "prompt", "reward_model"}


@pytest.mark.parametrize(
    ("source", "error", "words"),
    [
        (
            "nowhere.parquet",
            DataError,
            r"data\.train_files must be existing parquet files .*nowhere\.parquet",
        ),
        ("nowhere-*.parquet", DataError, r"data\.train_files matches no file .*nowhere-\*"),
        ("embedded/soft", ConfigError, r"data\.train_files must be embedded/train, .*embedded/soft"),
        (["a.parquet", 3], ConfigError, r"data\.train_files must be paths, or one table of rows \(found 3\)"),
        ([], DataError, r"data\.train_files holds no rows"),
    ],
)
def test_a_source_that_is_not_there_is_named(source: str | list, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        open_rows(source, key=KEY)


def test_a_broken_file_is_named(tmp_path: Path, write_parquet: Callable[..., str]) -> None:
    text = tmp_path / "text.parquet"
    text.write_text("not parquet")
    with pytest.raises(DataError, match=r"text\.parquet is not a readable parquet file"):
        open_rows(str(text), key=KEY)
    path = Path(write_parquet(numbered(0, 100)))
    raw = bytearray(path.read_bytes())
    raw[4:200] = bytes(196)
    path.write_bytes(raw)
    with pytest.raises(DataError, match=r"train\.parquet, row group 0 cannot be read"):
        open_rows(str(path), key=KEY)[0]


def test_a_missing_column_is_named_with_those_there_are(three_files: list[str]) -> None:
    with pytest.raises(DataError, match=r"part0\.parquet has no column 'question'; it has prompt, number"):
        open_rows(three_files, key=KEY, required=["question"])
    with pytest.raises(DataError, match=r"data\.train_files, row 0 has no column 'question'"):
        open_rows(numbered(0, 2), key=KEY, required=["question"])[0]


def test_a_row_that_is_no_dict_is_named() -> None:
    with pytest.raises(DataError, match=r"data\.train_files, row 1 must be a dict of columns \(found int\)"):
        open_rows([{"prompt": "a"}, 3], key=KEY)[1]
