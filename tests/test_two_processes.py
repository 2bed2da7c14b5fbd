"""Two processes write the same tokens and end with the same weights as one, with the same global batch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[1]
COMMON = (
    "optim.lr=1e-5",  # of what is rounded differently, Adam makes steps of this size
    "trainer.max_steps=5",
    "trainer.val_check_interval=5",
    "data.train_batch_size=8",
    "algo.num_generations=4",
    "algo.batch.micro_batch_size=3",
    "callbacks.log_completions.num_rows=32",
    "checkpoint.save_freq=5",
    "data.val_max_samples=33",
    "logger=csv",
)
CASES = {
    "grpo": ("algo=grpo",),
    "sdpo": ("algo=sdpo",),
    "dapo": ("algo=dapo",),
    "remax": ("algo=remax",),
    "ppo": (
        *("algo=ppo", "algo.num_iterations=2", "algo.critic.critic_warmup=1"),
        *("algo.critic.optim.lr=1e-4", "algo.critic.micro_batch_size=5"),
    ),
}


def run(folder: Path, *overrides: str) -> None:
    command = [sys.executable, "train.py", *COMMON, *overrides, f"run_dir={folder}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def completions(folder: Path) -> dict[tuple[int, int, int], str]:
    lines = (folder / "completions.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return {(r["step"], r["prompt_row"], r["generation"]): r["completion"] for r in rows}


@pytest.mark.slow
@pytest.mark.field("dist/1")
@pytest.mark.field("dist/4")
@pytest.mark.parametrize("algo", CASES)
def test_two_processes_equal_one(algo: str, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    run(one, *CASES[algo])
    run(two, *CASES[algo], "trainer=ddp", "trainer.devices=2")
    a, b = (load_file(folder / "checkpoints/step_00000005/model.safetensors") for folder in (one, two))
    assert a.keys() == b.keys()
    # PPO's ten steps pass through a second network in float32: its rounding reaches the advantages.
    tolerance = 5e-6 if algo == "ppo" else 1e-6
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=tolerance, msg=name)
    ours, theirs = completions(one), completions(two)
    shared = ours.keys() & theirs.keys()
    assert len(shared) >= 80 and all(ours[key] == theirs[key] for key in shared)
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (one, two)]
    assert summaries[0]["val_end"] == pytest.approx(summaries[1]["val_end"])
    assert summaries[0]["tokens_generated"] == summaries[1]["tokens_generated"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one", "two"]
