"""CheckpointContents beside training, by time, the best at the end, one writer, SLURM."""

import csv
import os
import signal
import stat
import threading
import time
import warnings
from pathlib import Path

import lightning as L
import pytest
import torch

from lit_rl.callbacks.checkpoint_contents import CheckpointContents
from lit_rl.callbacks.checkpoint_signals import StopSignals
from lit_rl.checkpoint import FolderCheckpointIO, io, verify
from lit_rl.checkpoint.lock import FolderLock
from lit_rl.errors import ConfigError, DataError, StorageError
from lit_rl.hooks import RLCallback
from lit_rl.schedule import WarmupDecay


def steps_in(folder) -> list[int]:
    return sorted(int(path.name[5:]) for path in folder.glob("step_*"))


def policy_in(folder) -> torch.Tensor:
    return FolderCheckpointIO().load_checkpoint(folder)["state_dict"]["policy.weight"]


class Weights(L.Callback):
    """The policy's weights after each step; told about checkpoints."""

    def __init__(self) -> None:
        self.by_step: dict[int, torch.Tensor] = {}
        self.saved: list[tuple[int, str, int]] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.by_step[trainer.global_step] = pl_module.policy.weight.detach().clone()

    def on_checkpoint_saved(self, trainer, pl_module, *, folder, step, **payload):
        verify(folder)
        self.saved.append((step, folder.name, trainer.global_step))


@pytest.fixture
def slow_disk(monkeypatch):
    """Writing that waits until it is let go; a stand-in for a slow disk."""
    gate, write = threading.Event(), io._write

    def fake_slow_write(*arguments):
        assert gate.wait(30)
        write(*arguments)

    monkeypatch.setattr(io, "_write", fake_slow_write)
    return gate


# ---------------------------------------------------------------------------------------- beside training


