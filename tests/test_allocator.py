import subprocess
import sys

import pytest

PAGES = 2**24 * 4 // 4096

ROUNDS = """
import resource
import torch
from lit_rl.allocator import keep_freed_memory

if {keeps}:
    keep_freed_memory()
for _ in range(12):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = torch.ones(2**24)
    del block
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(*, keeps: bool) -> int:
    """Pages that the system had to bring when the same memory was taken and freed, the least of many times.

    glibc may need some rounds until what it holds suffices.
    """
    done = subprocess.run(
        [sys.executable, "-c", ROUNDS.format(keeps=keeps)], capture_output=True, text=True, check=True
    )
    return min(int(line) for line in done.stdout.split())


@pytest.mark.skipif(sys.platform != "linux", reason="what is said of glibc")
def test_memory_that_was_freed_is_taken_again_without_the_system() -> None:
    assert faults(keeps=True) < PAGES // 100
    assert faults(keeps=False) > PAGES // 2
