"""CheckpointContents: periods, contents, what is kept, resume, refusals, signals."""

import csv
import json
import os
import signal

import lightning as L
import pytest
import torch

from lit_rl.callbacks.checkpoint_contents import CheckpointContents
from lit_rl.callbacks.checkpoint_signals import StopSignals
from lit_rl.checkpoint import FolderCheckpointIO, encode_tree, verify
from lit_rl.errors import ConfigError, DataError


def steps_in(folder) -> list[int]:
    return sorted(int(path.name[5:]) for path in folder.glob("step_*"))


class Counter(L.Callback):
    """Holds state that must be complete when a checkpoint is written."""

    def __init__(self) -> None:
        self.steps = 0

    def on_train_batch_end(self, *_: object) -> None:
        self.steps += 1

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


# ---------------------------------------------------------------------------------------- periods


@pytest.mark.parametrize(("save_freq", "expected"), [(2, [2, 4, 5]), (5, [5]), (-1, [5]), (100, [5])])
def test_every_nth_step_and_the_last_are_saved_once(train, fake_module, tmp_path, save_freq, expected):
    train(fake_module(), [CheckpointContents(str(tmp_path / "c"), save_freq=save_freq)], steps=5)
    assert steps_in(tmp_path / "c") == expected


class StopAfterValidation(L.Callback):
    """Ends the run in a validation, as early stopping does: after the step's own time to save."""

    def on_validation_end(self, trainer, pl_module):
        trainer.should_stop = True


def test_a_run_that_is_stopped_early_is_saved_and_can_go_on(train, fake_module, tmp_path):
    callbacks = [CheckpointContents(str(tmp_path / "c"), save_freq=100), StopAfterValidation()]
    train(fake_module(), callbacks, steps=6, val_check_interval=2)
    assert steps_in(tmp_path / "c") == [2]
    module = fake_module()
    train(module, [CheckpointContents(str(tmp_path / "c"))], 6, tmp_path / "c" / "step_00000002")
    assert module.seen == [3.0, 4.0, 5.0, 6.0]


@pytest.mark.parametrize("saved_by", ["a step", "the end of the last step", "the end of the run"])
def test_metrics_go_on_with_the_next_step_number(train, fake_module, tmp_path, saved_by):
    callbacks = [CheckpointContents(str(tmp_path / "c"), save_freq=2 if saved_by == "a step" else 100)]
    if saved_by == "the end of the run":
        callbacks.append(StopAfterValidation())
    steps = 2 if saved_by == "the end of the last step" else 4
    train(fake_module(), callbacks, steps=steps, val_check_interval=2)
    logger = L.pytorch.loggers.CSVLogger(tmp_path / "logs")
    folder = tmp_path / "c" / "step_00000002"
    train(fake_module(), [CheckpointContents(str(tmp_path / "d"))], 4, folder, logger=logger)
    with (tmp_path / "logs" / "lightning_logs" / "version_0" / "metrics.csv").open() as file:
        assert [row["step"] for row in csv.DictReader(file) if row["train/loss"]] == ["2", "3"]


def test_it_runs_after_every_other_callback(train, fake_module, tmp_path):
    callback = CheckpointContents(str(tmp_path / "c"))
    trainer = train(fake_module(), [callback, Counter()])
    assert trainer.callbacks[-1] is callback


@pytest.mark.field("ckpt/8")
def test_the_name_of_a_folder_is_the_step_inside_and_the_updates_taken(train, fake_module, tmp_path):
    callback = CheckpointContents(str(tmp_path / "c"), save_freq=2, monitor="val/accuracy")
    module = fake_module()
    module.val_accuracy = lambda step: {3: 0.9}.get(step, 0.1)
    train(module, [callback], steps=5, val_check_interval=3)
    for step in steps_in(tmp_path / "c"):
        folder = tmp_path / "c" / f"step_{step:08d}"
        loaded = FolderCheckpointIO().load_checkpoint(folder)
        assert verify(folder)["step"] == loaded["global_step"] == loaded["lit_rl"]["optimizer_steps"] == step
    best = verify(tmp_path / "c" / "best")
    assert best["step"] == 3 and best["monitor"] == pytest.approx({"val/accuracy": 0.9})


