"""RunCSVLogger over resumes, and ConsoleLogger."""

import csv

import pytest

from lit_rl.callbacks.checkpoint_contents import CheckpointContents
from lit_rl.callbacks.console_logger import ConsoleLogger
from lit_rl.callbacks.csv_logger import RunCSVLogger


def rows(file) -> list[dict]:
    with file.open(newline="") as lines:
        return list(csv.DictReader(lines))


def steps(file, column: str) -> list[int]:
    return [int(row["step"]) for row in rows(file) if row[column] != ""]


@pytest.mark.field("log/3")
def test_after_a_resume_each_step_is_there_once(train, fake_module, tmp_path):
    file = tmp_path / "csv" / "metrics.csv"
    module = fake_module(lambda step: {"rollout/reward": float(step)})
    train(
        module,
        [CheckpointContents(str(tmp_path / "c"), save_freq=3)],
        steps=5,
        logger=RunCSVLogger(str(tmp_path)),
        val_check_interval=2,
    )
    assert steps(file, "rollout/reward") == [0, 1, 2, 3, 4]
    resumed = fake_module(lambda step: {"rollout/reward": 10.0 * step})
    train(
        resumed,
        [CheckpointContents(str(tmp_path / "d"))],
        6,
        tmp_path / "c" / "step_00000003",
        logger=RunCSVLogger(str(tmp_path)),
        val_check_interval=2,
    )
    assert steps(file, "rollout/reward") == [0, 1, 2, 3, 4, 5]
    assert [float(r["rollout/reward"]) for r in rows(file) if r["rollout/reward"]] == [1, 2, 3, 40, 50, 60]
    assert steps(file, "val/accuracy") == [1, 3, 5]
    assert steps(tmp_path / "csv.1" / "metrics.csv", "rollout/reward") == [0, 1, 2, 3, 4]


@pytest.mark.field("log/3")
def test_a_fresh_run_in_a_used_folder_keeps_the_old_file(train, fake_module, tmp_path):
    for _ in range(2):
        train(fake_module(), [], steps=2, logger=RunCSVLogger(str(tmp_path)))
    assert steps(tmp_path / "csv" / "metrics.csv", "train/loss") == [0, 1]
    assert steps(tmp_path / "csv.1" / "metrics.csv", "train/loss") == [0, 1]


@pytest.mark.field("log/3")
def test_resuming_a_finished_run_leaves_the_file_as_it_is(train, fake_module, tmp_path):
    file, folder = tmp_path / "csv" / "metrics.csv", tmp_path / "c" / "step_00000003"
    train(fake_module(), [CheckpointContents(str(tmp_path / "c"))], logger=RunCSVLogger(str(tmp_path)))
    before = file.read_text()
    train(
        fake_module(),
        [CheckpointContents(str(tmp_path / "c"))],
        3,
        folder,
        logger=RunCSVLogger(str(tmp_path)),
    )
    assert file.read_text() == before and not (tmp_path / "csv.1").exists()


def test_every_step_is_on_disk_at_once(train, fake_module, tmp_path):
    seen = []

    def script(step: int) -> dict[str, float]:
        file = tmp_path / "csv" / "metrics.csv"
        seen.append(len(rows(file)) if file.exists() else 0)
        return {}

    train(fake_module(script), [], steps=3, logger=RunCSVLogger(str(tmp_path)))
    assert seen == [0, 1, 2]


def test_the_console_has_a_line_per_step(train, fake_module, capsys):
    train(fake_module(), [], steps=2, logger=ConsoleLogger())
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step")]
    assert [line.split(":")[0] for line in lines] == ["step 1", "step 2"]
    assert "rollout/reward 0.25" in lines[0]
