from collections import Counter
from collections.abc import Callable
from itertools import chain, islice

import pytest
import torch
from byte_tokenizer import byte_tokenizer

from lit_rl.data.loader import LoaderOptions
from lit_rl.data.mix import Curriculum, Mix
from lit_rl.data.order import RowOrder, TrainBatches
from lit_rl.data.parquet import Block
from lit_rl.data.prompts import PromptDataModule
from lit_rl.errors import ConfigError, DataError

SIZES = {"a": 30, "b": 12, "c": 5}


def mix(weights: list[float]) -> Mix:
    """Rows 0-29 of source a, 100-111 of b, 200-204 of c."""
    starts = [range(100 * i, 100 * i + size) for i, size in enumerate(SIZES.values())]
    orders = [RowOrder([Block(rows, len(rows))], True, i) for i, rows in enumerate(starts)]
    return Mix(orders[: len(weights)], weights)


def sources(rows: list[int]) -> Counter[str]:
    return Counter("abc"[row // 100] for row in rows)


@pytest.mark.parametrize("weights", [[1, 1, 1], [0.2, 0.7, 0.1], [100, 1, 1], [1, 3], [1]])
def test_every_run_of_rows_holds_each_source_in_its_share_to_two_rows(weights: list[float]) -> None:
    order = mix(weights)
    rows = list(chain.from_iterable(order.epoch(e) for e in range(3)))
    assert sum(order.counts) == len(order) and len(rows) == 3 * len(order)
    for name, count in zip("abc", order.counts, strict=False):
        assert sources(rows)[name] == 3 * count
        for start in range(0, len(rows) - 10, 3):
            got = sources(rows[start : start + 10])[name]
            assert abs(got - 10 * count / len(order)) < 2


def test_a_source_comes_whole_before_any_of_its_rows_comes_again() -> None:
    order = mix([1, 1, 1])
    rows = list(chain.from_iterable(order.epoch(e) for e in range(5)))
    for start, size in ((0, 30), (100, 12), (200, 5)):
        mine = [row for row in rows if start <= row < start + 100]
        for at in range(0, len(mine) - size, size):
            assert sorted(mine[at : at + size]) == list(range(start, start + size))


def test_a_mixed_order_is_a_function_of_seed_and_epoch() -> None:
    order = mix([1, 2, 1])
    in_turn = [list(order.epoch(e)) for e in range(4)]
    assert [list(order.epoch(e)) for e in (3, 1, 0, 2)] == [in_turn[e] for e in (3, 1, 0, 2)]


@pytest.mark.parametrize(
    ("weights", "size"), [([1, 1], 24), ([30, 12, 5], 40), ([1, 1, 1], 15), ([1, 9], 13)]
)
def test_steps_of_a_mix_never_hold_a_row_twice_and_fall_behind_by_less_than_a_step(
    weights: list[float], size: int
) -> None:
    order = mix(weights)
    batches = list(TrainBatches(order, batch_size=size, steps=300))
    assert all(len(set(batch)) == size for batch in batches)
    planned = sources(list(islice(chain.from_iterable(order.epoch(e) for e in range(400)), 300 * size)))
    served = sources(list(chain.from_iterable(batches)))
    assert all(abs(served[name] - planned[name]) < size for name in planned)


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_share_the_steps_of_a_mix_without_loss_or_repeat(ranks: int) -> None:
    whole = list(TrainBatches(mix([1, 2, 1]), batch_size=8, steps=40))
    parts = [
        list(TrainBatches(mix([1, 2, 1]), batch_size=8, steps=40, rank=r, world_size=ranks))
        for r in range(ranks)
    ]
    for step, batch in enumerate(whole):
        assert sorted(chain.from_iterable(part[step] for part in parts)) == sorted(batch)


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_curriculum_goes_up_in_every_epoch(shuffle: bool) -> None:
    values = torch.tensor([3.0, 1, 2, 1, 1, 2, 0, 1])
    order = Curriculum(torch.arange(8) + 10, values, shuffle, 5)
    epochs = [list(order.epoch(e)) for e in range(6)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(10, 18))
        assert [values[row - 10].item() for row in epoch] == sorted(values.tolist())
    assert len(set(map(tuple, epochs))) == (1 if not shuffle else len(epochs))
    if not shuffle:
        assert epochs[0] == [16, 11, 13, 14, 17, 12, 15, 10]


def module(files: object, **settings: object) -> PromptDataModule:
    settings = {"train_batch_size": 4, "val_files": None, "tokenizer": byte_tokenizer(), **settings}
    datamodule = PromptDataModule(train_files=files, **settings)  # type: ignore[arg-type]
    datamodule.setup("fit")
    return datamodule


def two_files(prompt_rows: Callable, write_parquet: Callable) -> list[str]:
    """20 rows of test/even and test/odd, each with its level, in two files of small row groups."""
    rows = [{**row, "level": i * 7 % 5} for i, row in enumerate(prompt_rows(20))]
    return [write_parquet(rows[:13], "one.parquet", 3), write_parquet(rows[13:], "two.parquet", 3)]


def test_weights_and_curriculum_act_on_files_and_resume_at_the_exact_row(
    prompt_rows: Callable, write_parquet: Callable
) -> None:
    files = two_files(prompt_rows, write_parquet)
    settings = {"source_weights": {"test/even": 3, "test/odd": 1}, "curriculum_key": "level"}

    def loader(workers: int = 0):
        options = LoaderOptions(num_workers=workers)
        return module(files, total_epochs=2, loader=options, **settings).train_dataloader()

    whole = [(b.prompt_row.tolist(), b.columns["data_source"], b.columns["level"]) for b in loader()]
    assert len(whole) == 10
    assert all(Counter(names) == {"test/even": 3, "test/odd": 1} for _, names, _ in whole)
    evens = [
        level for _, names, levels in whole for s, level in zip(names, levels, strict=True) if "even" in s
    ]
    assert evens[:10] == evens[10:20] == sorted(evens[:10]) and max(evens) == 4
    for stop in (1, 6):
        first, second = loader(), loader(workers=2)
        running = iter(first)
        for _ in range(stop):
            next(running)
        second.load_state_dict(first.state_dict())
        assert [b.prompt_row.tolist() for b in second] == [rows for rows, *_ in whole[stop:]]
    with pytest.raises(
        ConfigError, match=r"data\.source_weights must be what the checkpoint was written with"
    ):
        module(files, total_epochs=2, curriculum_key="level").train_dataloader().load_state_dict(
            first.state_dict()
        )


def test_a_source_of_weight_zero_is_left_out(prompt_rows: Callable) -> None:
    datamodule = module(prompt_rows(20), source_weights={"test/even": 1, "test/odd": 0}, total_epochs=1)
    assert datamodule.num_rows()["train"] == 10
    batches = list(datamodule.train_dataloader())
    assert len(batches) == 2 and all(set(b.columns["data_source"]) == {"test/even"} for b in batches)


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"source_weights": {"test/even": 1}}, ConfigError, "must name every source .*for test/odd"),
        (
            {"source_weights": {"test/even": 1, "test/odd": 1, "x": 2}},
            ConfigError,
            "names x, which .*never does; there are test/even, test/odd",
        ),
        ({"source_weights": {"a": -1}}, ConfigError, r"source_weights\.a must be >= 0 \(found -1\)"),
        ({"source_weights": {"a": 0}}, ConfigError, "must hold a weight above 0"),
        (
            {"source_weights": {"test/even": 9, "test/odd": 1}, "train_batch_size": 16},
            ConfigError,
            r"source_weights\.test/even asks for 15 of the 16 rows of a step, and the source has 10",
        ),
        (
            {"curriculum_key": "ability"},
            DataError,
            r"row 0, column 'ability' must be a number \(found 'count'\)",
        ),
        ({"curriculum_key": "level"}, DataError, "has no column 'level'; it has data_source, prompt"),
    ],
)
def test_what_cannot_be_mixed_or_ordered_is_refused(
    prompt_rows: Callable, settings: dict, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        module(prompt_rows(20), **settings)
