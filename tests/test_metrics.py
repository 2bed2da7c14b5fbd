"""Metrics of a step are those of its rows, wherever these lie."""

import os
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from lit_rl.metrics import MetricSums

REWARDS = ([1.0, 1.0, 1.0], [0.0])
LENGTHS = ([5, 9, 2], [11])


def sums(rewards: list[float], lengths: list[int]) -> MetricSums:
    found = MetricSums()
    found.add("reward", sum(rewards), len(rewards))
    found.add_max("longest", max(lengths))
    found.add_min("shortest", min(lengths))
    return found


def one_of_two(rank: int, port: int, folder: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    found = sums(REWARDS[rank], LENGTHS[rank])
    if rank == 1:
        found.add("only_here", 4.0, 2)
    torch.save(found.reduce(), Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.field("dist/2")
def test_ranks_of_unequal_rows_are_weighed_by_their_rows(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(one_of_two, (port, str(tmp_path)), nprocs=2)  # type: ignore[no-untyped-call]
    wanted = {"reward": 0.75, "longest": 11.0, "shortest": 2.0, "only_here": 2.0}
    assert torch.load(tmp_path / "0.pt") == torch.load(tmp_path / "1.pt") == wanted


def test_the_pieces_of_a_step_add_up() -> None:
    whole = sums(REWARDS[0] + REWARDS[1], LENGTHS[0] + LENGTHS[1]).reduce()
    pieces = sums(REWARDS[0], LENGTHS[0])
    pieces.add("reward", 0.0, 1)
    pieces.add_max("longest", 11)
    pieces.add_min("shortest", 11)
    assert pieces.reduce() == whole
