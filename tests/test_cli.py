"""lit-rl: the same classes, files, checks and weights as train.py."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from lightning.pytorch.cli import LightningCLI

from lit_rl import cli
from lit_rl.algorithms.base import RLModule
from lit_rl.configuration.class_paths import from_class_paths, our_key, to_class_paths
from lit_rl.configuration.compose import Source
from lit_rl.configuration.job import checked
from lit_rl.data.base import RowDataModule
from lit_rl.errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]
SOURCE = Source(ROOT / "conf")
SMALL = ["debug=fast", "logger=[csv]", "callbacks.curves=null", "trainer.enable_progress_bar=false"]
CHATS = Path(__file__).parent / "conf" / "chats_8.parquet"
ALGORITHMS = sorted(path.stem for path in (ROOT / "conf" / "algo").glob("*.yaml"))


def needs(algo: str) -> list[str]:
    return ["data=chat_sft", f"data.train_files={CHATS}"] if algo == "sft" else []


@pytest.fixture
def train() -> Any:
    """train.py as a module."""
    spec = importlib.util.spec_from_file_location("train", ROOT / "train.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_keys_of_the_lightning_cli_lead_to_ours() -> None:
    assert our_key("model.init_args.num_generations") == "algo.num_generations"
    assert our_key("model.policy.init_args.lora.lora_rank") == "model.lora.lora_rank"
    assert our_key("model.reward") == "reward"
    assert our_key("trainer.callbacks.progress") == "callbacks.progress"
    assert our_key("seed_everything") == "seed"
    assert our_key("data.train_batch_size") == "data.train_batch_size"


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_every_algorithm_is_built_by_lightning_cli(algo: str, tmp_path: Path) -> None:
    job = checked(SOURCE, [f"algo={algo}", *needs(algo), f"run_dir={tmp_path}"])
    built = cli.lightning_cli(to_class_paths(job.tree))
    assert type(built.model).__name__ == job.tree["algo"]["_target_"].rpartition(".")[2]
    assert built.model.batch.micro_batch_size == job.tree["algo"]["batch"]["micro_batch_size"]
    assert built.datamodule.train_batch_size == job.tree["data"]["train_batch_size"]


@pytest.mark.slow
@pytest.mark.parametrize("algo", ALGORITHMS)
def test_train_py_and_lit_rl_give_equal_weights(algo: str, tmp_path: Path, train: Any) -> None:
    words = [f"algo={algo}", *needs(algo), *SMALL]
    train.run(checked(SOURCE, [*words, f"run_dir={tmp_path / 'hydra'}"]))
    assert cli.main(["fit", *words, f"run_dir={tmp_path / 'cli'}"]) == 0
    weights = [next((tmp_path / name).rglob("model.safetensors")) for name in ("hydra", "cli")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


MISTAKES = [
    (["--model.num_generatons", "4"], "algo.num_generatons=4"),
    (["--model.num_generations", "many"], "algo.num_generations=many"),
    (["--model.kl.beta", "-1"], "algo.kl.beta=-1"),
    (["--data.train_batchsize", "3"], "data.train_batchsize=3"),
    (["--trainer.gradient_clip_val", "1.0"], "trainer.gradient_clip_val=1.0"),
    (["--model.policy.dtype", "float31"], "model.dtype=float31"),
]


@pytest.mark.field("cfg/2")
@pytest.mark.parametrize(("theirs", "ours"), MISTAKES)
def test_a_mistake_gets_the_message_of_train_py(
    theirs: list[str], ours: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        checked(SOURCE, ["algo=grpo", f"run_dir={tmp_path}", ours])
        message = "nothing before the model is loaded"
    except ConfigError as error:
        message = str(error).splitlines()[0]
    assert cli.main(["fit", "--model", "GRPO", f"run_dir={tmp_path}", *theirs]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_printed_configuration_reads_as_itself(tmp_path: Path) -> None:
    words = ["--config", "algo/dapo.yaml", "--model.kl.beta", "0.1", "--seed_everything", "7"]
    words += [
        "callbacks=[default,reference_sync]",
        "optim=sgd",
        "+callbacks.mine._target_=lightning.Callback",
    ]
    job = checked(SOURCE, [*cli.to_overrides(words), f"run_dir={tmp_path}"])
    file = tmp_path / "printed.yaml"
    file.write_text(cli.printed(job))
    again = checked(SOURCE, cli.to_overrides(["--config", str(file)]))
    assert again.tree == job.tree


def test_a_plain_lightning_cli_reads_what_is_printed(tmp_path: Path) -> None:
    job = checked(SOURCE, ["algo=grpo", f"run_dir={tmp_path}"])
    (tmp_path / "printed.yaml").write_text(cli.printed(job))
    plain = LightningCLI(
        RLModule,
        RowDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        run=False,
        args=[f"--config={tmp_path / 'printed.yaml'}"],
    )
    assert plain.model.num_generations == 8 and plain.model.kl.beta == 0.04


def test_an_experiment_and_a_saved_run_are_configurations(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text(
        "defaults:\n  - override /algo: sdpo\n  - _self_\nalgo:\n  teacher: {teacher_update_rate: 0.5}\n"
    )
    job = checked(SOURCE, cli.to_overrides(["--config", str(mine), f"run_dir={tmp_path / 'a'}"]))
    assert job.composition.choices["algo"] == "sdpo"
    assert job.tree["algo"]["teacher"]["teacher_update_rate"] == 0.5
    with job.started():
        pass
    again = checked(SOURCE, cli.to_overrides(["--config", str(tmp_path / "a" / "config.yaml")]))
    assert again.tree == job.tree


def test_a_lightning_cli_file_by_hand_needs_no_choices(tmp_path: Path) -> None:
    document = {
        "seed_everything": 3,
        "model": {
            "class_path": "lit_rl.algorithms.sdpo.SDPO",
            "init_args": {"num_generations": 4, "optimizer": {"class_path": "torch.optim.SGD"}},
        },
        "trainer": {"max_steps": 5},
    }
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(document))
    job = checked(SOURCE, cli.to_overrides(["--config", str(tmp_path / "own.yaml")]))
    assert {"algo": "sdpo", "optim": "sgd"}.items() <= job.composition.choices.items()
    assert (job.tree["seed"], job.tree["trainer"]["max_steps"]) == (3, 5)
    assert job.tree["algo"]["num_generations"] == 4
    assert from_class_paths(to_class_paths(job.tree))["algo"]["num_generations"] == 4


def test_help_comes_from_the_docstrings(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["fit", "--model.help", "GRPO"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "rows cut at the length limit enter no loss and no divisor" in text
    assert cli.main([]) == 0 and cli.main(["train"]) == 2


@pytest.mark.slow
def test_test_and_predict_write_the_responses(tmp_path: Path) -> None:
    small = [*SMALL, "rollout.val_kwargs.n=2", "rollout.val_kwargs.temperature=1.0", "algo=grpo"]
    assert cli.main(["test", *small, f"run_dir={tmp_path / 'test'}"]) == 0
    assert cli.main(["predict", *small, f"run_dir={tmp_path / 'predict'}"]) == 0
    scored, alone = (
        pq.read_table(tmp_path / n / "responses.parquet").to_pylist() for n in ("test", "predict")
    )
    assert [row["responses"] for row in scored] == [row["responses"] for row in alone]
    assert all(len(row["responses"]) == 2 and len(row["rewards"]) == 2 for row in scored)
    assert "rewards" not in alone[0] and "prompt" in alone[0]


@pytest.mark.slow
def test_the_console_script_prints_a_configuration() -> None:
    command = [sys.executable, "-m", "lit_rl.cli", "fit", "--config", "algo/grpo.yaml", "--print_config"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert yaml.safe_load(done.stdout)["model"]["class_path"] == "lit_rl.algorithms.grpo.GRPO"
