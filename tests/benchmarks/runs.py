"""Runs of train.py in processes of their own, and what they reached; for the other scripts here."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]


class RunFailed(RuntimeError):
    """A run ended with an error; its text is the end of what it wrote to stderr."""


def run(overrides: tuple[str, ...], seed: int, folder: Path, threads: int | None = None) -> dict:
    """The summary of one run; one that is finished is not repeated, an unfinished one starts anew.

    Args:
        overrides: of train.py.
        seed: of the run.
        folder: where it writes.
        threads: of the process; None leaves it to torch.

    Raises:
        RunFailed: it ended with an error.
    """
    summary = folder / "summary.json"
    if not _is_finished(folder):
        shutil.rmtree(folder, ignore_errors=True)
        command = [sys.executable, "train.py", *overrides, f"seed={seed}", f"run_dir={folder}"]
        environment = {**os.environ, **({"OMP_NUM_THREADS": str(threads)} if threads else {})}
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL,
                              stderr=subprocess.PIPE, text=True)  # fmt: skip
        if done.returncode:
            raise RunFailed(done.stderr[-2000:])
    return json.loads(summary.read_text())


def _is_finished(folder: Path) -> bool:
    """Whether a run has done all its steps; one that was told to stop has a summary too."""
    summary, config = folder / "summary.json", folder / "config.yaml"
    if not summary.exists() or not config.exists():
        return False
    return (
        json.loads(summary.read_text())["steps"] >= yaml.safe_load(config.read_text())["trainer"]["max_steps"]
    )


def mean_accuracy(by_source: dict[str, float]) -> float:
    """Mean over the sources, which have equally many rows."""
    return sum(by_source.values()) / len(by_source)
