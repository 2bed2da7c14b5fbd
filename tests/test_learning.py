"""Whole runs on the embedded task learn it: fewer steps than the presets' at a higher rate, one seed each."""

from pathlib import Path

import pytest
from benchmarks.runs import mean_accuracy, run

SHORT = (
    "trainer.max_steps=40",
    "trainer.val_check_interval=40",
    "checkpoint.save_freq=-1",
    "optim.lr=2e-4",
    "schedule.lr_scheduler_type=constant",
)


@pytest.mark.slow
@pytest.mark.parametrize("algo", ["grpo", "ppo", "sdpo"])
def test_accuracy_rises_to_085(algo: str, tmp_path: Path) -> None:
    found = run((f"algo={algo}", *SHORT), seed=1, folder=tmp_path / "run", threads=1)
    assert mean_accuracy(found["val_start"]) < 0.45
    assert mean_accuracy(found["val_end"]) >= 0.85, found