def test_the_best_model_is_kept_although_it_is_not_the_last(train, fake_module, tmp_path):
    callback = CheckpointContents(str(tmp_path / "c"), monitor="val/accuracy", mode="min", max_to_keep=1)
    module = fake_module()
    module.val_accuracy = lambda step: {2: 0.1}.get(step, 0.9)
    train(module, [callback], steps=6, val_check_interval=1)
    assert verify(tmp_path / "c" / "best")["step"] == 2
    assert callback.best == pytest.approx(0.1)


def test_an_unknown_monitor_names_what_there_is(train, fake_module, tmp_path):
    callback = CheckpointContents(str(tmp_path / "c"), monitor="val/acc")
    with pytest.raises(ConfigError, match=r"'val/acc'.*'val/accuracy'"):
        train(fake_module(), [callback], steps=2, val_check_interval=1)


def test_only_the_newest_are_kept(train, fake_module, tmp_path):
    train(fake_module(), [CheckpointContents(str(tmp_path / "c"), save_freq=1, max_to_keep=2)], steps=5)
    assert steps_in(tmp_path / "c") == [4, 5]


def test_saving_is_timed(train, fake_module, tmp_path):
    module = fake_module()
    train(module, [CheckpointContents(str(tmp_path / "c"))])
    assert module.clock.total["save"] > 0


# ---------------------------------------------------------------------------------------- resume


@pytest.mark.parametrize("saved", [1, 3, 4])
def test_a_resumed_run_equals_the_uninterrupted_one_bit_by_bit(train, fake_module, tmp_path, saved):
    straight, counter = fake_module(), Counter()
    train(
        straight,
        [CheckpointContents(str(tmp_path / "c"), save_freq=1), counter],
        steps=6,
        val_check_interval=2,
    )
    resumed, other = fake_module(), Counter()
    torch.nn.init.zeros_(resumed.policy.weight)
    folder = tmp_path / "c" / f"step_{saved:08d}"
    train(
        resumed,
        [CheckpointContents(str(tmp_path / "d")), other],
        steps=6,
        ckpt_path=folder,
        val_check_interval=2,
    )
    assert resumed.seen == straight.seen[saved:]
    assert other.steps == counter.steps == 6
    a, b = (FolderCheckpointIO().load_checkpoint(tmp_path / name / "step_00000006") for name in "cd")
    for part in ("state_dict", "optimizer_states", "lr_schedulers"):
        assert encode_tree(a[part])[0] == encode_tree(b[part])[0]
        for name, tensor in encode_tree(a[part])[1].items():
            assert torch.equal(tensor, encode_tree(b[part])[1][name])
    assert torch.equal(a["lit_rl"]["roles"]["teacher"]["value"], b["lit_rl"]["roles"]["teacher"]["value"])
    assert b["lit_rl"]["optimizer_steps"] == 6


@pytest.mark.parametrize("how", ["auto", "resume_path", "a folder of them"])
def test_a_run_finds_its_newest_checkpoint_and_says_so(train, fake_module, tmp_path, capsys, how):
    folder = tmp_path / "c"
    train(fake_module(), [CheckpointContents(str(folder), save_freq=2)], steps=4)
    named = {"auto": None, "resume_path": str(folder / "step_00000004"), "a folder of them": str(folder)}[how]
    mode = "auto" if how == "auto" else "resume_path"
    callback = CheckpointContents(str(folder), resume_mode=mode, resume_from_path=named)
    assert callback.resume_path(total_steps=8, steps_per_data_epoch=5) == folder / "step_00000004"
    assert (
        f"Resuming from {folder / 'step_00000004'} (step 4 of 8, data epoch 0.80)." in capsys.readouterr().out
    )


def test_nothing_to_resume_from_is_said(tmp_path, capsys):
    assert CheckpointContents(str(tmp_path / "c")).resume_path() is None
    assert "Fresh start: no complete checkpoint in" in capsys.readouterr().out


def test_resume_can_be_turned_off(train, fake_module, tmp_path, capsys):
    train(fake_module(), [CheckpointContents(str(tmp_path / "c"))])
    assert CheckpointContents(str(tmp_path / "c"), resume_mode="disable").resume_path() is None
    assert "Fresh start" in capsys.readouterr().out


def test_a_finished_run_says_so(train, fake_module, tmp_path, capsys):
    train(fake_module(), [CheckpointContents(str(tmp_path / "c"))], steps=3)
    assert CheckpointContents(str(tmp_path / "c")).resume_path(total_steps=3) is not None
    assert "This run is finished" in capsys.readouterr().out


