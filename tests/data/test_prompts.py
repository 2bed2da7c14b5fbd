import inspect
import logging
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from byte_tokenizer import TEMPLATE, byte_tokenizer
from torch.testing._internal.distributed.fake_pg import FakeStore

from lit_rl.batch import RolloutBatch
from lit_rl.data.loader import LoaderOptions
from lit_rl.data.prompts import PromptDataModule
from lit_rl.errors import ConfigError, DataError

HERE = Path(__file__).parent
MakeRows = Callable[..., list[dict]]


def module(rows: list | str, **settings) -> PromptDataModule:
    settings = {"val_files": None, "train_batch_size": 2, "tokenizer": byte_tokenizer(), **settings}
    datamodule = PromptDataModule(train_files=rows, **settings)
    datamodule.setup("fit")
    return datamodule


def rows_of(batches: Iterator[RolloutBatch]) -> list[list[int]]:
    return [batch.prompt_row.tolist() for batch in batches]


@pytest.fixture
def second_of_two_ranks() -> Iterator[None]:
    """This process is rank 1 of 2; nothing is exchanged."""
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


def test_a_batch_holds_left_padded_prompts_and_their_columns(prompt_rows: MakeRows) -> None:
    rows = prompt_rows(12)
    datamodule = module(rows, train_batch_size=4, shuffle=False)
    batch = list(datamodule.train_dataloader())[2]
    assert batch.prompt_row.tolist() == [8, 9, 10, 11]
    assert batch.prompt_len.tolist() == [5, 5, 6, 6] and batch.prompt_ids.shape == (4, 6)
    texts = [
        datamodule.chat.tokenizer.decode(ids[mask])
        for ids, mask in zip(batch.prompt_ids, batch.prompt_mask, strict=True)
    ]
    assert texts == [f"<|user|>q{i}<|end|><|assistant|>" for i in range(8, 12)]
    assert batch.prompt_ids[0, 0] == datamodule.chat.pad_token_id
    assert batch.columns == {name: [row[name] for row in rows[8:]] for name in rows[0]}
    assert batch.num_generations == 1 and batch.completion_ids is None


@pytest.mark.field("data/5")
def test_every_generation_of_a_prompt_gets_its_own_row_of_every_column(
    write_parquet: Callable[..., str],
) -> None:
    rows = [
        {"prompt": "a", "answer": "1", "meta": {"level": 2, "topic": "x"}, "tags": ["u", "v"]},
        {"prompt": "b", "answer": "2", "meta": {"level": 3, "topic": None}, "tags": []},
        {"prompt": "c", "answer": "3", "meta": None, "tags": None},
    ]
    datamodule = module(write_parquet(rows), train_batch_size=3, shuffle=False, total_epochs=1)
    (batch,) = datamodule.train_dataloader()
    columns = batch.repeat(4).columns
    assert columns == {name: [row[name] for row in rows for _ in range(4)] for name in rows[0]}


def test_rows_with_different_columns_are_filled_with_none() -> None:
    datamodule = module([{"prompt": "a", "x": 1}, {"prompt": "b", "y": 2}], shuffle=False, total_epochs=1)
    (batch,) = datamodule.train_dataloader()
    assert batch.columns == {"prompt": ["a", "b"], "x": [1, None], "y": [None, 2]}


def test_without_unused_columns_only_the_prompt_is_left(prompt_rows: MakeRows, write_parquet) -> None:
    for source in (prompt_rows(4), write_parquet(prompt_rows(4))):
        batch = next(iter(module(source, remove_unused_columns=True).train_dataloader()))
        assert list(batch.columns) == ["prompt"]


@pytest.mark.field("ckpt/1")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_resumed_at_any_step_sees_what_the_uninterrupted_one_sees(
    prompt_rows: MakeRows, workers: int
) -> None:
    def loader():
        options = LoaderOptions(num_workers=workers)
        return module(prompt_rows(10), train_batch_size=1, total_epochs=2, loader=options).train_dataloader()

    whole = rows_of(loader())
    assert sorted(chain(*whole[:10])) == sorted(chain(*whole[10:])) == list(range(10))
    for stop in (0, 4, 9, 10, 11, 20):  # 10: the end of a data epoch
        first, second = loader(), loader()
        running = iter(first)
        seen = [next(running).prompt_row.tolist() for _ in range(stop)]
        second.load_state_dict(first.state_dict())
        assert seen + rows_of(second) == whole


