"""Shared memory of a killed process is removed, that of a live one stays."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from lit_rl.rollout.leftovers import remove_leftovers

HOLDER = """
import mmap, os, sys, time
mapped = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
os.truncate(mapped, 4096)
memory = mmap.mmap(mapped, 4096)
os.close(mapped)
opened = os.open(sys.argv[2], os.O_RDWR | os.O_CREAT)
print("ready", flush=True)
time.sleep(60)
"""


def test_what_a_killed_process_held_is_removed_and_nothing_before(tmp_path: Path) -> None:
    names = ["-tp:0-[0-1]-cpushm_0", "51216-tp:0-[0-1]-cpushm_1"]
    (tmp_path / "psm_of_another").touch()
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, *(str(tmp_path / name) for name in names)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    assert remove_leftovers(tmp_path) == []
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert sorted(remove_leftovers(tmp_path)) == names
    assert [path.name for path in tmp_path.iterdir()] == ["psm_of_another"]
