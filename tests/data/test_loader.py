from collections.abc import Iterator, Sequence

import pytest
import torch

from lit_rl.batch import RolloutBatch
from lit_rl.data.loader import LoaderOptions, RunLoader
from lit_rl.errors import ConfigError, DataError

BATCHES = [[3, 1], [4, 0], [2, 5], [1, 3], [0, 2]]


def collate(indices: Sequence[int]) -> RolloutBatch:
    ids = torch.tensor([[i] for i in indices])
    return RolloutBatch(ids, torch.ones(len(ids)), ids[:, 0])


def collate_without_four(indices: Sequence[int]) -> RolloutBatch:
    if 4 in indices:
        raise DataError("train.parquet, row 4, column 'prompt' must be text (found None).")
    return collate(indices)


def loader(workers: int = 0, identity: dict | None = None, work=collate) -> RunLoader:
    return RunLoader(BATCHES, work, options=LoaderOptions(num_workers=workers), identity=identity or {})


def served(batches: RunLoader | Iterator[RolloutBatch]) -> list[list[int]]:
    return [batch.prompt_row.tolist() for batch in batches]


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_come_in_order_on_every_pass(workers: int) -> None:
    batches = loader(workers)
    assert len(batches) == 5
    assert served(batches) == served(batches) == BATCHES


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_loader_goes_on_after_the_batches_that_were_handed_out(workers: int) -> None:
    for stop in range(6):
        first = loader(workers)
        running = iter(first)
        for _ in range(stop):
            next(running)
        second = loader(2 - workers)  # the place does not depend on the workers
        second.load_state_dict(first.state_dict())
        assert second.state_dict() == first.state_dict()
        assert served(second) == BATCHES[stop:]
        assert len(second) == 5
        assert served(second) == BATCHES  # the next pass is a whole one


def test_the_place_after_a_resume_counts_from_the_start_of_the_run() -> None:
    first, second = loader(), loader()
    first.load_state_dict({"batches": 2})
    next(iter(first))
    second.load_state_dict(first.state_dict())
    assert first.state_dict() == {"batches": 3}
    assert served(second) == BATCHES[3:]


def test_a_place_saved_with_another_order_is_refused() -> None:
    state = loader(identity={"data.seed": 1, "data.train_batch_size": 2}).state_dict()
    with pytest.raises(
        ConfigError, match=r"data\.seed must be what the checkpoint was written with, 1 \(found 2\)"
    ):
        loader(identity={"data.seed": 2, "data.train_batch_size": 2}).load_state_dict(state)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_the_data_arrives_with_its_own_message(workers: int) -> None:
    running = iter(loader(workers, work=collate_without_four))
    assert next(running).prompt_row.tolist() == [3, 1]
    with pytest.raises(DataError) as caught:
        next(running)
    assert str(caught.value) == "train.parquet, row 4, column 'prompt' must be text (found None)."


def test_loading_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    served(loader())
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_workers": -1}, "num_workers must be >= 0"),
        ({"num_workers": 1, "prefetch_factor": 0}, "prefetch_factor must be null or >= 1"),
        (
            {"num_workers": 1, "multiprocessing_context": "thread"},
            "multiprocessing_context must be null, fork",
        ),
        ({"persistent_workers": True}, "persistent_workers .* has no effect with data.loader.num_workers=0"),
        ({"prefetch_factor": 2}, "prefetch_factor .* has no effect with data.loader.num_workers=0"),
        ({"multiprocessing_context": "spawn"}, "multiprocessing_context .* has no effect"),
        ({"in_order": False}, "in_order .* has no effect"),
    ],
)
def test_options_out_of_range_or_without_effect_are_refused(options: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"data\.loader\.{words}"):
        LoaderOptions(**options)
