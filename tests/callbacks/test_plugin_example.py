"""The documented plug-in: loaded by a dotted path, called at its event, skipped by the others."""

import json
from pathlib import Path

import lightning as L
import torch
from hydra.utils import instantiate

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