def test_training_goes_on_while_a_checkpoint_is_written_and_the_file_holds_the_weights_of_the_call(
    train, fake_module, tmp_path, slow_disk
):
    class LetGo(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if trainer.global_step == 3:
                assert steps_in(tmp_path / "c") == [], "step 2 is on its way for a whole step"
                slow_disk.set()

    weights = Weights()
    callback = CheckpointContents(str(tmp_path / "c"), save_freq=2, async_save=True)
    train(fake_module(), [callback, weights, LetGo()], steps=4)
    assert steps_in(tmp_path / "c") == [2, 4]
    for step in (2, 4):
        assert torch.equal(policy_in(tmp_path / "c" / f"step_{step:08d}"), weights.by_step[step])
    assert not torch.equal(weights.by_step[2], weights.by_step[3])
    assert [saved[:2] for saved in weights.saved] == [(2, "step_00000002"), (4, "step_00000004")]


def test_files_written_beside_training_are_those_written_at_once(train, fake_module, tmp_path):
    for name, is_async in (("a", True), ("b", False)):
        train(fake_module(), [CheckpointContents(str(tmp_path / name), async_save=is_async)], steps=3)
    for file in ("model", "optimizer", "state"):
        ours, theirs = (tmp_path / n / "step_00000003" / f"{file}.safetensors" for n in "ab")
        assert ours.read_bytes() == theirs.read_bytes()


def test_at_most_one_checkpoint_is_on_its_way(train, fake_module, tmp_path, monkeypatch):
    running, most, write = [], [], io._write

    def fake_counted_write(*arguments):
        running.append(1)
        most.append(len(running))
        time.sleep(0.05)
        write(*arguments)
        running.pop()

    monkeypatch.setattr(io, "_write", fake_counted_write)
    callback = CheckpointContents(str(tmp_path / "c"), save_freq=1, async_save=True, max_to_keep=2)
    train(fake_module(), [callback], steps=5)
    assert most == [1] * 5 and steps_in(tmp_path / "c") == [4, 5]


def test_an_error_beside_training_ends_the_run(train, fake_module, tmp_path, monkeypatch):
    def fake_full_disk(folder, name, structure, tensors):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(io, "write_tree", fake_full_disk)
    module = fake_module()
    callback = CheckpointContents(str(tmp_path / "c"), save_freq=1, async_save=True)
    with pytest.raises(StorageError, match=r"step_00000001 could not be written.*No space left"):
        train(module, [callback], steps=50)
    assert len(module.seen) <= 3 and list((tmp_path / "c").glob("*")) == []


def test_size_and_seconds_are_metrics(train, fake_module, tmp_path):
    logger = L.pytorch.loggers.CSVLogger(tmp_path / "logs")
    train(fake_module(), [CheckpointContents(str(tmp_path / "c"), async_save=True)], logger=logger)
    with (tmp_path / "logs/lightning_logs/version_0/metrics.csv").open() as file:
        (row,) = [row for row in csv.DictReader(file) if row["checkpoint/bytes"]]
    folder = tmp_path / "c" / "step_00000003"
    assert float(row["checkpoint/bytes"]) == sum(f.stat().st_size for f in folder.rglob("*"))
    assert float(row["time/save"]) > 0 and float(row["time/save_complete"]) > 0


# ---------------------------------------------------------------------------------------- when


def test_minutes_count_too(train, fake_module, tmp_path):
    callback = CheckpointContents(str(tmp_path / "c"), save_freq=-1, save_every_minutes=1e-9)
    train(fake_module(), [callback], steps=3)
    assert steps_in(tmp_path / "c") == [1, 2, 3]
    callback = CheckpointContents(str(tmp_path / "d"), save_freq=-1, save_every_minutes=60)
    train(fake_module(), [callback], steps=3)
    assert steps_in(tmp_path / "d") == [3]


def test_a_run_can_end_with_its_best_weights(train, fake_module, tmp_path, capsys):
    module, weights = fake_module(), Weights()
    module.val_accuracy = lambda step: {2: 0.9}.get(step, 0.1)
    callback = CheckpointContents(
        str(tmp_path / "c"), monitor="val/accuracy", load_best_model_at_end=True, save_freq=100
    )
    train(module, [callback, weights], steps=4, val_check_interval=1)
    assert torch.equal(module.policy.weight, weights.by_step[2])
    assert torch.equal(policy_in(tmp_path / "c" / "step_00000004"), weights.by_step[4]), "it can be resumed"
    assert callback.ended_with_best and "best weights: step 2, val/accuracy 0.9" in capsys.readouterr().out
    assert module.clock.total["update"] > verify_seconds(tmp_path / "c" / "best")


def verify_seconds(folder) -> float:
    """Seconds in updates, as a checkpoint holds them."""
    return FolderCheckpointIO().load_checkpoint(folder)["lit_rl"]["seconds"]["update"]


def test_without_a_validation_the_last_weights_stay(train, fake_module, tmp_path, capsys):
    callback = CheckpointContents(str(tmp_path / "c"), monitor="val/accuracy", load_best_model_at_end=True)
    train(fake_module(), [callback], steps=2)
    assert not callback.ended_with_best and "nothing was validated" in capsys.readouterr().out


# ---------------------------------------------------------------------------------------- one writer


def hold_lock_in_another_process(folder: Path) -> tuple[int, int]:
    """A forked process that holds the folder's lock, and has a child, until the pipe is closed."""
    ready, tell = os.pipe()
    wait, end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(end)
        FolderLock(folder).acquire()
        os.fork()
        os.write(tell, b"x")
        os.read(wait, 1)
        os._exit(0)
    os.close(wait)
    assert os.read(ready, 1) == b"x"
    return child, end


def test_a_second_process_in_the_same_folder_is_refused(train, fake_module, tmp_path):
    child, end = hold_lock_in_another_process(tmp_path / "c")
    module = fake_module()
    with pytest.raises(ConfigError, match=rf"a folder of its own.*process {child} on"):
        train(module, [CheckpointContents(str(tmp_path / "c"))])
    assert module.seen == []
    os.close(end)
    os.waitpid(child, 0)
    train(module, [CheckpointContents(str(tmp_path / "c"))])
    assert steps_in(tmp_path / "c") == [3] and not (tmp_path / "c" / ".lock").exists()


def test_a_killed_process_holds_no_lock_though_its_children_live(tmp_path):
    child, end = hold_lock_in_another_process(tmp_path / "c")
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    lock = FolderLock(tmp_path / "c")
    lock.acquire()
    lock.release()
    os.close(end)


def test_a_folder_that_cannot_be_made_is_named_before_training(train, fake_module, tmp_path):
    (tmp_path / "file").write_text("")
    module = fake_module()
    with pytest.raises(StorageError, match=r"checkpoint\.default_local_dir cannot be written to"):
        train(module, [CheckpointContents(str(tmp_path / "file" / "c"))])
    assert module.seen == []


# ---------------------------------------------------------------------------------------- schedule


def scheduled(fake_module, **settings):
    class Scheduled(fake_module):
        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.1, weight_decay=settings.get("decay", 0.0))
            total = self.trainer.max_steps
            return [optimizer], [WarmupDecay(optimizer, total_steps=total, lr_scheduler_type="linear")]

    return Scheduled()


