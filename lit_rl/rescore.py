"""Scores dumped rollouts again: `python -m lit_rl.rescore RUN_DIR ...`; `--show` prints them.

Reads the files that the callback `rollout_dump` wrote (`callbacks=[default,rollout_dump]`), calls the reward
of `conf/evaluate.yaml` or another one on every row, and prints old and new reward by step. With the run's own
reward the numbers are the same bit for bit.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from lit_rl.configuration.build import built
from lit_rl.configuration.compose import Source, compose
from lit_rl.configuration.report import print_user_error, user_error
from lit_rl.errors import DataError
from lit_rl.rewards.base import RewardSum, Sample


def dumped_steps(folder: Path) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """(step, rows) of each dumped step, the rows of all ranks in the order of prompts.

    Args:
        folder: `rollouts` of a run.

    Raises:
        DataError: there are no such files.
    """
    steps: dict[int, list[Path]] = {}
    for file in sorted(folder.glob("step_*")):
        if file.suffix in (".jsonl", ".parquet"):
            steps.setdefault(int(file.name[5:13]), []).append(file)
    if not steps:
        raise DataError(
            f"{folder} holds no dumped rollouts; train with 'callbacks=[default,rollout_dump]' first."
        )
    for step, parts in sorted(steps.items()):
        yield step, [row for part in parts for row in _rows(part)]


def rescored(rows: Sequence[dict[str, Any]], reward: RewardSum, keys: dict[str, str]) -> list[float]:
    """New rewards of dumped rows, NaN where no function applied.

    Args:
        rows: of one step.
        reward: scores.
        keys: `prompt_key`, `data_source_key` and `reward_model_key`.
    """
    samples = [
        Sample(
            prompt=row["columns"].get(keys["prompt_key"]),
            completion=row["completion"],
            completion_ids=row["completion_ids"],
            columns=row["columns"],
            finish_reason=row["finish_reason"],
            data_source_key=keys["data_source_key"],
            reward_model_key=keys["reward_model_key"],
        )
        for row in rows
    ]
    return reward(samples).rewards.tolist()


def shown(row: dict[str, Any]) -> str:
    """One row for reading."""
    lines = [
        f"--- step {row['step']}, data row {row['prompt_row']}, generation {row['generation']}, "
        f"policy version {row['policy_version']}",
        row["prompt"],
        f">>> {row['completion']}",
        f"    reward {row['reward']}, advantage {row['advantage']}, {row['finish_reason']}, "
        f"{row['length']} tokens",
    ]
    if row["feedback"]:
        lines.append(f"    feedback: {row['feedback']}")
    if row["teacher_prompt"]:
        lines.append(f"    teacher: {row['teacher_prompt']!r}")
    return "\n".join(lines)


def main(arguments: Sequence[str], conf: Path) -> list[tuple[int, float, float]]:
    """Print old and new mean reward by step, or the rows.

    Args:
        arguments: the command line.
        conf: folder of yaml files.

    Returns:
        (step, old mean, new mean) of each step; empty with --show.
    """
    parser = argparse.ArgumentParser(prog="python -m lit_rl.rescore", description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("overrides", nargs="*", help="key=value, as for lit_rl.evaluate")
    parser.add_argument("--show", action="store_true", help="print the rows instead")
    given = parser.parse_args(arguments)
    steps = dumped_steps(given.run_dir / "rollouts")
    if given.show:
        for _, rows in steps:
            print(*map(shown, rows), sep="\n")
        return []
    tree = compose(Source(conf, "evaluate"), given.overrides).tree
    reward: RewardSum = built(tree["reward"])
    found = []
    print(
        "| step | rows | reward in the run | reward now | rows that differ |\n| --- | --- | --- | --- | --- |"
    )
    for step, rows in steps:
        old = [row["reward"] for row in rows]
        new = [None if value != value else value for value in rescored(rows, reward, tree["data"])]
        differ = sum(a != b for a, b in zip(old, new, strict=True))
        found.append((step, _mean(old), _mean(new)))
        print(f"| {step} | {len(rows)} | {found[-1][1]:.4f} | {found[-1][2]:.4f} | {differ} |")
    return found


def _rows(file: Path) -> list[dict[str, Any]]:
    if file.suffix == ".jsonl":
        return [json.loads(line) for line in file.read_text("ascii").splitlines()]
    return [{**row, "columns": json.loads(row["columns"])} for row in pq.read_table(file).to_pylist()]


def _mean(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / max(len(known), 1)


if __name__ == "__main__":
    try:
        main(sys.argv[1:], Path(str(files("lit_rl.conf"))))
    except Exception as error:
        mistake = user_error(error)
        if mistake is None:
            raise
        print_user_error(mistake, full_trace=False)
        sys.exit(2)
