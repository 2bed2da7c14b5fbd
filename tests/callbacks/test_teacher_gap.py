"""TeacherGap: what it measures with the embedded model, and how it sets the gates."""

from pathlib import Path

import lightning as L
import pytest

from lit_rl.callbacks.teacher_gap import TeacherGap
from lit_rl.configuration.build import built, built_all, built_trainer
from lit_rl.configuration.compose import Source
from lit_rl.configuration.job import checked
from lit_rl.errors import ConfigError
from lit_rl.hooks import RLCallback

SOURCE = Source(Path(__file__).resolve().parents[2] / "conf")
LINE = (
    "algo=sdpo",
    "debug=fast",
    "callbacks=[default,teacher_gap]",
    "callbacks.teacher_gap.num_prompts=6",
    "callbacks.teacher_gap.every_n_steps=2",
    "algo.reprompt.include_environment_feedback=true",
    "data.val_max_samples=12",
    "data.train_batch_size=3",
    "trainer.max_steps=3",
    "trainer.val_check_interval=0",
    "trainer.enable_progress_bar=false",
    "checkpoint.save_freq=-1",
    "logger=none",
    *(
        f"callbacks.{name}=null"
        for name in ("curves", "summary", "progress", "log_completions", "checkpoint")
    ),
)


class Seen(RLCallback):
    """Notes, at the end of each step, what was measured and which rows were distilled."""

    def __init__(self) -> None:
        self.metrics: list[dict[str, float]] = []
        self.distilled: list[list[bool]] = []

    def on_update_end(self, trainer: L.Trainer, pl_module: L.LightningModule, **payload: object) -> None:
        found = {
            name: float(value) for name, value in trainer.callback_metrics.items() if "teacher_gap" in name
        }
        self.metrics.append(found)
        self.distilled.append(pl_module.last_rollout.self_distillation_mask.tolist())


def trained(*words: str, folder: Path) -> tuple[Seen, L.LightningModule]:
    """A run through the real configuration."""
    tree = checked(SOURCE, [*LINE, *words, f"run_dir={folder}"]).tree
    L.seed_everything(tree["seed"], verbose=False)
    seen = Seen()
    module = built(tree["algo"], reward=built(tree["reward"]), policy=built(tree["model"]))
    trainer = built_trainer(tree["trainer"], callbacks=[*built_all(tree["callbacks"]), seen], logger=False)
    trainer.fit(module, datamodule=built(tree["data"]))
    return seen, module


def test_the_embedded_policy_is_better_with_the_teachers_prompts(tmp_path: Path) -> None:
    seen, module = trained("algo.distillation.gate=run", folder=tmp_path)
    first = seen.metrics[0]
    assert first["val/teacher_gap"] == pytest.approx(
        first["val/teacher_gap/teacher"] - first["val/teacher_gap/student"]
    )
    assert first["val/teacher_gap"] > 0.2 and 0 < first["val/teacher_gap/prompts"] <= 1
    assert module.gate.gap == pytest.approx(seen.metrics[2]["val/teacher_gap"], abs=1e-6), (
        "measured before steps 1 and 3"
    )
    assert any(any(rows) for rows in seen.distilled)


def test_a_teacher_that_sees_nothing_new_closes_the_gate(tmp_path: Path) -> None:
    """Both sides then answer the same question; the seed is one where chance favours the student."""
    blind = "algo.reprompt.reprompt_template='{prompt}'"
    seen, module = trained("algo.distillation.gate=run", blind, "trainer.max_steps=1", folder=tmp_path)
    assert abs(seen.metrics[0]["val/teacher_gap"]) < 0.3
    is_open = module.gate.gap > 0
    assert any(seen.distilled[0]) == is_open


def test_the_prompt_gate_compares_each_prompt_of_the_step(tmp_path: Path) -> None:
    seen, module = trained("algo.distillation.gate=prompt", "trainer.max_steps=1", folder=tmp_path)
    rollout = module.last_rollout
    for row, gap in module.gate.gaps.items():
        of_prompt = (rollout.prompt_row == row).nonzero().flatten().tolist()
        rate = sum(rollout.rewards[i].item() == 1 for i in of_prompt) / len(of_prompt)
        assert -rate <= gap <= 1 - rate
        assert any(seen.distilled[0][i] for i in of_prompt) == (gap > 0)


def test_values_below_one_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"callbacks\.teacher_gap\.every_n_steps"):
        TeacherGap(every_n_steps=0)
    with pytest.raises(ConfigError, match=r"callbacks\.teacher_gap\.num_prompts"):
        TeacherGap(num_prompts=0)
