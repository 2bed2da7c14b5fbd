import logging
from itertools import chain

import pytest
from byte_tokenizer import byte_tokenizer

from lit_rl.data.sft import SFTDataModule
from lit_rl.errors import ConfigError, DataError


def row(question: str, *answers: str) -> dict:
    turns = [
        [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        for answer in answers
    ]
    return {"messages": list(chain(*turns)), "source": question}


def module(rows: list[dict], **settings) -> SFTDataModule:
    settings = {"train_batch_size": 1, "shuffle": False, "tokenizer": byte_tokenizer(), **settings}
    datamodule = SFTDataModule(train_files=rows, **settings)
    datamodule.setup("fit")
    return datamodule


def test_a_batch_holds_prompts_completions_and_what_counts() -> None:
    rows = [row("ab", "c", "def"), row("a", "b")]
    (batch,) = module(rows, train_batch_size=2).train_dataloader()
    assert batch.prompt_len.tolist() == [5, 4] and batch.completion_len.tolist() == [11, 2]
    assert batch.prompt_ids.shape == (2, 5) and batch.completion_ids.shape == (2, 11)
    assert batch.completion_mask[0].nonzero().flatten().tolist() == [0, 1, 7, 8, 9, 10]  # c end | def end
    assert batch.completion_mask[1].tolist() == [True, True] + [False] * 9
    assert batch.num_generations == 1 and batch.prompt_row.tolist() == [0, 1]
    assert batch.columns["source"] == ["ab", "a"]


def test_a_row_is_cut_on_the_right() -> None:
    (batch,) = module([row("ab", "cdefgh")], max_length=8).train_dataloader()
    assert batch.prompt_len.tolist() == [5] and batch.completion_len.tolist() == [3]
    assert module([row("ab", "cdefgh")]).chat.decode(batch.completion_ids[0].tolist()) == "cde"


@pytest.mark.field("num/15")
def test_rows_without_a_supervised_token_are_dropped_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    rows = [row("x" * 37, "y" * 4), row("x", "y" * 4)] * 2
    with caplog.at_level(logging.INFO):
        datamodule = module(rows, max_length=32, train_batch_size=2)
    assert [batch.prompt_row.tolist() for batch in datamodule.train_dataloader()] == [[1, 3]]
    assert "2 of 4 rows left out: 2 with no supervised token within data.max_length=32" in caplog.text
    assert datamodule.num_rows()["train"] == 2


@pytest.mark.field("num/15")
def test_nothing_left_to_supervise_fails_at_the_start_and_names_the_limit() -> None:
    rows = [row("x" * 37, "y" * 4)] * 64  # 40 tokens, then 5
    words = r"none of the 64 rows is left: 64 with no supervised token within data\.max_length=32"
    with pytest.raises(DataError, match=words):
        module(rows, max_length=32)
    assert module(rows, max_length=41).num_rows()["train"] == 64


def test_a_row_without_answer_is_an_error_or_skipped() -> None:
    rows = [row("a", "b"), {"messages": row("a", "b")["messages"][:1]}, {"messages": None}]
    with pytest.raises(
        DataError, match=r"data\.train_files, row 1, column 'messages' must hold a message of the role"
    ):
        module(rows)
    assert module(rows, on_bad_row="skip").num_rows()["train"] == 1


def test_validation_rows_have_completions_too() -> None:
    loader = module([row("a", "b")], val_files=[row("c", "d"), row("e", "f")]).val_dataloader()
    (batch,) = loader
    assert batch.prompt_row.tolist() == [0, 1] and batch.completion_len.tolist() == [2, 2]


def test_a_resumed_run_sees_what_the_uninterrupted_one_sees() -> None:
    def loader():
        return module(
            [row("x" * n, "y") for n in range(1, 8)], shuffle=True, total_epochs=2
        ).train_dataloader()

    whole = [batch.prompt_row.tolist() for batch in loader()]
    first, second = loader(), loader()
    running = iter(first)
    for _ in range(7):
        next(running)
    second.load_state_dict(first.state_dict())
    assert [batch.prompt_row.tolist() for batch in second] == whole[7:]


def test_a_limit_without_room_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^data\.max_length must be null or >= 2 \(found 1\)"):
        SFTDataModule(max_length=1)
