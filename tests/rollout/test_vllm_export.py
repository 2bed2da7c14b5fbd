"""What `python -m lit_rl.export` writes is what a plain vLLM loads, with the logits that transformers has."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).resolve().parents[2]
IDS = [5, 6, 7, 8, 9, 10]
PLAIN_VLLM = """
import json, sys
from vllm import LLM, SamplingParams
llm = LLM(model=sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=64, max_num_seqs=4, seed=0)
asked = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
(found,) = llm.generate([{"prompt_token_ids": json.loads(sys.argv[2])}], asked, use_tqdm=False)
logps = [entry[token].logprob for entry, token in zip(found.prompt_logprobs, found.prompt_token_ids) if entry]
print("LOGPS", json.dumps(logps))
"""


def run(*words: str | Path, **environment: str) -> str:
    quiet = {"OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    done = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT, env={**os.environ, **quiet, **environment}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def test_a_lora_run_merged(tmp_path: Path) -> None:
    train = ("algo=grpo", "debug=fast", "model.lora.lora_rank=2", "optim.lr=1e-2", "trainer.max_steps=2")
    run("train.py", *train, f"run_dir={tmp_path / 'run'}")
    out = tmp_path / "out"
    run("-m", "lit_rl.export", tmp_path / "run/checkpoints/step_00000002", out)
    printed = run("-c", PLAIN_VLLM, out, json.dumps(IDS), VLLM_LOGGING_LEVEL="ERROR")
    found = json.loads(printed.rpartition("LOGPS ")[2])
    with torch.no_grad():
        logps = AutoModelForCausalLM.from_pretrained(out)(torch.tensor([IDS])).logits[0, :-1].log_softmax(-1)
    torch.testing.assert_close(
        torch.tensor(found), logps.gather(1, torch.tensor(IDS)[1:, None])[:, 0], atol=1e-4, rtol=0
    )
