"""A task for two turns: products that the embedded model cannot do in its head, and a calculator.

    python -m lit_rl.assets.calculator outputs/calculator

writes questions (`train.parquet`, `val.parquet`), chats that show the form of a call, and, by the project's
own supervised training on those, a model that mostly guesses and now and then calls (`model/`). All draws are
seeded. Then `python train.py experiment=calculator` with that model and those files teaches it to call.
"""

import argparse
import ast
import json
import operator
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from lit_rl.seeding import derived_seed

SEED = 0
NUM_TRAIN, NUM_VAL, NUM_CHATS = 500, 200, 12800
CALL_SHARE = 0.4
"""Share of the chats that call; the others guess."""
LONGEST = 60
"""Characters of an expression."""
_OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}


def calculator(expression: str) -> str:
    """The value of an arithmetic expression.

    Args:
        expression: numbers, + - * / and parentheses, such as 37*24
    """
    if len(expression) > LONGEST:
        raise ValueError(f"an expression has at most {LONGEST} characters")
    return f"{_value(ast.parse(expression.strip(), mode='eval').body):.12g}"


def _value(node: ast.AST) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.operand))
    raise ValueError("an expression holds numbers, + - * / and parentheses")


def call(a: int, b: int) -> str:
    """A call as a model has to write it."""
    asked = {"name": "calculator", "arguments": {"expression": f"{a}*{b}"}}
    return f"<tool_call>{json.dumps(asked)}</tool_call>"


def operands() -> dict[str, list[tuple[int, int]]]:
    """Pairs of 11..99 and 2..9, in either order, for "train", "val" and "chats", disjoint."""
    pairs = [pair for a in range(11, 100) for b in range(2, 10) for pair in ((a, b), (b, a))]
    random.Random(derived_seed(SEED, "calculator", "pairs")).shuffle(pairs)
    return {
        "train": pairs[:NUM_TRAIN],
        "val": pairs[NUM_TRAIN : NUM_TRAIN + NUM_VAL],
        "chats": pairs[NUM_TRAIN + NUM_VAL :],
    }


def question(a: int, b: int) -> dict[str, Any]:
    """A data row in verl's schema."""
    return {
        "data_source": "lit_rl/arithmetic_mul",
        "prompt": [{"role": "user", "content": f"{a}*{b}=?"}],
        "reward_model": {"style": "rule", "ground_truth": str(a * b)},
    }


def chats() -> list[dict[str, Any]]:
    """Rows of supervised training: `CALL_SHARE` of them call and repeat the answer, the rest guess."""
    rng, pairs = random.Random(derived_seed(SEED, "calculator", "chats")), operands()["chats"]
    out = []
    for _ in range(NUM_CHATS):
        a, b = rng.choice(pairs)
        turns = [f"{a}*{b}=?", str(rng.randrange(22, 892))]
        if rng.random() < CALL_SHARE:
            turns = [f"{a}*{b}=?", call(a, b), str(a * b), str(a * b)]
        roles = ("user", "assistant") * 2
        out.append({"messages": [{"role": r, "content": t} for r, t in zip(roles, turns, strict=False)]})
    return out


def train_command(folder: Path) -> list[str]:
    """The supervised run on the chats."""
    settings = {
        "algo": "sft",
        "data": "chat_sft",
        "data.train_files": folder / "chats.parquet",
        "data.train_batch_size": 64,
        "data.shuffle": "false",
        "data.max_length": 256,
        "model.gradient_checkpointing": "false",
        "algo.batch.micro_batch_size": "null",
        "algo.batch.micro_batch_tokens": 4096,
        "optim.lr": 1.5e-3,
        "schedule.lr_scheduler_type": "cosine",
        "schedule.lr_warmup_steps": 10,
        "trainer.max_steps": NUM_CHATS // 64,
        "trainer.val_check_interval": 0,
        "checkpoint.save_contents": "[model,hf_model]",
        "checkpoint.save_freq": -1,
        "checkpoint.resume_mode": "disable",
        "logger": "none",
        "seed": SEED,
        "run_dir": folder / "sft",
    }
    return [sys.executable, "train.py", *(f"{key}={value}" for key, value in settings.items())]


def main(arguments: Sequence[str]) -> None:
    """Write everything into a folder."""
    parser = argparse.ArgumentParser(prog="python -m lit_rl.assets.calculator", description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args(arguments).folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "val"):
        rows = [question(a, b) for a, b in operands()[split]]
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{split}.parquet")
    pq.write_table(pa.Table.from_pylist(chats()), folder / "chats.parquet")
    subprocess.run(train_command(folder), cwd=Path(__file__).parents[2], check=True)
    export = max((folder / "sft" / "checkpoints").glob("step_*/hf"))
    shutil.rmtree(folder / "model", ignore_errors=True)
    shutil.copytree(export, folder / "model")


if __name__ == "__main__":
    main(sys.argv[1:])
