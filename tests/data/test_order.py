from itertools import chain

import pytest

from lit_rl.data.order import RowOrder, TrainBatches, validation_batches
from lit_rl.data.parquet import Block


def order(
    rows: int, *, shuffle: bool = True, seed: int = 7, group: int = 4, window_bytes: int = 10**9
) -> RowOrder:
    """Rows in blocks of `group`, each of which counts one byte per row."""
    starts = range(0, rows, group)
    blocks = [Block(range(start, min(start + group, rows)), min(group, rows - start)) for start in starts]
    return RowOrder(blocks, shuffle=shuffle, seed=seed, window_bytes=window_bytes)


@pytest.mark.field("data/6")
@pytest.mark.parametrize("ranks", [1, 2])
def test_without_shuffle_steps_take_the_rows_in_order_on_all_ranks_together(ranks: int) -> None:
    parts = [
        list(TrainBatches(order(8, shuffle=False), batch_size=2, steps=4, rank=r, world_size=ranks))
        for r in range(ranks)
    ]
    steps = [sorted(chain.from_iterable(step)) for step in zip(*parts, strict=True)]
    assert steps == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.field("data/6")
def test_shuffled_epochs_differ_repeat_on_rerun_and_hold_every_row_once() -> None:
    batches = list(TrainBatches(order(8), batch_size=2, steps=8))
    first, second = list(chain(*batches[:4])), list(chain(*batches[4:]))
    assert sorted(first) == sorted(second) == list(range(8))
    assert first != second and first != list(range(8))
    assert batches == list(TrainBatches(order(8), batch_size=2, steps=8))
    assert batches != list(TrainBatches(order(8, seed=8), batch_size=2, steps=8))


@pytest.mark.parametrize("window_bytes", [1, 8, 9, 10**9])
@pytest.mark.parametrize("rows", [1, 4, 10, 33])
def test_an_epoch_is_a_permutation_whatever_the_window(rows: int, window_bytes: int) -> None:
    for epoch in range(3):
        assert sorted(order(rows, window_bytes=window_bytes).epoch(epoch)) == list(range(rows))


def test_a_block_shuffle_needs_the_blocks_of_one_window_at_a_time() -> None:
    rows = list(order(40, group=4, window_bytes=8).epoch(0))
    windows = [rows[i : i + 8] for i in range(0, 40, 8)]
    assert all(len({row // 4 for row in window}) == 2 for window in windows)
    assert [row // 4 for row in rows] != sorted(row // 4 for row in rows)


def test_data_of_one_window_is_permuted_across_its_blocks() -> None:
    rows = list(order(4000, group=1000).epoch(0))
    shares = [sum(row // 1000 == block for row in rows[:1000]) for block in range(4)]
    assert all(200 < share < 300 for share in shares)


@pytest.mark.parametrize(("rows", "size"), [(10, 4), (10, 10), (7, 5), (5, 4), (9, 2)])
def test_steps_run_on_across_epochs_without_a_row_lost_or_twice_in_a_step(rows: int, size: int) -> None:
    steps = 10 * rows
    batches = list(TrainBatches(order(rows), batch_size=size, steps=steps))
    assert len(batches) == steps
    assert all(len(set(batch)) == len(batch) == size for batch in batches)
    served = list(chain(*batches))
    assert all(served.count(row) == served.count(0) == 10 * size for row in range(rows))


@pytest.mark.field("data/6")
@pytest.mark.field("data/8")
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_share_each_step_and_together_serve_what_one_process_does(ranks: int) -> None:
    whole = list(TrainBatches(order(10), batch_size=4, steps=12))
    parts = [
        list(TrainBatches(order(10), batch_size=4, steps=12, rank=r, world_size=ranks)) for r in range(ranks)
    ]
    for step, batch in enumerate(whole):
        shares = [part[step] for part in parts]
        assert all(len(share) == 4 // ranks for share in shares)
        assert [shares[i % ranks][i // ranks] for i in range(4)] == batch


@pytest.mark.field("data/7")
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(("rows", "size"), [(5, 4), (3, 256), (7, 3), (12, 4), (5, 1), (9, 2)])
def test_validation_takes_every_row_once_in_equally_many_batches(rows: int, size: int, ranks: int) -> None:
    parts = [validation_batches(range(rows), batch_size=size, rank=r, world_size=ranks) for r in range(ranks)]
    assert sorted(chain.from_iterable(chain.from_iterable(parts))) == list(range(rows))
    assert len({len(part) for part in parts}) == 1
    sizes = [len(batch) for part in parts for batch in part]
    assert min(sizes) >= 1 and max(sizes) <= max(2, -(-size // ranks))
    assert sorted(chain(*parts[0])) == list(range(0, rows, ranks))
