"""trainer=fsdp on two processes ends where one process does, and checkpoints go from one to the other."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

HERE = Path(__file__).parent
LAST = "checkpoints/step_00000004"
SAME = {  # a run on two processes, and the one on one process that it must equal
    "grpo": "grpo",
    "sdpo": "sdpo",
    "ppo": "ppo",
    "lora": "lora",
    "small_units": "grpo",
    "named_units": "grpo",
    "two_copies": "grpo",
    "resumed": "grpo",
}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fsdp")
    command = [sys.executable, str(HERE / "fsdp_runs.py"), str(folder)]
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=HERE, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def assert_equal(ours: Path, theirs: Path, tolerance: float) -> None:
    for name in ("model", "optimizer", "state"):
        a, b = (load_file(folder / LAST / f"{name}.safetensors") for folder in (ours, theirs))
        assert a.keys() == b.keys()
        for key in a:
            torch.testing.assert_close(a[key], b[key], rtol=1e-5, atol=tolerance, msg=f"{name} {key}")


@pytest.mark.parametrize("name", SAME)
def test_two_processes_end_where_one_does(runs: Path, name: str) -> None:
    """Weights, moments, and the averaged teacher of SDPO; micro-batches are not as many on both processes."""
    # two networks: the rounding of the one reaches the other, as with trainer=ddp
    assert_equal(runs / "two" / name, runs / "one" / SAME[name], 5e-6 if name in ("ppo", "sdpo") else 1e-6)


def test_a_sharded_run_goes_on_on_one_process(runs: Path) -> None:
    assert_equal(runs / "one" / "resumed", runs / "one" / "grpo", 1e-6)


@pytest.mark.parametrize("name", ["grpo", "sdpo", "lora"])
def test_the_same_completions_are_written(runs: Path, name: str) -> None:
    from forked_runs import completions

    ours, theirs = completions(runs / "two" / name), completions(runs / "one" / name)
    shared = ours.keys() & theirs.keys()
    assert shared and all(ours[key] == theirs[key] for key in shared)


def test_the_hugging_face_folder_of_a_sharded_run_holds_its_weights(runs: Path) -> None:
    folder = runs / "two" / "grpo" / LAST
    model, saved = (
        AutoModelForCausalLM.from_pretrained(folder / "hf"),
        load_file(folder / "model.safetensors"),
    )
    assert type(model).__name__ == "LlamaForCausalLM"
    for name, tensor in model.named_parameters():
        assert torch.equal(tensor, saved[f"policy.{name}"])