def test_the_place_is_plain_and_names_what_the_order_depends_on(
    prompt_rows: MakeRows, tmp_path: Path
) -> None:
    state = module(prompt_rows(10)).train_dataloader().state_dict()
    torch.save(state, tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt", weights_only=True) == state
    for settings, key in [
        ({"seed": 1}, "seed"),
        ({"shuffle": False}, "shuffle"),
        ({"train_batch_size": 5}, "train_b"),
    ]:
        with pytest.raises(
            ConfigError, match=rf"data\.{key}\w* must be what the checkpoint was written with"
        ):
            module(prompt_rows(10), **settings).train_dataloader().load_state_dict(state)
    with pytest.raises(
        ConfigError, match=r"data\.train_files must be .* '10 rows, \w+' \(found '11 rows, \w+'\)"
    ):
        module(prompt_rows(11)).train_dataloader().load_state_dict(state)


@pytest.mark.field("data/8")
def test_two_ranks_split_a_step_into_whole_prompts(
    prompt_rows: MakeRows, request: pytest.FixtureRequest
) -> None:
    whole = rows_of(module(prompt_rows(10), train_batch_size=4).train_dataloader())
    request.getfixturevalue("second_of_two_ranks")
    mine = rows_of(module(prompt_rows(10), train_batch_size=4).train_dataloader())
    assert mine == [step[1::2] for step in whole]


def test_ranks_that_do_not_divide_a_step_are_refused(
    prompt_rows: MakeRows, second_of_two_ranks: None
) -> None:
    with pytest.raises(
        ConfigError, match=r"data\.train_batch_size must divide by the 2 ranks \(found 3\); 4 is"
    ):
        module(prompt_rows(10), train_batch_size=3).train_dataloader()


@pytest.mark.field("data/7")
def test_validation_takes_every_row_once_over_two_ranks(
    prompt_rows: MakeRows, second_of_two_ranks: None
) -> None:
    datamodule = module(prompt_rows(4), val_files=prompt_rows(5), val_batch_size=4)
    assert rows_of(datamodule.val_dataloader()) == [[1], [3]]
    datamodule = module(prompt_rows(4), val_files=prompt_rows(1))
    with pytest.raises(
        ConfigError, match=r"data\.val_files must hold at least one row for each of the 2 ranks"
    ):
        datamodule.val_dataloader()


@pytest.mark.field("data/7")
@pytest.mark.parametrize(("rows", "size"), [(5, 4), (3, 256)])
def test_validation_takes_every_row_once_on_every_pass(
    prompt_rows: MakeRows, rows: int, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        loader = module(prompt_rows(4), val_files=prompt_rows(rows), val_batch_size=size).val_dataloader()
    assert sorted(chain(*rows_of(loader))) == sorted(chain(*rows_of(loader))) == list(range(rows))
    assert f"data.val_files: {rows} rows" in caplog.text


@pytest.mark.field("data/7")
def test_an_empty_validation_set_is_an_error_and_none_at_all_is_not(prompt_rows: MakeRows) -> None:
    with pytest.raises(DataError, match=r"data\.val_files holds no rows"):
        module(prompt_rows(4), val_files=[])
    assert module(prompt_rows(4), val_files=None).val_dataloader() == []


@pytest.mark.field("gen/5")
def test_filtered_prompts_are_dropped_and_counted(
    prompt_rows: MakeRows, caplog: pytest.LogCaptureFixture
) -> None:
    rows = prompt_rows(100)
    rows[37]["prompt"][0]["content"] = "x" * 197
    datamodule = module(
        rows, max_prompt_length=64, filter_overlong_prompts=True, total_epochs=1, train_batch_size=1
    )
    assert datamodule.num_rows() == {"val": 0, "train": 99} and datamodule.total_steps() == 99
    assert sorted(chain(*rows_of(datamodule.train_dataloader()))) == [i for i in range(100) if i != 37]
    assert "1 of 100 rows left out: 1 with a prompt longer than data.max_prompt_length=64" in caplog.text
    assert "first: data.train_files, row 37" in caplog.text


@pytest.mark.field("gen/5")
@pytest.mark.parametrize("truncation", ["left", "right", "middle"])
def test_truncated_prompts_keep_their_header(prompt_rows: MakeRows, truncation: str) -> None:
    rows = prompt_rows(2)
    rows[1]["prompt"][0]["content"] = "x" * 197
    datamodule = module(rows, max_prompt_length=64, truncation=truncation, shuffle=False)
    batch = next(iter(datamodule.train_dataloader()))
    assert batch.prompt_len.tolist() == [5, 64]
    assert datamodule.chat.tokenizer.decode(batch.prompt_ids[1, -1:]) == "<|assistant|>"


@pytest.mark.field("gen/5")
def test_with_error_an_overlong_prompt_fails_before_the_first_step(
    prompt_rows: MakeRows, write_parquet
) -> None:
    rows = prompt_rows(100)
    rows[37]["prompt"][0]["content"] = "x" * 197
    with pytest.raises(
        DataError, match=r"train\.parquet, row 37, column 'prompt': the prompt has 200 tokens"
    ):
        module(write_parquet(rows, row_group_size=10), max_prompt_length=64, truncation="error")


@pytest.mark.field("data/2")
def test_the_filter_measures_what_generation_uses(prompt_rows: MakeRows) -> None:
    template = "{{ filler }}" + TEMPLATE.replace("<|assistant|>", "<|assistant|>123456789")
    rows = prompt_rows(2)
    rows[0]["prompt"][0]["content"], rows[1]["prompt"][0]["content"] = "x" * 15, "x" * 9
    limits = {"max_prompt_length": 41, "filter_overlong_prompts": True, "train_batch_size": 1}
    datamodule = module(
        rows, tokenizer=byte_tokenizer(template), chat_template_kwargs={"filler": "f" * 20}, **limits
    )
    batches = list(datamodule.train_dataloader())
    assert {batch.prompt_row.item() for batch in batches} == {1}
    assert {batch.prompt_len.item() for batch in batches} == {9 + 2 + 10 + 20}


@pytest.mark.slow
def test_the_filter_finds_the_same_rows_with_more_processes(prompt_rows: MakeRows, write_parquet) -> None:
    path = write_parquet(prompt_rows(120), row_group_size=16)
    settings = {"max_prompt_length": 5, "filter_overlong_prompts": True}
    one = module(path, **settings).num_rows()
    assert (
        module(path, filter_overlong_prompts_workers=2, **settings).num_rows()
        == one
        == {"val": 0, "train": 10}
    )


def test_a_filter_that_leaves_nothing_is_an_error(prompt_rows: MakeRows) -> None:
    with pytest.raises(
        DataError, match=r"data\.train_files: none of the 3 rows is left: 3 with a prompt longer"
    ):
        module(prompt_rows(3), max_prompt_length=2, filter_overlong_prompts=True)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_row_without_prompt_is_an_error_that_names_it(
    prompt_rows: MakeRows, write_parquet, workers: int
) -> None:
    rows = prompt_rows(4)
    rows[2]["prompt"] = None
    datamodule = module(write_parquet(rows), shuffle=False, loader=LoaderOptions(num_workers=workers))
    with pytest.raises(
        DataError, match=r"train\.parquet, row 2, column 'prompt' must be text .* \(found None\)"
    ):
        list(datamodule.train_dataloader())


def test_bad_rows_are_skipped_and_counted_on_request(
    prompt_rows: MakeRows, caplog: pytest.LogCaptureFixture
) -> None:
    rows = prompt_rows(6)
    rows[2]["prompt"], rows[4]["prompt"] = None, [{"role": "user"}]
    datamodule = module(rows, on_bad_row="skip", train_batch_size=4, total_epochs=1)
    assert sorted(chain(*rows_of(datamodule.train_dataloader()))) == [0, 1, 3, 5]
    assert "2 of 6 rows left out: 2 with nothing that can be read and rendered" in caplog.text


def test_skipping_bad_rows_does_not_hide_overlong_ones(prompt_rows: MakeRows) -> None:
    with pytest.raises(DataError, match=r"the prompt has 5 tokens"):
        module(prompt_rows(4), on_bad_row="skip", truncation="error", max_prompt_length=4)


def test_a_missing_prompt_column_is_known_before_any_tokenizer_is_loaded(write_parquet) -> None:
    datamodule = PromptDataModule(train_files=write_parquet([{"question": "a"}]), tokenizer="nowhere/at/all")
    with pytest.raises(DataError, match=r"train\.parquet has no column 'prompt'; it has question"):
        datamodule.num_rows()


def test_counts_and_steps_need_no_tokenizer(prompt_rows: MakeRows, write_parquet) -> None:
    train, val = write_parquet(prompt_rows(10)), write_parquet(prompt_rows(5), "val.parquet")
    datamodule = PromptDataModule(
        train_files=train, val_files=val, train_batch_size=4, total_epochs=2, tokenizer="nowhere/at/all"
    )
    assert datamodule.num_rows() == {"val": 5, "train": 10}
    assert datamodule.total_steps(-1) == 5 and datamodule.total_steps(3) == 3


@pytest.mark.parametrize(
    ("rows", "size", "epochs", "steps"),
    [(10, 4, 2, 5), (10, 4, 1, 2), (30, 3, 0.1, 1), (10, 3, 3, 10), (7, 7, 1, 1)],
)
def test_steps_are_whole_batches_of_all_epochs(
    prompt_rows: MakeRows, rows: int, size: int, epochs: float, steps: int
) -> None:
    datamodule = module(prompt_rows(rows), train_batch_size=size, total_epochs=epochs)
    assert datamodule.total_steps() == len(datamodule.train_dataloader()) == steps


def test_too_few_rows_for_a_step_are_refused(prompt_rows: MakeRows) -> None:
    with pytest.raises(
        ConfigError, match=r"data\.train_batch_size must not exceed the 3 rows of .* \(found 4\)"
    ):
        module(prompt_rows(3), train_batch_size=4).total_steps(10)
    with pytest.raises(
        ConfigError, match=r"data\.total_epochs \* rows / data\.train_batch_size must be at least"
    ):
        module(prompt_rows(4), train_batch_size=4, total_epochs=0.5).total_steps()


def test_no_training_files_are_an_error_once_they_are_needed() -> None:
    datamodule = PromptDataModule(train_files=None, val_files=None)
    with pytest.raises(ConfigError, match=r"data\.train_files must be set \(found None\)"):
        datamodule.num_rows()


@pytest.mark.parametrize("name", ["gsm8k_8", "sciknoweval_8"])
def test_rows_of_public_sets_render(name: str) -> None:
    datamodule = module(
        str(HERE / f"{name}.parquet"), train_batch_size=8, total_epochs=1, max_prompt_length=None
    )
    (batch,) = datamodule.train_dataloader()
    assert sorted(batch.prompt_row.tolist()) == list(range(8))
    assert all(model["ground_truth"] for model in batch.columns["reward_model"])
    last = [messages[-1]["content"] for messages in batch.columns["prompt"]]
    assert all(
        text in datamodule.chat.decode(ids) for text, ids in zip(last, batch.prompt_ids.tolist(), strict=True)
    )


def test_a_real_file_of_several_row_groups_is_served_once_per_epoch(shared_folder: Path) -> None:
    files = [str(shared_folder / "data" / "gsm8k" / "train.parquet")]
    assert module(files).num_rows()["train"] == 7473
    datamodule = module(files, train_batch_size=75, train_max_samples=1500, total_epochs=1)
    assert sorted(chain(*rows_of(datamodule.train_dataloader()))) == list(range(1500))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"train_max_samples": 0}, r"train_max_samples must be -1 \(all\) or >= 1 \(found 0\)"),
        ({"val_max_samples": -2}, r"val_max_samples must be -1 \(all\) or >= 1 \(found -2\)"),
        ({"total_epochs": 0}, r"total_epochs must be > 0 \(found 0\)"),
        ({"train_batch_size": 0}, r"train_batch_size must be >= 1 \(found 0\)"),
        ({"val_batch_size": 0}, r"val_batch_size must be >= 1 \(found 0\)"),
        ({"seed": None}, r"seed must be a whole number, .* \(found None\)"),
        ({"on_bad_row": "drop"}, r"on_bad_row must be error or skip \(found 'drop'\)"),
        ({"max_prompt_length": 0}, r"max_prompt_length must be null or >= 1 \(found 0\)"),
        ({"truncation": "top"}, r"truncation must be one of error, left, right, middle \(found 'top'\)"),
        ({"filter_overlong_prompts_workers": 0}, r"filter_overlong_prompts_workers must be >= 1 \(found 0\)"),
        (
            {"filter_overlong_prompts_workers": 2},
            r"filter_overlong_prompts_workers .* without data\.filter_overlong",
        ),
        (
            {"filter_overlong_prompts": True, "max_prompt_length": None},
            r"filter_overlong_prompts has no effect with",
        ),
    ],
)
def test_settings_out_of_range_are_refused_in_the_constructor(settings: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"^data\.{words}"):
        PromptDataModule(**settings)


def test_a_tokenizer_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"data\.tokenizer must .*\./nowhere"):
        PromptDataModule(tokenizer="./nowhere").setup("fit")


def test_every_setting_can_be_given_by_name_only_and_has_a_default() -> None:
    parameters = list(inspect.signature(PromptDataModule).parameters.values())
    assert all(p.kind is p.KEYWORD_ONLY and p.default is not p.empty for p in parameters)
