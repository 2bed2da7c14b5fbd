"""Plug-ins: by dotted path, by file, by entry point; called at their event, skipped by the others."""

import json
from pathlib import Path

import lightning as L
import pytest
import torch
from hydra.utils import instantiate

from lit_rl.callbacks.plugins import from_file
from lit_rl.configuration.build import built
from lit_rl.configuration.compose import Source
from lit_rl.configuration.job import checked
from lit_rl.errors import ConfigError
from lit_rl.hooks import emit


def test_a_plug_in_is_one_key_on_the_command_line(train, fake_module, tmp_path, composed, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    config = composed(
        "+callbacks.mine._target_=plugin_example.TeacherContextLog",
        f"+callbacks.mine.path={tmp_path / 'teacher.jsonl'}",
    )
    plugin = instantiate(config.callbacks.mine, _convert_="all")
    module = fake_module()

    class Teach(L.Callback):
        """Raises the event where SDPO would; has no handler for it itself."""

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            emit(
                pl_module,
                "on_teacher_context_built",
                teacher_input_ids=torch.ones(2, 5, dtype=torch.long),
                teacher_attention_mask=torch.tensor([[0, 1, 1, 1, 1], [0, 0, 1, 1, 1]]),
                completion_mask=torch.ones(2, 2, dtype=torch.bool),
                self_distillation_mask=torch.tensor([True, False]),
            )

    train(module, [Teach(), plugin], steps=2)
    rows = [json.loads(line) for line in (tmp_path / "teacher.jsonl").read_text().splitlines()]
    assert rows == [{"step": s, "rows_with_teacher": 1, "longest": 4} for s in (1, 2)]


def test_a_file_s_class_is_a_callback_and_a_wrong_one_is_named(tmp_path):
    made = from_file(str(FILE), "TeacherContextLog", {"path": str(tmp_path / "teacher.jsonl")})
    assert isinstance(made, L.Callback) and made.path == tmp_path / "teacher.jsonl"
    for path, name, message in (
        (tmp_path / "none.py", "Mine", "does not exist"),
        (FILE, "Teacher", "raised AttributeError"),
        (FILE, "Path", "must be a callback"),
    ):
        with pytest.raises(ConfigError, match=message):
            from_file(str(path), name)


def test_a_file_is_two_keys_on_the_command_line(train, fake_module, tmp_path):
    (tmp_path / "count.py").write_text(COUNTING)
    words = ["algo=grpo", "callbacks=[default,from_file]", f"run_dir={tmp_path}"]
    words += [f"callbacks.from_file.path={tmp_path / 'count.py'}", "callbacks.from_file.name=Count"]
    plugin = built(checked(Source(FILE.parents[2] / "conf"), words).tree["callbacks"]["from_file"])
    train(fake_module(), [plugin], steps=3)
    assert plugin.steps == [1, 2, 3]


def test_an_installed_package_brings_its_callback_by_entry_point(train, fake_module, tmp_path, monkeypatch):
    """As pip leaves it: a module, and a folder that says what the package offers."""
    (tmp_path / "count.py").write_text(COUNTING + "\n\ndef made():\n    return [Count()]\n")
    info = tmp_path / "count-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: count\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[lightning.pytorch.callbacks_factory]\ncount = count:made\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    trainer = train(fake_module(), [], steps=2)
    counts = [callback for callback in trainer.callbacks if type(callback).__name__ == "Count"]
    assert counts[0].steps == [1, 2]


COUNTING = """
import lightning as L


class Count(L.Callback):
    def __init__(self):
        self.steps = []

    def on_update_end(self, trainer, pl_module, *, step, **payload):
        self.steps.append(step)
"""
FILE = Path(__file__).with_name("plugin_example.py")
