"""Makes everything in this folder again: `python -m lit_rl.assets.build`, in a clone, some 45 minutes
on one core.

1. tokenizer, shape and seeded initial weights    -> WORK/initial
2. chats of the two stages, in order              -> WORK/pretraining.parquet, WORK/balance.parquet
3. python train.py algo=sft data=chat_sft ...     -> WORK/pretraining, then from there WORK/balance: the
                                                     project's own supervised training
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
from lit_rl.assets.pretraining import Stage

CLONE = FOLDER.parents[1]
MICRO_BATCH_TOKENS = 4096


def train_command(work: Path, stage: Stage, model: Path) -> list[str]:
    """A supervised run; one step learns one block of `pretraining.ROWS_PER_STEP` rows.

    Args:
        work: folder with the stage's chats.
        stage: which.
        model: folder that it starts from.
    """
    settings = {
        "algo": "sft",
        "data": "chat_sft",
        "data.train_files": work / f"{stage.name}.parquet",
        "data.train_batch_size": pretraining.ROWS_PER_STEP,
        "data.shuffle": "false",
        "data.max_length": 256,
        "model": "hf",
        "model.path": model,
        "model.gradient_checkpointing": "false",
        "algo.batch.micro_batch_size": "null",
        "algo.batch.micro_batch_tokens": MICRO_BATCH_TOKENS,
        "algo.max_grad_norm": 1.0,
        "optim.lr": stage.lr,
        "optim.betas": "[0.9,0.98]",
        "optim.weight_decay": 0.01,
        "schedule.lr_scheduler_type": "cosine",
        "schedule.lr_warmup_steps": 60,
        "schedule.min_lr_ratio": 0.03,
        "trainer.max_steps": stage.steps,
        "trainer.val_check_interval": 0,
        "checkpoint.save_contents": "[model,hf_model]",
        "checkpoint.save_freq": -1,
        "checkpoint.resume_mode": "disable",
        "logger": "none",
        "seed": arithmetic.SEED,
        "run_dir": work / stage.name,
    }
    return [sys.executable, "train.py", *(f"{key}={value}" for key, value in settings.items())]


def prepare(work: Path) -> Path:
    """Write what the runs start from: tokenizer, initial weights, chats.

    Returns:
        Folder of the initial model.
    """
    initial = work / "initial"
    tiny_model.tokenizer().save_pretrained(initial)
    torch.manual_seed(arithmetic.SEED)
    LlamaForCausalLM(tiny_model.model_config()).save_pretrained(initial)
    for stage in pretraining.STAGES:
        pretraining.write_chats(work / f"{stage.name}.parquet", stage)
    return initial


def trained(work: Path, stage: Stage, model: Path) -> Path:
    """Run a stage.

    Returns:
        Folder of its Hugging Face export.
    """
    shutil.rmtree(work / stage.name, ignore_errors=True)
    command = train_command(work, stage, model)
    print(" ".join(command), flush=True)
    one_thread = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}  # sums in one order
    subprocess.run(command, cwd=CLONE, check=True, env={**os.environ, **one_thread})
    return max((work / stage.name / "checkpoints").glob("step_*/hf"))


def publish(export: Path) -> dict:
    """Replace the files of this folder by the trained weights and the questions that go with them.

    Args:
        export: folder of a Hugging Face export.

    Returns:
        What was measured, also written to `tiny/measured.json`.
    """
    model, tokenizer = load(str(export))
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
    parser.add_argument("--first-stage", type=Path, help="this export instead of the first stage's run")
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    work = arguments.work.resolve()
    shutil.rmtree(work / "initial", ignore_errors=True)
    export = prepare(work)
    for stage in pretraining.STAGES:
        is_given = stage is pretraining.LEARN and arguments.first_stage is not None
        export = arguments.first_stage if is_given else trained(work, stage, export)
    found = publish(export)
    print(json.dumps(found, indent=1))
    raise SystemExit(1 if found["misses"] else 0)


if __name__ == "__main__":
    main()
