"""Plain Python: classes by their short names, a plain Trainer, functions, rows and models as objects."""

import runpy
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from datasets import Dataset

import lit_rl
from lit_rl import GRPO, SDPO, PromptDataModule, RewardSum, Sampling, load_policy
from lit_rl.callbacks.checkpoint_contents import CheckpointContents
from lit_rl.callbacks.rollout import RolloutGeneration
from lit_rl.errors import ConfigError
from lit_rl.schedule import WarmupDecay

ROWS = [{"prompt": f"{a}+{a + 1}=", "answer": str(2 * a + 1)} for a in range(10, 30)]


def right(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    return [float(text == wanted) for text, wanted in zip(completions, answer, strict=True)]


def data(**settings: Any) -> PromptDataModule:
    return PromptDataModule(
        **{"train_files": ROWS, "val_files": None, "train_batch_size": 2, "max_prompt_length": 32} | settings
    )


def trainer(steps: int = 2, **settings: Any) -> L.Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    plain = {"accelerator": "cpu", "max_steps": steps, "enable_model_summary": False}
    return L.Trainer(**{"callbacks": [RolloutGeneration()]} | quiet | plain | settings)


def module(algorithm: Any = GRPO, **settings: Any) -> Any:
    short = Sampling(max_completion_length=3)
    return algorithm(
        **{"policy": load_policy("embedded"), "reward": [right], "num_generations": 4, "sampling": short}
        | settings
    )


def test_importing_the_package_imports_nothing_else() -> None:
    code = "import sys, lit_rl; print(sorted({'torch', 'lightning', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_short_name_leads_to_its_class() -> None:
    for name in lit_rl.__all__:
        assert getattr(lit_rl, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'GRP0'"):
        _ = lit_rl.GRP0


def test_the_example_runs_and_stands_in_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = Path(__file__).with_name("plain_example.py")
    lines = file.read_text().split('"""\n\n', 1)[1]
    assert lines in (file.parents[1] / "README.md").read_text()
    monkeypatch.chdir(tmp_path)
    ran = runpy.run_path(str(file))
    assert ran["trainer"].global_step == 2
    assert {"val/accuracy", "val/accuracy/all", "val/accuracy/hard"} <= set(ran["trainer"].logged_metrics)


@pytest.mark.parametrize("rows", [ROWS, Dataset.from_list(ROWS)], ids=["list", "dataset"])
def test_a_run_on_rows_in_memory_is_resumed_bit_for_bit(rows: Any, tmp_path: Path) -> None:
    def run(folder: str, end: int = 4, start: Path | None = None) -> tuple[dict[str, torch.Tensor], list]:
        seen: list[Any] = []

        def number(prompts: list, completions: list[str], **columns: Any) -> list[float]:
            seen.extend(prompts)
            return [float(len(text) + i % 3) for i, text in enumerate(completions)]

        model = module(optimizer=partial(torch.optim.SGD, lr=1.0), reward=[number])
        ends = L.pytorch.callbacks.LambdaCallback(
            on_train_batch_end=lambda fitting, *_: setattr(fitting, "should_stop", fitting.global_step == end)
        )
        fitting = trainer(4, callbacks=[RolloutGeneration(), ends, CheckpointContents(folder)])
        fitting.fit(model, datamodule=data(train_files=rows), ckpt_path=start, weights_only=False)
        return model.policy.state_dict(), seen

    straight, prompts = run(str(tmp_path / "straight"))
    _, first = run(str(tmp_path / "first"), end=2)
    resumed, rest = run(str(tmp_path / "rest"), start=tmp_path / "first" / "step_00000002")
    assert prompts == first + rest
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)


@pytest.mark.parametrize("algorithm", [GRPO, SDPO])
def test_a_plain_trainer_trains_on_a_dataset_with_a_function(algorithm: Any) -> None:
    torch.manual_seed(0)
    model = module(algorithm)
    before = model.policy.get_input_embeddings().weight.clone()
    model.reward = RewardSum.of([lambda completions: [float(i % 2) for i in range(len(completions))]])
    trainer().fit(model, datamodule=data(train_files=Dataset.from_list(ROWS)))
    assert not torch.equal(before, model.policy.get_input_embeddings().weight)


def test_a_dataset_a_list_and_a_file_give_the_same_weights(tmp_path: Path) -> None:
    Dataset.from_list(ROWS).to_parquet(tmp_path / "rows.parquet")
    ends = []
    for source in (ROWS, Dataset.from_list(ROWS), str(tmp_path / "rows.parquet")):
        L.seed_everything(1, verbose=False)
        model = module()
        trainer().fit(model, datamodule=data(train_files=source, shuffle=False))
        ends.append(torch.cat([p.flatten() for p in model.parameters()]))
    assert torch.equal(ends[0], ends[1]) and torch.equal(ends[0], ends[2])


def test_an_optimizer_and_a_schedule_are_taken_as_they_are_or_made() -> None:
    policy = load_policy("embedded")
    sgd = torch.optim.SGD(policy.parameters(), lr=0.25)
    pair = {"optimizer": sgd, "scheduler": torch.optim.lr_scheduler.ConstantLR(sgd, 1.0)}
    run = trainer()
    run.fit(module(policy=policy, **pair), datamodule=data())
    assert run.optimizers == [sgd]
    made = trainer()
    constant = partial(WarmupDecay, lr_scheduler_type="constant")
    made.fit(module(optimizer=partial(torch.optim.SGD, lr=0.5), scheduler=constant), datamodule=data())
    assert isinstance(made.optimizers[0], torch.optim.SGD) and made.optimizers[0].param_groups[0]["lr"] == 0.5


def test_functions_of_one_name_are_told_apart() -> None:
    assert RewardSum.of([right, right], weights=[1.0, 2.0]).names == ["right", "right#2"]


def test_named_validation_sets_have_a_metric_each(tmp_path: Path) -> None:
    Dataset.from_list(ROWS[:3]).to_parquet(tmp_path / "few.parquet")
    sets = {"easy": ROWS[:5], "few": str(tmp_path / "few.parquet")}
    scored = module(reward=[lambda completions, validation_set: [float(n == "few") for n in validation_set]])
    run = trainer()
    run.validate(scored, datamodule=data(val_files=sets), verbose=False)
    metrics = {name: float(value) for name, value in run.logged_metrics.items() if "accuracy" in name}
    assert metrics == pytest.approx(
        {"val/accuracy": 3 / 8, "val/accuracy/easy": 0.0, "val/accuracy/few": 1.0}
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"max_epochs": 3, "max_steps": -1}, "max_epochs"), ({}, "needs a datamodule")],
)
def test_a_trainer_that_would_run_something_else_is_refused(settings: dict[str, Any], message: str) -> None:
    given = {"datamodule": data()} if settings else {"train_dataloaders": [0]}
    with pytest.raises(ConfigError, match=message):
        trainer(**settings).fit(module(), **given)
