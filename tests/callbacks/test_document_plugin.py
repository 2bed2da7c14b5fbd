"""Every event of README's table comes, in its order, with what the table says it brings."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lit_rl.hooks import EVENTS

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ORDER = [  # in a step
    "on_generation_prompts_selected",
    "on_generation_batch_built",
    "on_rollout_scored",
    "on_teacher_context_built",
    "on_self_distillation_batch_prepared",
    "on_update_end",
]


def test_the_table_names_every_event() -> None:
    table = (ROOT / "README.md").read_text()
    assert set(re.findall(r"^\| `(on_\w+)` \|", table, re.MULTILINE)) == set(EVENTS)
    assert set(EVENTS) == {*ORDER, "on_checkpoint_saved"}


@pytest.mark.slow
def test_a_plug_in_written_from_the_table_hears_every_event(tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    words = (
        *("algo=sdpo", "debug=fast", "data.train_batch_size=4", "algo.num_iterations=2"),
        *("algo.batch.micro_batch_size=8", "trainer.max_steps=2", "val_before_train=false"),
        "+callbacks.mine._target_=document_plugin.EventLog",
        f"+callbacks.mine.path={log}",
        f"run_dir={tmp_path / 'run'}",
    )
    environment = {**os.environ, "PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "train.py", *words], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["event"] for line in lines] == ORDER * (len(lines) // len(ORDER)) and lines
    _, built, _, context, prepared, _ = lines[: len(ORDER)]
    assert built["generate_every"] == built["steps"] == "int"
    rows, completion = prepared["completion_ids"]
    assert rows == 16 and prepared["prompt_ids"][0] == rows
    assert prepared["old_per_token_logps"] == context["completion_mask"] == [rows, completion]
    assert context["teacher_input_ids"] == context["teacher_attention_mask"]
    assert context["teacher_input_ids"][1] > prepared["prompt_ids"][1] + completion - 1
    assert context["self_distillation_mask"] == prepared["self_distillation_mask"] == [rows]