@pytest.mark.parametrize("from_file", [True, False])
def test_the_schedule_comes_from_the_file_or_from_this_run(train, fake_module, tmp_path, from_file):
    train(scheduled(fake_module), [CheckpointContents(str(tmp_path / "c"))], steps=3)
    callback = CheckpointContents(str(tmp_path / "d"), use_checkpoint_opt_param_scheduler=from_file)
    module = scheduled(fake_module, decay=0.5)
    rates = []

    class Note(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            group = trainer.optimizers[0].param_groups[0]
            rates.append((group["lr"], group["weight_decay"]))

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        train(module, [callback, Note()], 5, tmp_path / "c" / "step_00000003")
    warned = [str(w.message) for w in said if "ends at step 3 and this run at 5" in str(w.message)]
    if from_file:
        assert rates == [(0.0, 0.0), (0.0, 0.0)] and len(warned) == 1, "the file's ended: said, not silent"
    else:
        assert rates == [pytest.approx((0.1 * 2 / 6, 0.5)), pytest.approx((0.1 / 6, 0.5))] and not warned


def test_threads_and_other_things_that_change_the_last_bits_are_warned_about(
    train, fake_module, tmp_path, monkeypatch
):
    train(fake_module(), [CheckpointContents(str(tmp_path / "c"))], steps=3)
    assert verify(tmp_path / "c" / "step_00000003")["threads"] == torch.get_num_threads()
    other = torch.get_num_threads() + 1
    monkeypatch.setattr(torch, "get_num_threads", lambda: other)
    with pytest.warns(UserWarning, match=rf"threads {other - 1}, this run has {other}.*not bit for bit"):
        train(fake_module(), [CheckpointContents(str(tmp_path / "d"))], 4, tmp_path / "c" / "step_00000003")


def test_other_weights_behind_what_the_file_leaves_out_are_refused(train, fake_module, tmp_path):
    def frozen(value: float):
        module = fake_module()
        module.policy.bias.requires_grad_(False).fill_(value)
        return module

    train(frozen(1.0), [CheckpointContents(str(tmp_path / "c"))], steps=3)
    with pytest.raises(DataError, match="frozen weights, which come from model"):
        train(frozen(2.0), [CheckpointContents(str(tmp_path / "d"))], 4, tmp_path / "c" / "step_00000003")


# ---------------------------------------------------------------------------------------- SLURM


class Announce(RLCallback):
    """SLURM's announcement that the time is up, in the middle of a step."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step + 1 == 3:
            os.kill(os.getpid(), signal.SIGUSR1)


@pytest.mark.field("ckpt/9")
def test_slurms_signal_saves_ends_and_requeues_the_job(train, fake_module, tmp_path, monkeypatch, capsys):
    called, stand_in = tmp_path / "called", tmp_path / "bin" / "scontrol"
    stand_in.parent.mkdir()
    stand_in.write_text(f'#!/bin/sh\necho "$@" > {called}\n')
    stand_in.chmod(stand_in.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{stand_in.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    before = signal.getsignal(signal.SIGUSR1)
    callback = CheckpointContents(str(tmp_path / "c"), save_freq=100)
    train(fake_module(), [callback, Announce()], steps=100)
    assert steps_in(tmp_path / "c") == [3] and callback.stopped_by_signal
    assert called.read_text() == "requeue 77\n" and "SIGUSR1: saving step 3" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGUSR1) == before


def test_outside_slurm_only_sigterm_is_listened_to():
    before = signal.getsignal(signal.SIGUSR1)
    signals = StopSignals()
    signals.install()
    assert signal.getsignal(signal.SIGUSR1) == before and signal.getsignal(signal.SIGTERM) == signals._note
    signals.restore()


# ---------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"save_every_minutes": 0}, r"checkpoint\.save_every_minutes must be null or > 0"),
        ({"load_best_model_at_end": True}, r"load_best_model_at_end needs checkpoint\.monitor"),
        ({"del_local_ckpt_after_load": True}, r"needs checkpoint\.default_hdfs_dir"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(settings, message):
    with pytest.raises(ConfigError, match=message):
        CheckpointContents("checkpoints", **settings)
