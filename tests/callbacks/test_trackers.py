"""wandb, MLflow, SwanLab, TensorBoard and the console: metrics, completions and figures arrive in each."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger
from matplotlib.figure import Figure
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lit_rl.callbacks.console_logger import ConsoleLogger
from lit_rl.callbacks.swanlab_logger import SwanLabLogger
from lit_rl.callbacks.trackers import log_figure, log_rows
from lit_rl.configuration.compose import Source
from lit_rl.configuration.job import checked
from lit_rl.configuration.run_rules import LOGGER_PACKAGES
from lit_rl.errors import ConfigError

SOURCE = Source(Path(__file__).resolve().parents[2] / "conf")
ROWS = [
    {
        "prompt": "1+1=",
        "completion": f"{n}\n|\ud800",
        "reward": float(n == 2),
        "advantage": None,
        "length": 1,
        "finish_reason": "stop",
        "feedback": None,
    }
    for n in (2, 3)
]


@pytest.fixture
def picture(tmp_path: Path) -> tuple[Figure, Path]:
    figure = Figure()
    figure.add_subplot().plot([1, 2])
    figure.savefig(tmp_path / "curves.png")
    return figure, tmp_path / "curves.png"


def show(logger: Any, picture: tuple[Figure, Path]) -> None:
    logger.log_metrics({"rollout/reward": 0.5}, step=0)
    log_rows(logger, "completions", ROWS, 1)
    log_figure(logger, "curves", *picture, step=1)


def test_tensorboard_gets_text_and_a_picture(tmp_path: Path, picture: tuple[Figure, Path]) -> None:
    logger = TensorBoardLogger(tmp_path, name="tb", version="")
    show(logger, picture)
    logger.finalize("success")
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    tags = events.Tags()
    assert "completions/text_summary" in tags["tensors"] and tags["images"] == ["curves"]


def test_wandb_gets_a_table_and_a_picture_offline(
    tmp_path: Path, picture: tuple[Figure, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = WandbLogger(name="run", project="tests", save_dir=tmp_path, offline=True)
    show(logger, picture)
    folder = Path(logger.experiment.dir)
    summary = dict(logger.experiment.summary)
    logger.experiment.finish()
    assert summary["rollout/reward"] == 0.5 and {"completions", "curves"} <= summary.keys()
    table = next(folder.rglob("completions*.table.json"))
    assert json.loads(table.read_text())["data"][0][0] == "1+1="


def test_mlflow_gets_files_in_a_local_store(tmp_path: Path, picture: tuple[Figure, Path]) -> None:
    pytest.importorskip("mlflow")
    logger = MLFlowLogger(
        experiment_name="tests",
        tracking_uri=f"sqlite:///{tmp_path}/mlflow.db",
        artifact_location=str(tmp_path / "artifacts"),
    )
    show(logger, picture)
    run = logger.experiment.get_run(logger.run_id)
    assert run.data.metrics == {"rollout/reward": 0.5}
    names = {path.name for path in (tmp_path / "artifacts").rglob("*") if path.is_file()}
    assert names == {"step_00000001.md", "curves.png"}


def test_swanlab_gets_text_and_a_picture_offline(tmp_path: Path, picture: tuple[Figure, Path]) -> None:
    pytest.importorskip("swanlab")
    logger = SwanLabLogger("tests", "run", str(tmp_path / "swan"), mode="offline")
    show(logger, picture)
    logger.experiment.finish()
    assert [path for path in (tmp_path / "swan").rglob("*") if path.is_file()]


def test_the_console_gets_lines_and_csv_is_left_alone(
    tmp_path: Path, picture: tuple[Figure, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    show(ConsoleLogger(), picture)
    show(CSVLogger(tmp_path), picture)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "step 1:  rollout/reward 0.5"
    assert lines[1].startswith("step 1:  completions  reward 1.0  '2")


@pytest.mark.parametrize("name", LOGGER_PACKAGES)
def test_a_missing_package_names_itself_and_its_extra(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n, *a: None if n == name else found(n, *a))
    with pytest.raises(ConfigError, match=rf"logger={name} needs the package {name}.*lit-rl\[{name}\]"):
        checked(SOURCE, ["algo=grpo", f"logger=[{name}]", f"run_dir={tmp_path}"])


@pytest.mark.parametrize("name", LOGGER_PACKAGES)
def test_a_logger_is_one_word_and_takes_the_run_s_names(name: str, tmp_path: Path) -> None:
    pytest.importorskip(name)
    words = ["algo=grpo", f"logger=[{name}]", "project_name=ours", "experiment_name=first"]
    node = checked(SOURCE, [*words, f"run_dir={tmp_path}"]).tree["logger"][name]
    assert {"ours", "first"} <= {value for value in node.values() if isinstance(value, str)}
