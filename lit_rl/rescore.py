"""Scores dumped rollouts again: `python -m lit_rl.rescore RUN_DIR ...`; `--show` prints them.

Reads the files that the callback `rollout_dump` wrote (`callbacks=[default,rollout_dump]`), calls the reward
of `conf/evaluate.yaml` or another one on every row, estimates the advantages as the run did or with
`--estimator`, and prints old and new by step. With the run's own reward and estimator the numbers are the
same bit for bit. A KL in the reward and a critic's values are in no dump: advantages that need them are left
out.
"""

import argparse
import json
import math
import re
import sys
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq
import torch
import yaml

from lit_rl.batch import length_mask
from lit_rl.configuration.build import built
from lit_rl.configuration.compose import Source, compose
from lit_rl.configuration.report import print_user_error, user_error
from lit_rl.errors import DataError
from lit_rl.objectives.advantage import Advantage, ScoredRows
from lit_rl.rewards.base import RewardSum, Sample


def dumped_steps(folder: Path) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """(step, rows) of each dumped step, the rows of all ranks in the order of prompts.

    Args:
        folder: `rollouts` of a run.

    Raises:
        DataError: there are no such files.
    """
    steps: dict[int, list[Path]] = {}
    for file in sorted(folder.glob("step_*"), key=_place):
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
            prompt=row.get("opening") or row["columns"].get(keys["prompt_key"]),
            completion=row["completion"],
            completion_ids=row["completion_ids"],
            columns=row["columns"],
            finish_reason=row["finish_reason"],
            prompt_ids=row["prompt_ids"],
            row=row["prompt_row"],
            data_source_key=keys["data_source_key"],
            reward_model_key=keys["reward_model_key"],
            messages=row.get("messages") or [],
            environment_reward=row.get("environment_reward"),
        )
        for row in rows
    ]
    return reward(samples).rewards.tolist()


class Rescored(NamedTuple):
    """One step, scored again.

    Attributes:
        step: of the run.
        rows: of the step.
        old: mean reward in the run.
        new: mean reward now.
        differ: rows whose reward differs.
        advantages_differ: rows whose advantage differs; None where there is none to compare.
    """

    step: int
    rows: int
    old: float
    new: float
    differ: int
    advantages_differ: int | None


def estimated(
    rows: Sequence[dict[str, Any]], rewards: Sequence[float], advantage: Advantage, *, mask_truncated: bool
) -> list[float | None]:
    """Advantage of each row, or the mean of its tokens' advantages.

    Args:
        rows: of one step, those of a prompt adjacent.
        rewards: of the rows, NaN where there is none.
        advantage: estimator.
        mask_truncated: rows cut at the length limit do not count, as in the run.
    """
    lengths = torch.tensor([len(row["completion_ids"]) for row in rows])
    totals = torch.tensor(rewards, dtype=torch.float32)
    counts = ~totals.isnan()
    if mask_truncated:
        counts &= torch.tensor([row["finish_reason"] != "length" for row in rows])
    own = length_mask(lengths, int(lengths.max()))
    for row, places in enumerate(row.get("foreign") or [] for row in rows):
        own[row, places] = False
    mask = own & counts[:, None]
    baselines = torch.tensor([_number(row.get("baseline")) for row in rows])
    scored = ScoredRows(totals, lengths, mask, torch.zeros(mask.shape), baselines, own.sum(1))
    found = advantage(scored, 1 + max(row["generation"] for row in rows))
    return [
        value if math.isfinite(value) else None
        for value in (
            float(credit if credit.dim() == 0 else credit[is_own].mean())
            for credit, is_own in zip(found, own, strict=True)
        )
    ]


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


def main(arguments: Sequence[str], conf: Path) -> list[Rescored]:
    """Print old and new rewards and advantages by step, or the rows.

    Args:
        arguments: the command line.
        conf: folder of yaml files.

    Returns:
        What came of each step; empty with --show.
    """
    parser = argparse.ArgumentParser(prog="python -m lit_rl.rescore", description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("overrides", nargs="*", help="key=value, as for lit_rl.evaluate")
    parser.add_argument("--estimator", help="another algo.advantage.adv_estimator than the run's")
    parser.add_argument("--show", action="store_true", help="print the rows instead")
    given = parser.parse_args(arguments)
    steps = dumped_steps(given.run_dir / "rollouts")
    if given.show:
        for _, rows in steps:
            print(*map(shown, rows), sep="\n")
        return []
    tree = compose(Source(conf, "evaluate"), given.overrides).tree
    reward: RewardSum = built(tree["reward"])
    reward.to_(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    algo = _settings(given.run_dir)
    advantage = _estimator(algo, given.estimator)
    found = []
    print("| step | rows | reward in the run | reward now | rows that differ | advantages that differ |")
    print("| --- | --- | --- | --- | --- | --- |")
    for step, rows in steps:
        old = [row["reward"] for row in rows]
        rewards = rescored(rows, reward, tree["data"])
        new = [None if value != value else value for value in rewards]
        others = None
        if advantage is not None and any(row["advantage"] is not None for row in rows):
            truncated = bool(algo.get("mask_truncated_completions"))
            now = estimated(rows, rewards, advantage, mask_truncated=truncated)
            others = _differ([row["advantage"] for row in rows], now)
        done = Rescored(step, len(rows), _mean(old), _mean(new), _differ(old, new), others)
        found.append(done)
        last = "" if others is None else others
        print(f"| {step} | {len(rows)} | {done.old:.4f} | {done.new:.4f} | {done.differ} | {last} |")
    return found


def _settings(run_dir: Path) -> dict[str, Any]:
    """`algo` of the run; nothing where the run left no configuration."""
    file = run_dir / "config.yaml"
    return yaml.safe_load(file.read_text("utf-8"))["algo"] if file.is_file() else {}


def _estimator(algo: dict[str, Any], name: str | None) -> Advantage | None:
    """The run's estimator, or another with its settings; None where a dump does not hold what it needs."""
    node = {key: value for key, value in (algo.get("advantage") or {}).items() if key != "_target_"}
    advantage = Advantage(**{**node, **({} if name is None else {"adv_estimator": name})})
    has_penalty = (algo.get("kl") or {}).get("use_kl_in_reward", False)
    return None if advantage.adv_estimator == "gae" or has_penalty else advantage


def _place(file: Path) -> tuple[str, int]:
    """Step, and number of the rank."""
    rank = re.search(r"\.rank(\d+)\.", file.name)
    return file.name[:13], int(rank[1]) if rank else 0


def _differ(old: Sequence[float | None], new: Sequence[float | None]) -> int:
    return sum(a != b for a, b in zip(old, new, strict=True))


def _number(value: float | None) -> float:
    return math.nan if value is None else value


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
