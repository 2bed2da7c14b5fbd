"""What vLLM in this process does to the trainer, undone."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist


def reads_in_chunks() -> bool:
    """Whether vLLM may read a prompt in several passes.

    On a CPU it must not: for a seeded request it then sets its generator back by an offset, which generators
    of a CPU do not have, and the engine dies (0.32).
    """
    return torch.cuda.is_available()


@contextmanager
def trainer_left_as_it_was() -> Iterator[None]:
    """Undo what starting vLLM in process does to it.

    It sets environment variables that children inherit and the number of threads, and on a CPU it replaces
    `torch.set_num_threads`.
    """
    temporary = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(torch.get_num_threads())),
    }
    before, threads, set_num_threads = dict(os.environ), torch.get_num_threads(), torch.set_num_threads
    os.environ.update(temporary)
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(threads)
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)


@contextmanager
def process_group_kept() -> Iterator[None]:
    """Keep the trainer's process group while vLLM ends, which takes it for its own and would destroy it."""
    destroy = dist.destroy_process_group

    def destroy_other_than_default(group: Any = None) -> None:
        if group is not None:
            destroy(group)

    dist.destroy_process_group = destroy_other_than_default
    try:
        yield
    finally:
        dist.destroy_process_group = destroy
