"""RunSummary: exactly the documented keys, measured from the process's creation, and totals over a resume."""

import inspect
import json
import subprocess
import sys
import time

import pytest

from lit_rl.callbacks.checkpoint_contents import CheckpointContents
from lit_rl.callbacks.summary import PHASES, RunSummary, process_age

KEYS = [
    "algo",
    "seed",
    "steps",
    "optimizer_steps",
    "val_start",
    "val_end",
    "seconds_to_first_update",
    "seconds_total",
    "seconds",
    "tokens_generated",
    "tokens_per_second",
    "peak_rss_gb",
    "versions",
]


def read(folder) -> dict:
    return json.loads((folder / "summary.json").read_text())


def test_the_file_has_exactly_these_keys(train, fake_module, tmp_path):
    module = fake_module()
    module.clock.total["generate"] = 4.0
    train(module, [RunSummary(str(tmp_path / "r"))], steps=3)
    summary = read(tmp_path / "r")
    assert list(summary) == KEYS
    assert list(summary["seconds"]) == list(PHASES)
    assert (summary["algo"], summary["seed"]) == ("fakerlmodule", 7)
    assert (summary["steps"], summary["optimizer_steps"]) == (3, 3)
    assert summary["tokens_generated"] == 96 and summary["tokens_per_second"] == 24.0
    assert 0 < summary["seconds_to_first_update"] <= summary["seconds_total"]
    assert 0.05 < summary["peak_rss_gb"] < 50
    assert {"python", "torch", "lightning", "transformers", "lit_rl"} == set(summary["versions"])


def test_accuracy_by_source_at_the_start_and_at_the_end(train, fake_module, tmp_path):
    module, callback = fake_module(), RunSummary(str(tmp_path / "r"))
    module.val_accuracy = lambda step: 0.25 + 0.125 * step
    trainer = train(module, [callback], steps=2, val_check_interval=1)
    assert read(tmp_path / "r")["val_start"] == {}
    assert read(tmp_path / "r")["val_end"] == {"easy": 0.5}
    callback.val_start = {"easy": 0.25}
    module.val_accuracy = lambda step: 0.75
    trainer.validate(module, [module.policy.weight.detach().new_ones(1, 3)], verbose=False)
    assert read(tmp_path / "r")["val_start"] == {"easy": 0.25}
    assert read(tmp_path / "r")["val_end"] == {"easy": 0.75}


def test_validation_before_training_is_the_start(train, fake_module, tmp_path):
    module, callback = fake_module(), RunSummary(str(tmp_path / "r"))
    trainer = train(module, [callback], steps=0, val_check_interval=1)
    callback._has_trained = False
    trainer.validate(module, [module.policy.weight.detach().new_ones(1, 3)], verbose=False)
    assert callback.val_start == callback.val_end == {"easy": 0.5}


def test_nothing_is_written_without_training(train, fake_module, tmp_path):
    module = fake_module()
    trainer = train(module, [], steps=1)
    trainer.callbacks.append(RunSummary(str(tmp_path / "r")))
    trainer.validate(module, [module.policy.weight.detach().new_ones(1, 3)], verbose=False)
    assert not (tmp_path / "r").exists()


def test_totals_go_on_after_a_resume(train, fake_module, tmp_path):
    callbacks = [RunSummary(str(tmp_path / "a")), CheckpointContents(str(tmp_path / "c"))]
    first = fake_module()
    first.clock.total["generate"] = 100.0
    callbacks[0]._seconds_before = 1000.0
    train(first, callbacks, steps=3)
    folder = tmp_path / "c" / "step_00000003"
    train(
        fake_module(),
        [RunSummary(str(tmp_path / "b")), CheckpointContents(str(tmp_path / "d"))],
        5,
        folder,
    )
    summary = read(tmp_path / "b")
    assert summary["steps"] == summary["optimizer_steps"] == 5
    assert summary["tokens_generated"] == 5 * 32
    assert summary["seconds"]["generate"] >= 100
    assert summary["seconds_to_first_update"] == read(tmp_path / "a")["seconds_to_first_update"]
    assert 1000 < summary["seconds_total"] < 1200


def test_a_second_run_in_the_process_counts_from_the_end_of_the_first(train, fake_module, tmp_path):
    train(fake_module(), [RunSummary(str(tmp_path / "a"))], steps=1)
    time.sleep(0.05)
    start = process_age()
    callback = RunSummary(str(tmp_path / "b"))
    assert 0.05 <= callback.seconds_total < start
    assert callback.seconds_total == pytest.approx(process_age() - RunSummary._counted_until, abs=0.02)


def test_the_age_of_a_process_counts_from_its_creation_imports_included():
    imports = "import os, time\nfrom pathlib import Path\ntime.sleep(0.5)\n"
    code = f"{imports}{inspect.getsource(process_age)}print(process_age())"
    begin = time.monotonic()
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 0.5 < float(out.stdout) <= time.monotonic() - begin + 0.02
