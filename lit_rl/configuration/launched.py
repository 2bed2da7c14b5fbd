"""What the processes of one run must agree on: the command line and the folder.

Lightning starts the further ranks by running the same command again. They would compose another `run_dir` (it
holds the time) and, in a sweep, run the whole sweep. So the first rank leaves its job in the environment.
"""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

_JOB = "LIT_RL_JOB"
_RANK_KEYS = ("LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def handed_over() -> list[str] | None:
    """The arguments of the job that this process was started for; None in the first process."""
    text = os.environ.get(_JOB)
    return None if text is None else json.loads(text)


@contextmanager
def handing_over(arguments: Sequence[str]) -> Iterator[None]:
    """Leave the arguments to the processes that are started inside; afterwards the environment is as before.

    The process group ends with the job, so that the next job of a sweep starts processes of its own.
    """
    before = dict(os.environ)
    if handed_over() is None:
        os.environ[_JOB] = json.dumps(list(arguments))
    try:
        yield
    finally:
        _end_process_group()
        if before.get(_JOB) is None:
            os.environ.pop(_JOB, None)
            for key in _RANK_KEYS:
                os.environ.pop(key, None)
                if key in before:
                    os.environ[key] = before[key]


def _end_process_group() -> None:
    import torch.distributed

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def is_started_from_outside() -> bool:
    """True when torchrun or SLURM starts every rank by itself."""
    return handed_over() is None and (
        "TORCHELASTIC_RUN_ID" in os.environ or int(os.environ.get("SLURM_NTASKS", "1")) > 1
    )


def process_rank() -> int:
    """This process among those of the run, before any process group exists."""
    for key in ("RANK", "SLURM_PROCID", "LOCAL_RANK"):
        if key in os.environ:
            return int(os.environ[key])
    return 0


def rank_in_words() -> str:
    """` (rank 1)` on further ranks, nothing on the first."""
    return f" (rank {process_rank()})" if process_rank() else ""
