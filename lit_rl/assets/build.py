"""Makes everything in this folder again: `python -m lit_rl.assets.build`, in a clone, some 20 minutes
on one core.

1. tokenizer, shape and seeded initial weights    -> WORK/initial
2. pre-training chats, in order                   -> WORK/chats.parquet
3. python train.py algo=sft data=chat_sft ...     -> WORK/run, the project's own supervised training
4. questions for training, validation, discovery  -> *.parquet here
5. weights, and what was measured on them         -> tiny/ here

Every draw is seeded and one thread computes. The weights depend on the machine's float32 kernels:
`tiny/measured.json` holds their hash, and a second build on one machine gives the same.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from transformers import LlamaForCausalLM
from transformers.utils import logging

from lit_rl.assets import arithmetic, pretraining, tiny_model
from lit_rl.assets.measure import FOLDER, hard_questions, load, report

CLONE = FOLDER.parents[1]
MICRO_BATCH_TOKENS = 4096


def train_command(work: Path, steps: int) -> list[str]:
    """The supervised run; one step learns one block of `pretraining.ROWS_PER_STEP` rows.

    Args:
        work: folder with `initial` and `chats.parquet`.
        steps: optimizer steps.
    """
    settings = {
        "algo": "sft",
        "data": "chat_sft",
        "data.train_files": work / "chats.parquet",
        "data.train_batch_size": pretraining.ROWS_PER_STEP,
        "data.shuffle": "false",
        "data.max_length": 128,
        "model": "hf",
        "model.path": work / "initial",
        "model.gradient_checkpointing": "false",
        "algo.batch.micro_batch_size": "null",
        "algo.batch.micro_batch_tokens": MICRO_BATCH_TOKENS,
        "algo.max_grad_norm": 1.0,
        "optim.lr": 1.2e-3,
        "optim.betas": "[0.9,0.98]",
        "optim.weight_decay": 0.01,
        "schedule.lr_scheduler_type": "cosine",
        "schedule.lr_warmup_steps": 60,
        "schedule.min_lr_ratio": 0.03,
        "trainer.max_steps": steps,
        "trainer.val_check_interval": 0,
        "checkpoint.save_contents": "[model,hf_model]",
        "checkpoint.save_freq": -1,
        "checkpoint.resume_mode": "disable",
        "logger": "none",
        "seed": arithmetic.SEED,
        "run_dir": work / "run",
    }
    return [sys.executable, "train.py", *(f"{key}={value}" for key, value in settings.items())]


def prepare(work: Path, steps: int) -> None:
    """Write what the run starts from: tokenizer, initial weights, chats."""
    initial = work / "initial"
    tiny_model.tokenizer().save_pretrained(initial)
    torch.manual_seed(arithmetic.SEED)
    LlamaForCausalLM(tiny_model.model_config()).save_pretrained(initial)
    pretraining.write_chats(work / "chats.parquet", steps)


def publish(trained: Path) -> dict:
    """Replace the files of this folder by the trained weights and the questions that go with them.

    Args:
        trained: folder of a Hugging Face export.

    Returns:
        What was measured, also written to `tiny/measured.json`.
    """
    model, tokenizer = load(str(trained))
    target = FOLDER / "tiny"
    model.save_pretrained(target)
    tiny_model.tokenizer().save_pretrained(target)
    weights = target / "model.safetensors"
    weights.chmod(0o644)
    questions = arithmetic.splits()
    questions["hard"] = hard_questions(model, tokenizer)
    for split, chosen in questions.items():
        arithmetic.write_split(FOLDER / f"{split}.parquet", split, chosen)
    found = {"sha256": hashlib.sha256(weights.read_bytes()).hexdigest(), **report(str(target))}
    (target / "measured.json").write_text(json.dumps(found, indent=1) + "\n")
    return found


def main() -> None:
    """Build, and print what was measured; exit with 1 when something is out of its range."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, default=CLONE / "outputs" / "embedded", help="scratch folder")
    parser.add_argument("--steps", type=int, default=pretraining.STEPS, help="optimizer steps")
    parser.add_argument("--trained", type=Path, help="skip the run: publish this Hugging Face export")
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    trained = arguments.trained
    if trained is None:
        work = arguments.work.resolve()
        for part in ("initial", "run"):
            shutil.rmtree(work / part, ignore_errors=True)
        prepare(work, arguments.steps)
        command = train_command(work, arguments.steps)
        print(" ".join(command), flush=True)
        one_thread = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}  # sums in one order
        subprocess.run(command, cwd=CLONE, check=True, env={**os.environ, **one_thread})
        trained = max((work / "run" / "checkpoints").glob("step_*/hf"))
    found = publish(trained)
    print(json.dumps(found, indent=1))
    raise SystemExit(1 if found["misses"] else 0)


if __name__ == "__main__":
    main()
