"""Every kind of bad row: the error names file, row and column; `on_bad_row=skip` leaves it out and counts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from byte_tokenizer import byte_tokenizer

from lit_rl.data.base import RowDataModule
from lit_rl.data.prompts import PromptDataModule
from lit_rl.data.sft import SFTDataModule
from lit_rl.errors import DataError

BAD_PROMPTS: dict[str, tuple[Any, str]] = {
    "null": (None, r"must be text or a list of messages \(found None\)"),
    "no message": ([], r"must be text or a list of messages \(found \[\]\)"),
    "a message without role": (
        [{"role": None, "content": "a"}],
        r"message 0 must have a text 'role' \(found None\)",
    ),
    "a message without content": (
        [{"role": "user", "content": "a"}, {"role": "user", "content": None}],
        r"message 1 must have a text 'content' \(found None\)",
    ),
    "empty messages": ([{"role": "user", "content": " "}], "must hold a message that says something"),
}


def module(file: str, **settings: Any) -> PromptDataModule:
    return PromptDataModule(
        train_files=file,
        val_files=None,
        train_batch_size=1,
        total_epochs=1,
        tokenizer=byte_tokenizer(),
        **settings,
    )


def served(datamodule: RowDataModule) -> list[int]:
    datamodule.setup("fit")
    return sorted(row for batch in datamodule.train_dataloader() for row in batch.prompt_row.tolist())


def check(
    make: Callable[..., RowDataModule], file: str, column: str, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Row 2 of 4 is refused by name, and left out on request."""
    with pytest.raises(DataError, match=rf"^{file}, row 2, column '{column}',? ?{words}"):
        served(make(file))
    assert served(make(file, on_bad_row="skip")) == [0, 1, 3]
    assert "1 of 4 rows left out: 1 with nothing that can be read" in caplog.text
    assert f"first: {file}, row 2" in caplog.text


@pytest.mark.parametrize("kind", BAD_PROMPTS)
def test_a_bad_prompt_is_named_or_skipped_and_counted(
    kind: str, prompt_rows: Callable, write_parquet: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    rows = prompt_rows(4)
    rows[2]["prompt"], words = BAD_PROMPTS[kind]
    check(module, write_parquet(rows, row_group_size=3), "prompt", words, caplog)


def test_an_empty_text_is_named_or_skipped_and_counted(
    write_parquet: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"prompt": text} for text in ("a", "b", "\n", "c")]
    words = r"must be text or messages \(found '\\n', which is empty\)"
    check(module, write_parquet(rows), "prompt", words, caplog)


def test_a_prompt_of_a_wrong_type_is_named(write_parquet: Callable) -> None:
    file = write_parquet([{"prompt": 3}, {"prompt": 4}])
    with pytest.raises(DataError, match=rf"^{file}, row \d, column 'prompt' must be text .*\(found \d\)"):
        served(module(file))
    with pytest.raises(DataError, match="none of the 2 rows is left: 2 with nothing that can be read"):
        served(module(file, on_bad_row="skip"))


@pytest.mark.parametrize("column", ["prompt", "answer"])
def test_a_text_in_another_encoding_is_named_or_skipped_and_counted(
    column: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    texts = pa.array([b"a", b"b", "\u00e9".encode("latin-1"), b"d"])
    columns = {"prompt": pa.array(list("abcd")), "answer": pa.array(list("abcd"))}
    columns[column] = pa.StringArray.from_buffers(4, *texts.buffers()[1:])
    pq.write_table(pa.table(columns), tmp_path / "latin.parquet")
    check(module, str(tmp_path / "latin.parquet"), column, "is not UTF-8", caplog)


def test_a_part_of_a_file_that_is_broken_is_named_or_skipped_and_counted(
    prompt_rows: Callable, write_parquet: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    path = Path(write_parquet(prompt_rows(6), row_group_size=2))
    group = pq.ParquetFile(path).metadata.row_group(1).column(1)
    raw = bytearray(path.read_bytes())
    start = group.dictionary_page_offset or group.data_page_offset
    raw[start : start + group.total_compressed_size] = bytes(group.total_compressed_size)
    path.write_bytes(raw)
    with pytest.raises(DataError, match=rf"^{path}, row group 1 cannot be read"):
        served(module(str(path)))
    assert served(module(str(path), on_bad_row="skip")) == [0, 1, 4, 5]
    assert "2 of 6 rows left out" in caplog.text


def test_an_overlong_prompt_is_named_and_dropped_by_its_own_key(
    prompt_rows: Callable, write_parquet: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    rows = prompt_rows(4)
    rows[2]["prompt"][0]["content"] = "x" * 50
    file = write_parquet(rows)
    settings = {"max_prompt_length": 20}
    with pytest.raises(DataError, match=rf"^{file}, row 2, column 'prompt': the prompt has 53 tokens"):
        served(module(file, truncation="error", **settings))
    assert served(module(file, filter_overlong_prompts=True, **settings)) == [0, 1, 3]
    assert "1 of 4 rows left out: 1 with a prompt longer" in caplog.text


def test_a_missing_column_and_a_file_that_is_none_are_named(write_parquet: Callable, tmp_path: Path) -> None:
    file = write_parquet([{"question": "a"}])
    with pytest.raises(DataError, match=rf"^{file} has no column 'prompt'; it has question"):
        served(module(file, on_bad_row="skip"))
    (tmp_path / "text.parquet").write_text("not parquet")
    with pytest.raises(DataError, match=rf"^{tmp_path}/text\.parquet is not a readable parquet file"):
        served(module(str(tmp_path / "text.parquet"), on_bad_row="skip"))


BAD_CHATS = {
    "null": (None, "must be text or a list of messages"),
    "no answer": ([{"role": "user", "content": "a"}], "must hold a message of the role assistant"),
    "no question": (
        [{"role": "assistant", "content": "a"}],
        "must not begin with a message of the role assistant",
    ),
    "no role": ([{"role": None, "content": "a"}], "message 0 must have a text 'role'"),
}


@pytest.mark.parametrize("kind", BAD_CHATS)
def test_a_bad_conversation_is_named_or_skipped_and_counted(
    kind: str, write_parquet: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    good = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    chat, words = BAD_CHATS[kind]

    def make(file: str, **settings: Any) -> SFTDataModule:
        return SFTDataModule(
            train_files=file, train_batch_size=1, total_epochs=1, tokenizer=byte_tokenizer(), **settings
        )

    file = write_parquet([{"messages": good}, {"messages": good}, {"messages": chat}, {"messages": good}])
    check(make, file, "messages", words, caplog)
