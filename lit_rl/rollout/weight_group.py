"""Weights to the workers of a server on another host, over a process group that lives for one transfer.

The trainer is rank 0 and the workers follow. Neither side's default process group is touched. A group is made
anew for each transfer, so nothing is left of a server that was restarted or of a transfer that broke off; and
each server has its own, so that one which dies keeps no other waiting.
"""

import json
import os
import re
import socket
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import BroadcastOptions, ProcessGroupGloo
from torch.distributed import PrefixStore, Store, TCPStore

_ALIGNED = 16  # bytes; a multiple of every dtype's size
_REACHABLE = 10.0  # seconds a worker tries to reach the trainer

Report = dict[str, Any]
"""What a worker says of an update: nothing, `lost` when the other side went away, `error` otherwise."""
Asked = Future[list[Report]]
"""The call that asks the workers to come, and ends with their reports."""


@dataclass(frozen=True)
class Meeting:
    """Where the two sides of a transfer meet; the call that asks the workers to come brings it as JSON.

    Args:
        address: of the trainer, as the server sees it.
        port: of the trainer, for the meeting alone; the weights take ports that the system chooses.
        workers: of the server, all of one engine.
        backend: "gloo" or "nccl".
        token: keeps two transfers over one port apart.
        seconds: until either side gives up.
        bucket: bytes sent at once; a larger tensor goes alone.
    """

    address: str
    port: int
    workers: int
    backend: str
    token: str
    seconds: float
    bucket: int

    def store(self, listener: socket.socket | None = None) -> Store:
        """The meeting place: of the trainer, which listens, or of a worker."""
        whole = TCPStore(
            self.address,
            self.port,
            is_master=listener is not None,
            timeout=timedelta(seconds=self.seconds),
            wait_for_workers=False,
            master_listen_fd=None if listener is None else listener.detach(),
        )
        return PrefixStore(self.token, whole)


class _Group:
    """One member's side of the group.

    Args:
        store: the meeting place.
        meeting: see `Meeting`.
        rank: 0 is the trainer.
        own_address: of this member, as the others see it.
        deadline: on the monotonic clock.
    """

    def __init__(self, store: Store, meeting: Meeting, rank: int, own_address: str, deadline: float) -> None:
        self._deadline = deadline
        with _peer_lost():
            if meeting.backend == "nccl":
                self.device = torch.device("cuda", torch.cuda.current_device())
                self._group: Any = _nccl(store, rank, meeting.workers + 1)
            else:
                self.device = torch.device("cpu")
                self._group = _gloo(store, rank, meeting.workers + 1, own_address, deadline)

    def broadcast(self, flat: Tensor, is_over: Callable[[], bool] = lambda: False) -> None:
        """Bytes from the trainer to all, in place.

        Args:
            flat: (N,) uint8.
            is_over: whether the other side has given up.

        Raises:
            ConnectionError: it has, or is gone, or the time is up.
        """
        options = BroadcastOptions()
        options.rootRank = 0
        with _peer_lost():
            work = self._group.broadcast([flat], options)
            while not work.is_completed():
                if is_over() or time.monotonic() > self._deadline:
                    self._group.abort()
                    raise ConnectionError("the other side gave up, or the time is up")
                time.sleep(0.0005)
            work.wait()

    def leave(self) -> None:
        """Close the connections, whoever still holds this object: an error on its way does."""
        self._group = None


@contextmanager
def _peer_lost() -> Iterator[None]:
    """PyTorch raises RuntimeError when the other side of a group goes away."""
    try:
        yield
    except RuntimeError as error:
        raise ConnectionError(re.sub(r"^\[\S+\] |\. This is .*", "", str(error).split("\n")[0])) from None


def _gloo(store: Store, rank: int, size: int, own_address: str, deadline: float) -> ProcessGroupGloo:
    """A group over the network that `own_address` belongs to; gloo itself takes that of the host name."""
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=max(1.0, deadline - time.monotonic()))
    options._devices = [ProcessGroupGloo.create_device(hostname=own_address)]
    return ProcessGroupGloo(store, rank, size, options)


def _nccl(store: Store, rank: int, size: int) -> Any:
    """An NCCL group with which a lost peer or a time-out does not end this process.

    PyTorch's watchdog would end the process on either; `_Group.broadcast` looks after both.
    """
    from torch._C._distributed_c10d import ProcessGroupNCCL

    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        return ProcessGroupNCCL(store, rank, size, ProcessGroupNCCL.Options())
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


# ----------------------------------------------------------------------------------------- the trainer's side


def send(
    tensors: Mapping[str, Tensor],
    ask: Callable[[str], list[Report]],
    *,
    server: tuple[str, int],
    port: int,
    workers: int,
    backend: str,
    token: str,
    seconds: float,
    bucket: int = 64 * 2**20,
) -> list[Report]:
    """Send weights to the workers of one server.

    Args:
        tensors: by name.
        ask: asks the server's workers to come to a meeting; returns what they report at the end.
        server: host and port of the server.
        port: to listen on.
        workers: of the server.
        backend: "gloo" or "nccl".
        token: see `Meeting`.
        seconds: until the transfer is given up.
        bucket: see `Meeting`.

    Returns:
        What each worker reports.

    Raises:
        ConnectionError: the port cannot be opened, or the server cannot be reached.
        Exception: what `ask` raises.
    """
    deadline = time.monotonic() + seconds
    address = own_address(server, seconds)
    meeting = Meeting(address, port, workers, backend, token, seconds, bucket)
    with ThreadPoolExecutor(1) as caller:
        call = partial(caller.submit, ask, json.dumps(asdict(meeting)))
        asked, why = _transfer(tensors, meeting, call, deadline)
        reports = asked.result()
    return [{"lost": why}] if why and not any(reports) else reports


