"""vLLM in two processes of one run: an engine for each, or one over both."""

import subprocess
import sys
from pathlib import Path

import pytest

from .test_vllm_server import free_port

SCRIPT = Path(__file__).with_name("one_of_two_ranks.py")


@pytest.mark.vllm
@pytest.mark.parametrize("tensor_parallel_size", [1, 2])
def test_every_rank_writes_for_its_own_prompts(tensor_parallel_size: int) -> None:
    port = str(free_port())
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(rank), port, str(tensor_parallel_size)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in (0, 1)
    ]
    outputs = [rank.communicate(timeout=600)[0] for rank in ranks]
    for rank, output in zip(ranks, outputs, strict=True):
        assert rank.returncode == 0 and "both agree" in output, output[-3000:]
