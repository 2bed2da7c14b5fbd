"""Whole runs with the documented server: the teacher on it, and a policy that moves under it."""

import csv
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest
from rollout.test_vllm_server import free_port

from lit_rl.paths import resolve_model_path

ROOT = Path(__file__).resolve().parents[1]
SDPO = ("algo=sdpo", "algo.reprompt.max_reprompt_len=256", "algo.teacher.teacher_model_kind=live")
RUN = (
    *("debug=fast", "trainer.max_steps=2", "trainer.val_check_interval=0", "checkpoint.save_freq=-1"),
    *("logger=[csv]", "optim.lr=1e-3", "rollout=vllm_server"),
    *("rollout.check_every_n_steps=1", "rollout.max_logp_gap=1e-3"),
)


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Where a server of the embedded model listens."""
    port, file = free_port(), tmp_path_factory.mktemp("server") / "server.log"
    model = resolve_model_path("embedded").folder_or_id
    line = [sys.executable, "-m", "lit_rl.rollout.serve", model, "--port", str(port)]
    with file.open("wb") as log:
        server = subprocess.Popen(
            [*line, "--dtype", "float32", "--max-model-len", "512"],
            env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        while True:
            assert server.poll() is None, file.read_text()[-3000:]
            try:
                with urlopen(f"http://127.0.0.1:{port}/health", timeout=2):
                    break
            except OSError:
                time.sleep(0.5)
        yield port
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def metrics(folder: Path, port: int, *overrides: str) -> list[dict[str, str]]:
    """The steps of a run, as its CSV has them."""
    command = [sys.executable, "train.py", *RUN, f"rollout.engine.port={port}", *overrides]
    done = subprocess.run([*command, f"run_dir={folder}"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    with next(folder.rglob("metrics.csv")).open() as file:
        return [row for row in csv.DictReader(file) if row["train/loss"]]


@pytest.mark.vllm
def test_a_run_with_the_teacher_on_the_server_equals_one_with_the_teacher_here(
    port: int, tmp_path: Path
) -> None:
    here = metrics(tmp_path / "here", port, *SDPO)
    there = metrics(tmp_path / "there", port, *SDPO, "algo.teacher.use_teacher_server=true")
    assert len(here) == len(there) == 2
    for a, b in zip(here, there, strict=True):
        for name in ("rollout/reward", "rollout/tokens", "sdpo/reprompted_frac", "rollout/stale_tokens"):
            assert float(a[name]) == float(b[name]), name
        for name in ("train/distillation_loss", "train/grad_norm", "sdpo/divergence"):
            assert float(a[name]) == pytest.approx(float(b[name]), abs=1e-3, rel=1e-3), name
        assert float(b["rollout/logp_gap_max"]) < 1e-3
    assert float(here[0]["sdpo/reprompted_frac"]) > 0 and float(here[0]["train/grad_norm"]) > 0


@pytest.mark.vllm
def test_the_next_rollout_is_written_while_this_one_trains(port: int, tmp_path: Path) -> None:
    rows = metrics(
        tmp_path / "ahead",
        port,
        "algo=grpo",
        "rollout.max_staleness=1",
        "rollout.calculate_log_probs=true",
        "algo.rollout_correction.rollout_is=true",
        "algo.rollout_correction.rollout_is_threshold=2",
    )
    stale = [float(row["rollout/stale_tokens"]) for row in rows]
    assert stale[0] == 0 and stale[1] == float(rows[1]["rollout/tokens"])


@pytest.mark.vllm
def test_top_entries_of_the_server_train(port: int, tmp_path: Path) -> None:
    rows = metrics(
        tmp_path / "topk",
        port,
        *SDPO,
        "algo.teacher.use_teacher_server=true",
        "algo.distillation.distillation_mode=topk_logits",
        "algo.distillation.distillation_topk=30",
        "algo.distillation.distillation_add_tail=true",
        "algo.distillation.distillation_alpha=0.5",
        "trainer.max_steps=1",
    )
    assert float(rows[0]["train/distillation_loss"]) > 0 and float(rows[0]["train/grad_norm"]) > 0
