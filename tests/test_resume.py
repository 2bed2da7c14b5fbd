"""A run killed with SIGKILL and resumed ends as the uninterrupted one, bit for bit."""

import csv
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[1]
SMALL = (
    "trainer.max_steps=6",
    "trainer.val_check_interval=3",
    "checkpoint.save_freq=2",
    "data.train_batch_size=4",
    "algo.num_generations=4",
    "data.val_max_samples=16",
    "data.train_max_samples=12",
)
CASES = {
    "grpo": ("algo=grpo", "algo.num_iterations=2", "algo.batch.shuffle=true"),
    "sdpo_ema": ("algo=sdpo",),
    "lora": ("algo=grpo", "model.lora.lora_rank=4"),
    "reference_sync": (
        *("algo=grpo", "algo.kl.beta=0.04", "callbacks=[default,reference_sync]"),
        "callbacks.reference_sync.ref_model_sync_steps=1",
    ),
}


def command(folder: Path, *overrides: str) -> list[str]:
    return [sys.executable, "train.py", *SMALL, *overrides, f"run_dir={folder}"]


def finish(folder: Path, *overrides: str) -> str:
    done = subprocess.run(command(folder, *overrides), cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def kill_after_first_save(folder: Path, *overrides: str) -> None:
    process = subprocess.Popen(command(folder, *overrides), cwd=ROOT, stdout=subprocess.DEVNULL)
    manifest = folder / "checkpoints/step_00000002/manifest.json"
    deadline = time.monotonic() + 300
    while not manifest.exists():
        assert process.poll() is None and time.monotonic() < deadline, "the run ended before it saved"
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


def logged(folder: Path) -> list[dict[str, str]]:
    with (folder / "csv/metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    timed = ("time/", "rollout/tokens_per_second")
    return [{k: v for k, v in row.items() if not k.startswith(timed) and v} for row in rows]


@pytest.mark.slow
@pytest.mark.field("ckpt/2")
@pytest.mark.field("log/3")
@pytest.mark.parametrize("name", CASES)
def test_a_killed_run_ends_as_if_nothing_had_happened(name: str, tmp_path: Path) -> None:
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    finish(straight, *CASES[name])
    kill_after_first_save(killed, *CASES[name])
    assert "step_0000000" in finish(killed, *CASES[name]), "says where it went on"
    for file in ("model", "optimizer", "state"):
        path = f"checkpoints/step_00000006/{file}.safetensors"
        ours, theirs = load_file(straight / path), load_file(killed / path)
        assert ours.keys() == theirs.keys()
        assert all(ours[key].equal(theirs[key]) for key in ours), file
    ours, theirs = (
        {row["step"]: row for row in logged(f) if "train/loss" in row} for f in (straight, killed)
    )
    assert ours == theirs and len(ours) == 6
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (straight, killed)]
    for key in ("steps", "optimizer_steps", "val_end", "tokens_generated"):
        assert summaries[0][key] == summaries[1][key]
