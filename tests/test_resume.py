"""A run killed with SIGKILL and resumed ends as the uninterrupted one, bit for bit."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "benchmarks" / "kills.py"


def kills(*arguments: str) -> str:
    """What the script prints; it fails when a bit differs."""
    done = subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.field("ckpt/2")
@pytest.mark.field("log/3")
def test_a_killed_run_ends_as_if_nothing_had_happened() -> None:
    """Killed after the end of a data epoch; what each case trains stands in the script."""
    cases = (
        *(
            "sdpo_ema",
            "sdpo_lora",
            "sdpo_trust_region",
            "dapo",
            "lora",
            "reference_sync",
            "sft",
            "environment",
        ),
        *("environment", "async_save", "two_loader_workers", "two_processes"),
    )
    assert kills("--once", "--cases", *cases) == "".join(f"{case}: equal\n" for case in cases)


@pytest.mark.slow
@pytest.mark.field("ckpt/5")
def test_so_does_one_that_is_killed_while_it_saves_or_validates() -> None:
    rows = kills("--kills", "2", "--phases", "save", "validate").splitlines()[2:]
    assert len(rows) == 2 and all(row.endswith("| none |") for row in rows)
