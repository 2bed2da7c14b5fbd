from collections.abc import Callable
from pathlib import Path

import pytest
from byte_tokenizer import byte_tokenizer

from lit_rl.data.custom import CustomClass
from lit_rl.data.prompts import PromptDataModule
from lit_rl.errors import ConfigError

SOURCE = """
import json
from torch.utils.data import Dataset, IterableDataset


class Lines(Dataset):
    def __init__(self, data_files, tokenizer=None):
        self.vocabulary = len(tokenizer)
        self.rows = [json.loads(line) for file in data_files for line in open(file)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"prompt": self.rows[index]["ask"], "vocabulary": self.vocabulary, **self.rows[index]}


class Greedy(Lines):
    def __init__(self, data_files, config): ...


class Endless(IterableDataset): ...


class NoDataset: ...
"""


@pytest.fixture
def source(tmp_path: Path) -> str:
    path = tmp_path / "mine.py"
    path.write_text(SOURCE)
    return str(path)


def test_a_dataset_class_of_the_user_reads_files_of_its_own_kind(source: str, tmp_path: Path) -> None:
    for name, questions in (("a.jsonl", "pq"), ("b.jsonl", "r"), ("v.jsonl", "s")):
        (tmp_path / name).write_text("".join(f'{{"ask": "{q}", "level": 3}}\n' for q in questions))
    datamodule = PromptDataModule(
        train_files=str(tmp_path / "[ab].jsonl"),
        val_files=str(tmp_path / "v.jsonl"),
        train_batch_size=3,
        total_epochs=1,
        shuffle=False,
        tokenizer=byte_tokenizer(),
        custom_cls=CustomClass(source, "Lines"),
    )
    datamodule.setup("fit")
    (batch,) = datamodule.train_dataloader()
    assert batch.columns["prompt"] == ["p", "q", "r"] and batch.columns["level"] == [3, 3, 3]
    assert batch.columns["vocabulary"] == [len(byte_tokenizer())] * 3
    (batch,) = datamodule.val_dataloader()
    assert batch.columns["ask"] == ["s"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Lins", r"custom_cls\.name must be a subclass of torch.*'Lins', which is not there"),
        ("NoDataset", r"custom_cls\.name must be a subclass of torch.*'NoDataset', which is none"),
        ("Endless", r"custom_cls\.name must be a class with __len__ and __getitem__ \(found 'Endless'\)"),
        ("Greedy", r"custom_cls\.name must be .* made from data_files and tokenizer .*also wants 'config'"),
    ],
)
def test_a_class_that_cannot_be_used_is_named(source: str, name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        CustomClass(source, name).dataset([], byte_tokenizer)


def test_a_file_that_is_not_there_or_breaks_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"custom_cls\.path must be a Python file .*nowhere\.py"):
        CustomClass("nowhere.py", "A").dataset([], byte_tokenizer)
    broken = tmp_path / "broken.py"
    broken.write_text("1 / 0")
    with pytest.raises(ConfigError, match=r"custom_cls\.path: running .* raised ZeroDivisionError"):
        CustomClass(str(broken), "A").dataset([], byte_tokenizer)
    with pytest.raises(ConfigError, match=r"custom_cls\.path .* and data\.custom_cls\.name .* come together"):
        CustomClass(name="A")


RENDERED: dict[str, Callable] = {
    "raw_input_ids": lambda chat: chat.ids("q0"),
    "raw_chat": lambda chat: [{"role": "user", "content": "q0"}],
    "full_prompt": lambda chat: "<|user|>q0<|end|><|assistant|>",
}


@pytest.mark.parametrize("name", RENDERED)
def test_a_rendering_of_the_prompt_is_a_column_when_asked_for(prompt_rows: Callable, name: str) -> None:
    settings = {"train_batch_size": 1, "shuffle": False, "tokenizer": byte_tokenizer(), "val_files": None}
    datamodule = PromptDataModule(train_files=prompt_rows(2), **settings, **{f"return_{name}": True})
    datamodule.setup("fit")
    batch = next(iter(datamodule.train_dataloader()))
    assert batch.columns[name] == [RENDERED[name](datamodule.chat)]
    assert name in datamodule.column_names() and len(RENDERED.keys() & batch.columns.keys()) == 1
    rows = [{**row, name: "mine"} for row in prompt_rows(2)]
    taken = PromptDataModule(train_files=rows, **settings, **{f"return_{name}": True})
    with pytest.raises(ConfigError, match=rf"return_{name}=true would replace the column '{name}'"):
        taken.column_names()