def _transfer(
    tensors: Mapping[str, Tensor], meeting: Meeting, call: Callable[[], Asked], deadline: float
) -> tuple[Asked, str]:
    """The call to the workers, and why the transfer broke off here; meeting place and group end with it."""
    store, group = _meeting_place(meeting), None
    store.set("tensors", json.dumps(_listed(tensors)))
    asked = call()
    try:
        if _have_joined(store, meeting, asked, deadline):
            group = _Group(store, meeting, 0, meeting.address, deadline)
            _send_all(tensors, meeting, group, asked.done)
            wait([asked], max(0.0, deadline - time.monotonic()))  # what is on its way is lost with the group
    except ConnectionError as error:
        return asked, str(error)
    finally:
        if group is not None:
            group.leave()
        del store
    return asked, ""


def own_address(peer: tuple[str, int], seconds: float) -> str:
    """The address under which a peer sees this host: that of a connection to it.

    Raises:
        ConnectionError: there is none.
    """
    try:
        with socket.create_connection(peer, min(seconds, _REACHABLE)) as connection:
            return str(connection.getsockname()[0])
    except OSError as error:
        raise ConnectionError(f"{peer[0]}, port {peer[1]}, cannot be reached ({error})") from None


def _meeting_place(meeting: Meeting) -> Store:
    """The store, on the one address that the server sees."""
    family = socket.AF_INET6 if ":" in meeting.address else socket.AF_INET
    try:
        listener = socket.create_server((meeting.address, meeting.port), family=family)
    except OSError as error:
        raise ConnectionError(
            f"rollout.engine.group_port (found {meeting.port}) cannot be opened at {meeting.address} "
            f"({os.strerror(error.errno or 0)}); choose a port that no other program on this host uses"
        ) from None
    return meeting.store(listener)


def _have_joined(store: Store, meeting: Meeting, asked: Asked, deadline: float) -> bool:
    """Wait for the workers; False when the call that asked them ends first."""
    keys = [f"joined/{rank}" for rank in range(1, meeting.workers + 1)]
    while not asked.done():
        if store.check(keys):
            return True
        if time.monotonic() > deadline:
            raise ConnectionError("its workers did not come to the meeting")
        time.sleep(0.005)
    return False


def _send_all(
    tensors: Mapping[str, Tensor], meeting: Meeting, group: _Group, is_over: Callable[[], bool]
) -> None:
    for bucket in _buckets(_listed(tensors), meeting.bucket):
        flat = torch.zeros(bucket[-1].end, dtype=torch.uint8, device=group.device)
        for part in bucket:
            source = tensors[part.name].contiguous().reshape(-1).view(torch.uint8)
            flat[part.start : part.start + part.size].copy_(source)
        group.broadcast(flat, is_over)


# -------------------------------------------------------------------------------------------- a worker's side


def received(text: str, worker: int) -> Generator[tuple[str, Tensor]]:
    """The weights, in the trainer's order, as they come in.

    Args:
        text: the `Meeting` as JSON.
        worker: number of this worker in its engine.

    Raises:
        ConnectionError: the trainer cannot be reached, went away, or the time is up.
    """
    meeting = Meeting(**json.loads(text))
    deadline = time.monotonic() + meeting.seconds
    try:
        own = own_address((meeting.address, meeting.port), meeting.seconds)
    except ConnectionError as error:
        raise ConnectionError(f"the trainer's rollout.engine.group_port at {error}") from None
    with _peer_lost():
        store = meeting.store()
        listed = json.loads(store.get("tensors"))
        store.set(f"joined/{worker + 1}", "")
    try:
        group = _Group(store, meeting, worker + 1, own, deadline)
        for bucket in _buckets(listed, meeting.bucket):
            flat = torch.empty(bucket[-1].end, dtype=torch.uint8, device=group.device)
            group.broadcast(flat)
            for part in bucket:
                one = flat[part.start : part.start + part.size].view(getattr(torch, part.dtype))
                yield part.name, one.view(part.shape)
        _wait_for_the_others(store, meeting, worker, deadline)
    except GeneratorExit:
        store.set("broken off", "")
        raise


def _wait_for_the_others(store: Store, meeting: Meeting, worker: int, deadline: float) -> None:
    """A worker that leaves takes what it has passed on and the next has not yet read with it."""
    with _peer_lost():
        store.set(f"received/{worker + 1}", "")
        while not store.check([f"received/{rank}" for rank in range(1, meeting.workers + 1)]):
            if store.check(["broken off"]) or time.monotonic() > deadline:
                raise ConnectionError("another worker of the server has broken the transfer off")
            time.sleep(0.002)


# ------------------------------------------------------------------------------------- how bytes are laid out


@dataclass(frozen=True)
class _Part:
    """A tensor's place in a bucket, in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def size(self) -> int:
        return prod(self.shape) * getattr(torch, self.dtype).itemsize

    @property
    def end(self) -> int:
        return self.start + -(-self.size // _ALIGNED) * _ALIGNED


def _listed(tensors: Mapping[str, Tensor]) -> list[list[Any]]:
    """(name, dtype, shape) of each, as JSON has them."""
    return [[name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in tensors.items()]


def _buckets(listed: list[list[Any]], limit: int) -> Iterator[list[_Part]]:
    """The tensors in order, as many at a time as fit into a bucket."""
    bucket: list[_Part] = []
    for name, dtype, shape in listed:
        part = _Part(name, dtype, tuple(shape), bucket[-1].end if bucket else 0)
        if bucket and part.end > limit:
            yield bucket
            bucket, part = [], _Part(name, dtype, tuple(shape), 0)
        bucket.append(part)
    if bucket:
        yield bucket
