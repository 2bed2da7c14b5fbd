"""A process group of one transfer; the workers are threads of this process, each with a side of its own."""

import json
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lit_rl.rollout.weight_group import Report, received, send

WEIGHTS = {
    "embedding": torch.arange(24, dtype=torch.float32).reshape(4, 6).T,
    "half": torch.randn(7, generator=torch.Generator().manual_seed(0)).bfloat16(),
    "scale": torch.tensor(0.5, dtype=torch.float64),
    "none": torch.zeros(0, 3),
    "mask": torch.tensor([True, False, True]),
    "steps": torch.tensor([2**40]),
}


@pytest.fixture
def server() -> Any:
    """Something that listens, to find the way to."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def asked(workers: int, take: Callable[[str, int], Report]) -> Callable[[str], list[Report]]:
    """What a server does with the call: every worker at once."""

    def ask(meeting: str) -> list[Report]:
        with ThreadPoolExecutor(workers) as pool:
            return list(pool.map(partial(take, meeting), range(workers)))

    return ask


def sent(server, port: int, ask, workers: int = 1, seconds: float = 5.0, **settings) -> list[Report]:
    whole = {"backend": "gloo", "token": "t", "seconds": seconds} | settings
    return send(WEIGHTS, ask, server=server, port=port, workers=workers, **whole)


@pytest.mark.parametrize("bucket", [1, 64, 2**20])
@pytest.mark.parametrize("workers", [1, 3])
def test_every_worker_gets_every_weight_bit_for_bit(server, port: int, workers: int, bucket: int) -> None:
    got: dict[int, dict[str, Tensor]] = {}

    def take(meeting: str, worker: int) -> Report:
        got[worker] = dict(received(meeting, worker))
        return {}

    assert sent(server, port, asked(workers, take), workers, bucket=bucket) == [{}] * workers
    for worker in range(workers):
        assert list(got[worker]) == list(WEIGHTS)
        for name, tensor in WEIGHTS.items():
            assert got[worker][name].dtype == tensor.dtype and torch.equal(got[worker][name], tensor), name


def test_the_default_group_is_neither_made_nor_touched(server, port: int) -> None:
    def take(meeting: str, worker: int) -> Report:
        assert len(dict(received(meeting, worker))) == len(WEIGHTS)
        return {}

    sent(server, port, asked(1, take))
    assert not dist.is_initialized()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        before = dist.group.WORLD
        sent(server, port, asked(2, take), workers=2)
        assert dist.group.WORLD is before and dist.get_world_size() == 1
        dist.barrier()
    finally:
        dist.destroy_process_group()


def test_a_port_in_use_is_named(server, port: int) -> None:
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(ConnectionError, match=f"group_port .found {port}. cannot be opened .*in use"),
    ):
        sent(server, port, asked(1, lambda *_: {}))


def test_a_server_that_never_comes_is_given_up_in_time(server, port: int) -> None:
    def idle(meeting: str) -> list[Report]:
        time.sleep(0.5)  # as an HTTP call that runs into its own time-out
        raise TimeoutError("no answer")

    start = time.monotonic()
    with pytest.raises(TimeoutError, match="no answer"):
        sent(server, port, idle, seconds=0.3)
    assert time.monotonic() - start < 1.0
    ended = sent(server, port, lambda _: time.sleep(0.5) or [{}], seconds=0.3)
    assert ended == [{"lost": "its workers did not come to the meeting"}]


def test_a_call_that_fails_ends_the_wait_at_once(server, port: int) -> None:
    def refuse(meeting: str) -> list[Report]:
        raise OSError("connection reset")

    start = time.monotonic()
    with pytest.raises(OSError, match="connection reset"):
        sent(server, port, refuse, seconds=30.0)
    assert time.monotonic() - start < 1.0


def test_a_worker_that_cannot_reach_the_trainer_says_where(server, port: int) -> None:
    def take(meeting: str, worker: int) -> Report:
        elsewhere = {**json.loads(meeting), "port": 9}
        with pytest.raises(ConnectionError, match=r"group_port at 127.0.0.1, port 9, cannot be reached"):
            dict(received(json.dumps(elsewhere), worker))
        return {"lost": "unreachable"}

    assert sent(server, port, asked(1, take), seconds=30.0) == [{"lost": "unreachable"}]


def test_a_worker_that_goes_away_ends_the_transfer_for_all(server, port: int) -> None:
    big = {f"w{i}": torch.zeros(2**20) for i in range(64)}  # more than the sockets hold
    told: list[str] = []

    def take(meeting: str, worker: int) -> Report:
        arriving = received(meeting, worker)
        next(arriving)
        if worker == 0:
            arriving.close()
            return {}
        with pytest.raises(ConnectionError) as seen:
            dict(arriving)
        told.append(str(seen.value))
        return {"lost": told[0]}

    start = time.monotonic()
    reports = send(
        big,
        asked(2, take),
        server=server,
        port=port,
        workers=2,
        backend="gloo",
        token="t",
        seconds=30.0,
        bucket=2**22,
    )
    assert time.monotonic() - start < 10.0 and told and {"lost": told[0]} in reports


def test_a_worker_that_stands_still_is_given_up_in_time(server, port: int) -> None:
    big = {f"w{i}": torch.zeros(2**20) for i in range(64)}

    def take(meeting: str, worker: int) -> Report:
        arriving = received(meeting, worker)
        next(arriving)
        time.sleep(1.5)
        arriving.close()
        return {}

    start = time.monotonic()
    reports = send(
        big, asked(1, take), server=server, port=port, workers=1, backend="gloo", token="t", seconds=1.0
    )
    assert time.monotonic() - start < 3.0 and "time is up" in reports[0]["lost"]


def test_nobody_leaves_before_everybody_has_everything(server, port: int) -> None:
    """Five workers pass the bytes on to each other; each starts to read its next part when it likes."""
    big = {f"w{i}": torch.full((2**18,), float(i)) for i in range(12)}

    def take(meeting: str, worker: int) -> Report:
        for name, tensor in received(meeting, worker):
            assert torch.equal(tensor, big[name])
            time.sleep(0.005 * worker)
        return {}

    ways = {"server": server, "port": port, "workers": 5, "backend": "gloo", "token": "t", "seconds": 20.0}
    for _ in range(5):
        assert send(big, asked(5, take), **ways, bucket=2**20) == [{}] * 5


def test_a_trainer_that_fails_in_a_transfer_does_not_keep_the_workers_waiting(server, port: int) -> None:
    class Failing(dict[str, Tensor]):
        def __getitem__(self, name: str) -> Tensor:
            if name == "mask":
                raise InterruptedError("killed")
            return super().__getitem__(name)

    def take(meeting: str, worker: int) -> Report:
        with pytest.raises(ConnectionError):
            dict(received(meeting, worker))
        return {"lost": "the trainer"}

    ways = {"server": server, "port": port, "workers": 1, "backend": "gloo", "token": "t", "seconds": 20.0}
    start = time.monotonic()
    with pytest.raises(InterruptedError, match="killed"):
        send(Failing(WEIGHTS), asked(1, take), **ways, bucket=1)
    assert time.monotonic() - start < 5.0


def test_a_slow_worker_is_waited_for(server, port: int) -> None:
    big = {f"w{i}": torch.zeros(2**20) for i in range(8)}

    def take(meeting: str, worker: int) -> Report:
        arriving = received(meeting, worker)
        next(arriving)
        time.sleep(1.3)  # longer than gloo is given at least
        assert len(list(arriving)) == 7
        return {}

    ways = {"server": server, "port": port, "workers": 1, "backend": "gloo", "token": "t", "seconds": 20.0}
    assert send(big, asked(1, take), **ways, bucket=2**22) == [{}]