@pytest.mark.parametrize("by_max_steps", [True, False])
def test_a_finished_run_can_be_extended(train, fake_module, tmp_path, by_max_steps):
    limit = {} if by_max_steps else {"max_steps": -1}
    train(fake_module(), [CheckpointContents(str(tmp_path / "c"))], steps=3, **limit)
    module, folder = fake_module(), tmp_path / "c" / "step_00000003"
    train(module, [CheckpointContents(str(tmp_path / "c"))], steps=5, ckpt_path=folder, **limit)
    assert module.seen == [4.0, 5.0]
    assert steps_in(tmp_path / "c") == [3, 5]


@pytest.mark.parametrize("by_max_steps", [True, False])
def test_resuming_a_finished_run_trains_nothing(train, fake_module, tmp_path, by_max_steps):
    limit = {} if by_max_steps else {"max_steps": -1}
    train(fake_module(), [CheckpointContents(str(tmp_path / "c"))], steps=3, **limit)
    module, folder = fake_module(), tmp_path / "c" / "step_00000003"
    train(module, [CheckpointContents(str(tmp_path / "c"))], steps=3, ckpt_path=folder, **limit)
    assert module.seen == []


@pytest.mark.field("ckpt/3")
def test_a_path_that_does_not_exist_is_an_error(tmp_path):
    callback = CheckpointContents(
        str(tmp_path), resume_mode="resume_path", resume_from_path=str(tmp_path / "no")
    )
    with pytest.raises(ConfigError, match=r"checkpoint\.resume_from_path does not exist"):
        callback.resume_path()


@pytest.mark.field("ckpt/3")
def test_a_named_folder_without_checkpoints_is_an_error(tmp_path):
    callback = CheckpointContents(str(tmp_path), resume_mode="resume_path", resume_from_path=str(tmp_path))
    with pytest.raises(DataError, match="no complete checkpoint"):
        callback.resume_path()


def test_a_named_folder_of_damaged_checkpoints_is_an_error(train, fake_module, tmp_path):
    train(fake_module(), [CheckpointContents(str(tmp_path / "c"))])
    (tmp_path / "c" / "step_00000003" / "model.safetensors").unlink()
    callback = CheckpointContents(
        str(tmp_path), resume_mode="resume_path", resume_from_path=str(tmp_path / "c")
    )
    with pytest.raises(ConfigError, match="holds no complete checkpoint"):
        callback.resume_path()


@pytest.mark.field("ckpt/3")
def test_a_checkpoint_of_another_algorithm_is_refused(train, fake_module, tmp_path):
    train(fake_module(), [CheckpointContents(str(tmp_path / "c"))])
    other = type("OtherAlgorithm", (fake_module,), {})()
    with pytest.raises(DataError, match="algorithm 'FakeRLModule' there, 'OtherAlgorithm' here"):
        train(other, [CheckpointContents(str(tmp_path / "d"))], ckpt_path=tmp_path / "c" / "step_00000003")


@pytest.mark.field("ckpt/3")
def test_a_checkpoint_of_another_size_is_refused_with_the_shapes(train, fake_module, tmp_path):
    train(fake_module(), [CheckpointContents(str(tmp_path / "c"))])
    with pytest.raises(DataError, match=r"policy\.weight \(1, 3\) there, \(1, 5\) here"):
        train(
            fake_module(width=5),
            [CheckpointContents(str(tmp_path / "d"))],
            ckpt_path=tmp_path / "c" / "step_00000003",
        )


def test_a_file_without_optimizer_and_extra_is_a_warm_start(train, fake_module, tmp_path):
    train(fake_module(), [CheckpointContents(str(tmp_path / "c"), save_contents=["model"])], steps=3)
    module = fake_module()
    with pytest.warns(UserWarning, match="training starts at step 0"):
        train(
            module,
            [CheckpointContents(str(tmp_path / "d"), save_contents=["model"])],
            steps=2,
            ckpt_path=tmp_path / "c" / "step_00000003",
        )
    assert module.seen == [1.0, 2.0]


def test_weights_can_be_left_unread(train, fake_module, tmp_path):
    train(fake_module(), [CheckpointContents(str(tmp_path / "c"))], steps=3)
    module = fake_module()
    torch.nn.init.constant_(module.policy.weight, 5.0)
    kept = {}

    class Look(L.Callback):
        def on_train_start(self, trainer, pl_module):
            kept["weight"] = pl_module.policy.weight.detach().clone()

    callback = CheckpointContents(str(tmp_path / "d"), load_contents=["optimizer", "extra"])
    train(module, [callback, Look()], steps=4, ckpt_path=tmp_path / "c" / "step_00000003")
    assert torch.equal(kept["weight"], torch.full((1, 3), 5.0))
    assert module.seen == [4.0]


