"""A user's mistake: a few lines that say what to do, exit code 2, no traceback, nothing written."""

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from lit_rl.configuration.launch import launch
from lit_rl.configuration.report import MAX_LINES

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def train() -> ModuleType:
    """train.py as a module."""
    spec = importlib.util.spec_from_file_location("train", ROOT / "train.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def call(
    train: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """A function from arguments to (exit code, stdout, stderr), run in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [str(ROOT / "train.py"), *arguments])
        try:
            code = launch(train.main, train.CONF)
        except SystemExit as stop:
            code = int(stop.code or 0)
        out, err = capfd.readouterr()
        return code, out, err

    return run


MISTAKES = [
    (["algo=gropo"], ["algo=gropo", "algo=grpo", "sft"]),
    (["trainer=deepspeed"], ["trainer=deepspeed", "trainer=fsdp"]),
    (["experiment=nothing"], ["experiment=nothing", "random_reward"]),
    (["callbacks=[default,referense_sync]"], ["callbacks=referense_sync", "callbacks=reference_sync"]),
    (["algo.kl.bta=0.1"], ["algo.kl.bta", "0.1", "algo.kl.beta"]),
    (["+algo.kl.bta=0.1"], ["algo.kl.bta", "0.1", "algo.kl.beta"]),
    (["++algo.kl.bta=0.1"], ["algo.kl.bta", "0.1", "algo.kl.beta"]),
    (["beta=0.1"], ["beta", "algo.kl.beta"]),
    (["learning_rate=0.1"], ["learning_rate", "optim.lr"]),
    (["algo.policy.path=x"], ["algo.policy.path", "model.path"]),
    (["algo.distillation.distillation_weight=0.5"], ["distillation_weight", "algo=sdpo"]),
    (["callbacks.reference_sync.ref_model_sync_steps=3"], ["callbacks=[default,reference_sync]"]),
    (["algo.kl.beta.x=1"], ["algo.kl.beta"]),
    (["algo.kl.beta=high"], ["algo.kl.beta", "a number", "'high'"]),
    (["algo.kl.beta=null"], ["algo.kl.beta", "a number", "None"]),
    (["algo.num_generations=2.5"], ["algo.num_generations", "an integer", "2.5"]),
    (["val_before_train=3"], ["val_before_train", "true or false", "3"]),
    (["algo.kl.kl_loss_type=k4"], ["algo.kl.kl_loss_type", "low_var_kl", "'k4'"]),
    (["algo.policy_loss.epsilon=-1"], ["algo.policy_loss.epsilon", ">= 0", "-1.0"]),
    (["optim=adamw", "optim.lr=fast"], ["optim.lr", "a number"]),
    (["model=hf"], ["model.path", "must be given"]),
    (["data.train_batch_size=0"], ["data.train_batch_size", "0"]),
    (["data.train_files=nowhere.parquet"], ["data.train_files", "nowhere.parquet"]),
    (["run_dir=${oc.env:NO_SUCH_VARIABLE}"], ["NO_SUCH_VARIABLE"]),
    (["algo.sampling.stop=[a"], ["algo.sampling.stop=[a"]),
    (["experiment=null"], ["leave it out"]),
    (["-m", "seed=1,2", "algo.kl.bta=0.1"], ["algo.kl.bta", "algo.kl.beta"]),
    (["-m", "optim.lr=1e-5,fast"], ["optim.lr", "a number", "'fast'"]),
    (["checkpoint.save_freq=0"], ["checkpoint.save_freq", "0"]),
]


@pytest.mark.field("cfg/2")
@pytest.mark.field("cfg/7")
@pytest.mark.parametrize(("arguments", "parts"), MISTAKES, ids=lambda value: " ".join(value))
def test_a_mistake_is_told_in_a_few_lines(
    call, tmp_path: Path, arguments: list[str], parts: list[str]
) -> None:
    grpo = [] if "algo=gropo" in arguments else ["algo=grpo"]
    code, _, err = call(*arguments, *grpo)
    assert code == 2
    assert "Traceback" not in err
    assert len(err.strip().splitlines()) <= MAX_LINES
    for part in parts:
        assert part in err
    assert list(tmp_path.iterdir()) == []


def test_full_trace_shows_where_it_was_raised(call) -> None:
    code, _, err = call("algo=grpo", "algo.kl.beta=high", "full_trace=true")
    assert code == 2
    assert "Traceback" in err and "algo.kl.beta" in err


def test_many_mistakes_are_cut_to_the_limit(call) -> None:
    names = (
        "epsilon",
        "epsilon_high",
        "dual_clip",
        "entropy_coeff",
        "loss_type",
        "importance_sampling_level",
    )
    wrong = [f"algo.policy_loss.{name}=[wrong]" for name in names]
    names = (
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "max_completion_length",
        "repetition_penalty",
        "ignore_eos",
    )
    wrong += [f"algo.sampling.{name}=wrong" for name in names]
    _, _, err = call("algo=grpo", *wrong)
    assert len(err.strip().splitlines()) == MAX_LINES
    assert "more lines" in err


def test_the_plan_says_what_a_batch_is_and_writes_nothing(call, tmp_path: Path) -> None:
    sizes = ["data.train_batch_size=2", "algo.num_generations=4", "algo.batch.micro_batch_size=3"]
    length = [
        "data.train_max_samples=10",
        "trainer.max_steps=-1",
        "data.total_epochs=1",
        "algo.num_iterations=2",
    ]
    code, out, _ = call("algo=grpo", *sizes, *length, "plan=true")
    assert code == 0
    assert "2 prompts per step * 4 completions each = 8 completions per step" in out
    assert "2 pass(es) over them * 1 update(s) of 8 rows = 2 optimizer step(s) per step" in out
    assert "3 micro-batch(es) of at most 3 rows" in out
    assert "5 steps (data.total_epochs 1.0), 5 steps per data epoch (10 rows / 2)" in out
    assert "data.train_batch_size = 2  (yours; default 8)" in out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.field("cfg/1")
def test_a_batch_that_cannot_be_cut_is_told_with_numbers_and_neighbours(call) -> None:
    code, _, err = call(
        "algo=grpo", "data.train_batch_size=2", "algo.num_generations=4", "algo.batch.optimizer_batch_size=3"
    )
    assert code == 2
    assert "8 rows" in err and "found 3" in err and "Nearest: 2 or 4" in err


def test_help_reads_as_a_page(call) -> None:
    _, out, _ = call("--help")
    for part in (
        "Usage: python train.py",
        "algo         sdpo, cispo, dapo, dr_grpo, gpg, grpo,",
        "optim.lr",
        "debug=fast",
        "conf/README.md",
    ):
        assert part in out
    assert len(out.splitlines()) < 60


@pytest.mark.field("sec/3")
def test_secrets_are_not_in_the_saved_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lit_rl.configuration.job import saved_text

    monkeypatch.setenv("TRACKER", "hunter3")
    raw = {"logger": {"x": {"api_key": "hunter2", "name": "${oc.env:TRACKER}", "stop_token_ids": [1]}}}
    tree = {"logger": {"x": {"api_key": "hunter2", "name": "hunter3", "stop_token_ids": [1]}}}
    text = saved_text(raw, tree)
    assert "hunter" not in text
    saved = yaml.safe_load(text)["logger"]["x"]
    assert saved == {"api_key": "***", "name": "${oc.env:TRACKER}", "stop_token_ids": [1]}


@pytest.mark.slow
@pytest.mark.parametrize("argument", ["algo.kl.bta=0.1", "algo.kl.beta=high"])
def test_the_command_itself_ends_within_ten_seconds(tmp_path: Path, argument: str) -> None:
    start = time.monotonic()
    run = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), "algo=grpo", argument],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 2
    assert "Traceback" not in run.stderr and "algo.kl.beta" in run.stderr
    assert time.monotonic() - start < 10
    assert list(tmp_path.iterdir()) == []
