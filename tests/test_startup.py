"""What a run waits for before its first update: imports, and little else."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ONLY_SOME_RUNS_NEED = (
    "IPython",
    "bitsandbytes",
    "datasets",
    "mlflow",
    "pandas",
    "peft",
    "scipy",
    "sklearn",
    "swanlab",
    "tensorboard",
    "torchao",
    "vllm",
    "wandb",
)
LIBRARIES = "import torch, lightning, transformers.models.llama.modeling_llama\n"
OURS = """
import train, lit_rl.tasks, lit_rl.configuration.launch, lit_rl.configuration.validate
import lit_rl.algorithms.sdpo, lit_rl.data.prompts, lit_rl.models.load, lit_rl.rewards.by_source
import lit_rl.callbacks.rollout, lit_rl.callbacks.checkpoint_contents, lit_rl.callbacks.log_completions
import lit_rl.callbacks.summary, lit_rl.callbacks.progress, lit_rl.callbacks.diagnostics
import lit_rl.callbacks.curves
"""
HELP = """
import sys, train
from lit_rl.configuration.launch import launch
sys.argv = ["train.py", "--help"]
launch(train.main, train.CONF)
"""
OURS_OF_LIBRARIES = 0.35  # a third of what torch, lightning and transformers take; measured: an eighth


def told(code: str) -> dict:
    """What a fresh process says in its last line, as JSON."""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads(run.stdout.splitlines()[-1])


def test_a_run_imports_little_beside_the_libraries() -> None:
    found = told(
        f"from time import process_time as now\nstart = now()\n{LIBRARIES}middle = now()\n"
        f"{OURS}\nend = now()\n"
        f"import json, sys; surplus = [name for name in {ONLY_SOME_RUNS_NEED} if name in sys.modules]\n"
        'print(json.dumps({"libraries": middle - start, "ours": end - middle, "surplus": surplus}))'
    )
    assert found["surplus"] == []
    assert found["ours"] < OURS_OF_LIBRARIES * found["libraries"], found


@pytest.mark.parametrize("code", ["import lit_rl, train", HELP], ids=["import", "help"])
def test_names_and_help_come_without_torch(code: str) -> None:
    heavy = ("torch", "transformers", "lightning", "numpy")
    found = told(f"{code}\nimport json, sys; print(json.dumps({{n: n in sys.modules for n in {heavy}}}))")
    assert found == dict.fromkeys(heavy, False)


@pytest.mark.slow
def test_the_first_update_comes_within_ten_seconds(tmp_path: Path) -> None:
    """CPU seconds of a whole run of one step on one thread, which on a machine by itself are its seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = ["train.py", "algo=grpo", "trainer.max_steps=1", "trainer.val_check_interval=0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, *command, f"run_dir={tmp_path}"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        check=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 10
