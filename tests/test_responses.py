"""`task=generate|validate|test` write responses that `lit_rl.evaluate` scores to the same numbers."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pyarrow.parquet as pq
import pytest

from lit_rl import GRPO, PromptDataModule, RewardSum, Sampling, load_policy, tasks
from lit_rl.callbacks.rollout import RolloutGeneration, ValSampling
from lit_rl.evaluate import main
from lit_rl.rewards.by_source import BySource
from lit_rl.rewards.length import Length

ROOT = Path(__file__).resolve().parents[1]
SAMPLED = ("rollout.val_kwargs.n=4", "rollout.val_kwargs.temperature=1.0", "data.val_max_samples=33")


def answered(folder: Path, reward: Any, *, is_scored: bool, **val: Any) -> dict[str, float]:
    """Answer ten embedded rows in this process."""
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[RolloutGeneration(val_kwargs=ValSampling(**val))],
    )
    module = GRPO(policy=load_policy("embedded"), reward=reward, sampling=Sampling(max_completion_length=4))
    data = PromptDataModule(val_max_samples=10, val_batch_size=4)
    return tasks.answer(trainer, module, data, is_scored=is_scored)


def never(completions: list[str], **columns: Any) -> list[float]:
    raise AssertionError("nobody asked for a score")


def test_generate_writes_every_row_once_and_calls_no_reward(tmp_path: Path) -> None:
    assert answered(tmp_path, [never], is_scored=False, n=2, temperature=1.0) == {}
    rows = pq.read_table(tmp_path / "responses.parquet").to_pylist()
    assert len(rows) == 10 and all(len(row["responses"]) == 2 for row in rows)
    assert {"prompt", "data_source", "reward_model"} <= set(rows[0]) and "rewards" not in rows[0]


@pytest.mark.field("rew/7")
def test_validation_has_the_verifier_s_number_whatever_training_pays_for(tmp_path: Path) -> None:
    paid = RewardSum({"length": Length(4, 4), "by_source": BySource()}, [1.0, 0.0])
    metrics = answered(tmp_path, paid, is_scored=True)
    checked = answered(tmp_path, RewardSum({"by_source": BySource()}), is_scored=True)
    assert metrics["val/accuracy"] == checked["val/accuracy"] == metrics["val/reward/by_source"]
    assert metrics["val/reward"] == metrics["val/reward/length"] != metrics["val/accuracy"]


def printed(text: str) -> dict[str, str]:
    return dict(re.findall(r"^(val/\S+) +(\S+)$", text, re.MULTILINE))


@pytest.mark.slow
@pytest.mark.parametrize("task", ["test", "generate"])
def test_two_processes_write_the_same_file_and_evaluate_finds_the_same_numbers(
    tmp_path: Path, task: str
) -> None:
    numbers, files = [], []
    for name, more in {"one": (), "two": ("trainer=ddp", "trainer.devices=2")}.items():
        command = [sys.executable, "train.py", "algo=grpo", f"task={task}", f"run_dir={tmp_path / name}"]
        done = subprocess.run(
            [*command, "logger=none", *SAMPLED, *more], cwd=ROOT, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        numbers.append(printed(done.stdout))
        files.append(tmp_path / name / "responses.parquet")
    one, two = (pq.read_table(file).to_pylist() for file in files)
    assert one == two and len(one) == 33
    assert numbers[0] == numbers[1] and bool(numbers[0]) == (task == "test")
    found = main([f"data.path={files[0]}"], ROOT / "conf")["scores"]
    assert json.loads((tmp_path / "one" / "responses.scores.json").read_text())["scores"] == found
    everything = found.get("all") or next(iter(found.values()))
    for ours, theirs in [
        ("mean", "val/reward"),
        ("pass@1", "val/accuracy"),
        ("pass@4", "val/pass_at_4"),
        ("maj@4", "val/maj_at_4"),
        ("by_source/no_answer", "val/by_source/no_answer"),
    ]:
        if task == "test":
            assert f"{everything[ours]['mean']:.4f}" == numbers[0][theirs]