# ---------------------------------------------------------------------------------------- contents


def test_the_manifest_says_what_wrote_it_and_what_is_left_out(train, fake_module, fake_part, tmp_path):
    module = fake_module()
    module.ref = fake_part(is_moving=False)
    train(module, [CheckpointContents(str(tmp_path / "c"), save_contents=["model", "extra"])])
    manifest = json.loads((tmp_path / "c" / "step_00000003" / "manifest.json").read_text())
    assert manifest["algorithm"] == "FakeRLModule" and manifest["seed"] == 7 and manifest["total_steps"] == 3
    assert manifest["contents"] == ["model", "extra"]
    assert manifest["left_out"] == ["optimizer", "ref"]


def test_saving_fails_while_a_moving_part_is_not_registered(train, fake_module, fake_part, tmp_path):
    module = fake_module()
    module.average = fake_part()
    with pytest.raises(ConfigError, match=r"would lose: \['average'\]"):
        train(module, [CheckpointContents(str(tmp_path / "c"))])


def test_hf_model_is_a_folder_inside_the_checkpoint(train, fake_module, tmp_path, monkeypatch):
    def fake_writer(pl_module, *, copied):
        def fake_save(folder):
            folder.mkdir()
            (folder / "config.json").write_text("{}")

        return fake_save

    monkeypatch.setattr("lit_rl.callbacks.checkpoint_state.hf_writer", fake_writer)
    contents = ["model", "optimizer", "extra", "hf_model"]
    train(
        fake_module(),
        [CheckpointContents(str(tmp_path / "c"), save_contents=contents, load_contents=contents)],
    )
    manifest = verify(tmp_path / "c" / "step_00000003")
    assert "hf/config.json" in manifest["files"] and "hf_model" in manifest["contents"]
    train(fake_module(), [CheckpointContents(str(tmp_path / "d"))], 4, tmp_path / "c" / "step_00000003")


def test_a_foreign_checkpoint_io_is_refused(train, fake_module, tmp_path):
    class Other(L.pytorch.plugins.TorchCheckpointIO):
        pass

    with pytest.raises(ConfigError, match="take Other out"):
        train(fake_module(), [CheckpointContents(str(tmp_path / "c"))], plugins=[Other()])


# ---------------------------------------------------------------------------------------- signals


class Terminate(L.Callback):
    """Sends this process a SIGTERM in the middle of a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step + 1 == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.field("ckpt/9")
def test_sigterm_ends_the_run_after_the_step_with_a_checkpoint(train, fake_module, tmp_path, capsys):
    before = signal.getsignal(signal.SIGTERM)
    module = fake_module()
    train(module, [CheckpointContents(str(tmp_path / "c")), Terminate(3)], steps=100)
    assert steps_in(tmp_path / "c") == [3]
    assert "SIGTERM: saving step 3" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGTERM) == before
    resumed = fake_module()
    train(resumed, [CheckpointContents(str(tmp_path / "c"))], 5, tmp_path / "c" / "step_00000003")
    assert resumed.seen == [4.0, 5.0]


@pytest.mark.field("ckpt/9")
def test_after_the_first_sigterm_a_second_one_has_its_usual_effect():
    before = signal.getsignal(signal.SIGTERM)
    try:
        StopSignals()._note(signal.SIGTERM, None)
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)


# ---------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"save_freq": 0}, r"checkpoint\.save_freq must be >= 1"),
        ({"max_to_keep": 0}, r"checkpoint\.max_to_keep must be null or >= 1"),
        ({"mode": "best"}, r"checkpoint\.mode must be"),
        ({"mode": "min"}, r"no effect without checkpoint\.monitor"),
        ({"save_contents": ["weights"]}, r"checkpoint\.save_contents must be a list"),
        ({"load_contents": ["hf_model"]}, r"checkpoint\.load_contents must be a list"),
        ({"save_contents": ["model"], "load_contents": ["extra"]}, r"checkpoint\.load_contents must be"),
        ({"resume_mode": "always"}, r"checkpoint\.resume_mode must be one of"),
        ({"resume_mode": "resume_path"}, "come together"),
        ({"resume_from_path": "x"}, "come together"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(settings, message):
    with pytest.raises(ConfigError, match=message):
        CheckpointContents("checkpoints", **settings)
