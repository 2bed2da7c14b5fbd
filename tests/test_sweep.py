"""Several jobs, several processes: each job has its own folder, and nothing is written anywhere else."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lit_rl.configuration.launched import handed_over, handing_over

ROOT = Path(__file__).resolve().parents[1]


def test_a_job_is_handed_over_while_it_runs_and_the_environment_is_as_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setenv("MASTER_PORT", "1234")
    with pytest.raises(KeyError), handing_over(["algo=grpo", "run_dir='a b'"]):
        assert handed_over() == ["algo=grpo", "run_dir='a b'"]
        with handing_over(["seed=2"]):  # a rank that was started keeps what it was given
            assert handed_over() == ["algo=grpo", "run_dir='a b'"]
        os.environ.update(LOCAL_RANK="0", MASTER_PORT="9")
        raise KeyError
    assert handed_over() is None
    assert "LOCAL_RANK" not in os.environ
    assert os.environ["MASTER_PORT"] == "1234"


@pytest.mark.slow
@pytest.mark.field("dist/4")
@pytest.mark.field("sec/3")
def test_every_job_of_a_sweep_has_its_own_folder_also_with_two_processes(tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(ROOT / "train.py"),
        "-m",
        "algo=grpo",
        "debug=fast",
        "trainer=ddp",
        "seed=1,2",
    ]
    secret = "+model.model_init_kwargs.token=hunter2"
    done = subprocess.run(
        [*command, secret, "run_dir=out/sweep", "trainer.enable_progress_bar=false"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    sweep = tmp_path / "out" / "sweep"
    assert sorted(path.name for path in sweep.iterdir()) == ["0", "1", "multirun.yaml"]
    for number, seed in enumerate((1, 2)):
        job = sweep / str(number)
        saved = yaml.safe_load((job / "config.yaml").read_text())
        assert saved["seed"] == seed
        assert saved["run_dir"] == f"out/sweep/{number}"
        assert (job / "summary.json").exists() and (job / "checkpoints/step_00000001").is_dir()
    texts = [done.stdout, done.stderr] + [
        path.read_bytes().decode(errors="replace") for path in tmp_path.rglob("*") if path.is_file()
    ]
    assert "Job 1: algo=grpo debug=fast trainer=ddp seed=2" in done.stdout
    assert not any("hunter2" in text for text in texts)
