"""CollapseAlarm: a planted collapse is noticed, ends the run, or is undone bit for bit."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from lit_rl.callbacks.checkpoint_contents import CheckpointContents
from lit_rl.callbacks.collapse_alarm import CollapseAlarm
from lit_rl.checkpoint import FolderCheckpointIO, step_folder
from lit_rl.errors import ConfigError

WELL = {"rollout/reward": 0.8, "rollout/completion_len": 10.0, "train/entropy": 1.0, "train/loss": 0.5}
LOST = {"rollout/reward": 0.1, "rollout/completion_len": 2.0, "train/entropy": 0.1, "train/loss": 0.1}


def planted(begin: int, end: int = 10**9, **kept: float) -> Any:
    """Metrics by step: well, but lost from step `begin` on until before `end`."""
    return lambda step: {**LOST, **kept} if begin <= step < end else WELL


class Weights(L.Callback):
    """The policy's weights at the end of each step; it stands before the others in the list."""

    def __init__(self) -> None:
        self.at: list[torch.Tensor] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        self.at.append(pl_module.policy.weight.detach().clone())


def test_a_planted_collapse_is_said_once(fake_module: Any, train: Any) -> None:
    alarm = CollapseAlarm(window=2, drop=0.5)
    with pytest.warns(
        UserWarning, match=r"Step 5: the policy seems to collapse.*reward 0\.8 -> 0\.1"
    ) as said:
        train(fake_module(planted(4)), [alarm], steps=9)
    assert sum("collapse" in str(warning.message) for warning in said) == 1


@pytest.mark.parametrize(
    "kept",
    [
        {"rollout/reward": 0.7},
        {"train/loss": 0.9},
        {"rollout/completion_len": 9.0, "train/entropy": 0.9},
    ],
)
def test_each_sign_is_needed(kept: dict[str, float], fake_module: Any, train: Any, recwarn: Any) -> None:
    """A reward that stays, a loss that rises, or both length and entropy that stay: no alarm."""
    train(fake_module(planted(4, **kept)), [CollapseAlarm(window=2, drop=0.5)], steps=9)
    assert not [w for w in recwarn if "collapse" in str(w.message)]


def test_stop_ends_the_run_with_a_checkpoint(fake_module: Any, train: Any, tmp_path: Path) -> None:
    callbacks = [
        CollapseAlarm("stop", window=2, drop=0.5),
        CheckpointContents(str(tmp_path / "c"), save_freq=100),
    ]
    with pytest.warns(UserWarning, match="collapse"):
        trainer = train(fake_module(planted(4)), callbacks, steps=20)
    assert trainer.global_step == 5 and step_folder(tmp_path / "c", 5).is_dir()


def test_a_rollback_brings_back_weights_optimizer_and_teacher(
    fake_module: Any, train: Any, tmp_path: Path
) -> None:
    """The reference window ends at step 3, before the collapse; each step has a checkpoint."""
    weights, module = Weights(), fake_module(planted(4, 6))
    alarm = CollapseAlarm("rollback", window=2, drop=0.5)
    folder = tmp_path / "c"
    checkpoints = CheckpointContents(str(folder), save_freq=1)
    with pytest.warns(UserWarning, match="Rolled back"):
        trainer = train(module, [weights, alarm, checkpoints], steps=5)
    assert alarm.rollbacks == 1 and trainer.global_step == 5
    good, last = (FolderCheckpointIO().load_checkpoint(step_folder(folder, step)) for step in (3, 5))
    assert torch.equal(module.policy.weight, good["state_dict"]["policy.weight"])
    assert not torch.equal(module.policy.weight, weights.at[4])
    assert torch.equal(module.teacher.value, good["lit_rl"]["roles"]["teacher"]["value"])
    moments = [c["optimizer_states"][0]["state"][0]["exp_avg"] for c in (good, last)]
    assert torch.equal(*moments), "step 5 was saved after the rollback"
    rates = [c["optimizer_states"][0]["param_groups"][0]["lr"] for c in (good, last)]
    assert rates == pytest.approx([0.1 * 0.9**3, 0.1 * 0.9**5]), "the schedule goes on"


def test_it_stops_when_nothing_is_old_enough(fake_module: Any, train: Any, tmp_path: Path) -> None:
    callbacks = [
        CollapseAlarm("rollback", window=2, drop=0.5),
        CheckpointContents(str(tmp_path / "c"), save_freq=100),
    ]
    with pytest.warns(UserWarning, match="no checkpoint is old enough"):
        assert train(fake_module(planted(4)), callbacks, steps=20).global_step == 5


def test_it_stops_after_the_last_rollback(fake_module: Any, train: Any, tmp_path: Path) -> None:
    alarm = CollapseAlarm("rollback", window=2, drop=0.5, max_rollbacks=1)
    callbacks = [alarm, CheckpointContents(str(tmp_path / "c"), save_freq=1)]
    with pytest.warns(UserWarning, match="1 rollbacks were made"):
        trainer = train(fake_module(planted(4)), callbacks, steps=20)
    assert trainer.global_step == 7 and alarm.rollbacks == 1


def test_a_resumed_run_gives_the_same_alarm(fake_module: Any, train: Any, tmp_path: Path) -> None:
    folder = tmp_path / "c"
    first = [CollapseAlarm(window=3, drop=0.5), CheckpointContents(str(folder), save_freq=4)]
    train(fake_module(planted(4)), first, steps=4)
    alarm = CollapseAlarm("stop", window=3, drop=0.5)
    with pytest.warns(UserWarning, match="Step 5"):
        trainer = train(
            fake_module(planted(4)),
            [alarm, CheckpointContents(str(folder))],
            steps=12,
            ckpt_path=step_folder(folder, 4),
        )
    assert trainer.global_step == 5 and alarm.state_dict()["best_step"] == 3


def test_wrong_values_and_a_rollback_without_checkpoints_are_refused(fake_module: Any, train: Any) -> None:
    for wrong in ({"action": "pray"}, {"window": 0}, {"drop": 1.0}, {"max_rollbacks": 0}):
        with pytest.raises(ConfigError, match=r"callbacks\.collapse_alarm\." + next(iter(wrong))):
            CollapseAlarm(**wrong)
    with pytest.raises(ConfigError, match=r"callbacks\.checkpoint"):
        train(fake_module(), [CollapseAlarm("rollback")])
