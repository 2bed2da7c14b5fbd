"""Scores a parquet file of responses: `python -m lit_rl.evaluate data.path=responses.parquet`.

A row holds a prompt, its source and reference answer, and a list of responses. Keys stand in
`conf/evaluate.yaml`; `data.compare=other.parquet` scores a second file of the same rows and says whether the
difference is more than chance. Prints a table and writes `data.path` with the ending `.scores.json`.
"""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lit_rl.configuration.build import built
from lit_rl.configuration.compose import Source, compose
from lit_rl.data.parquet import open_rows
from lit_rl.errors import ConfigError, DataError
from lit_rl.functional.evaluation import Interval, bootstrap_mean, majority_at_k, pass_at_k
from lit_rl.rewards.base import RewardSum, Sample
from lit_rl.rewards.reward import Reward

RIGHT = 1.0 - 1e-6
MAJORITY_DRAWS = 200


@dataclass(frozen=True)
class Responses:
    """A file of responses, and the names of its columns (source: verl's `evaluation.yaml`).

    Args:
        path: parquet file.
        compare: a second file of the same rows.
        prompt_key: text or messages.
        response_key: list of texts.
        data_source_key: source of the row.
        reward_model_key: struct with `ground_truth`.
    """

    path: str | None = None
    compare: str | None = None
    prompt_key: str = "prompt"
    response_key: str = "responses"
    data_source_key: str = "data_source"
    reward_model_key: str = "reward_model"

    def __post_init__(self) -> None:
        if not isinstance(self.path, str):
            raise ConfigError(f"data.path must be a parquet file of responses (found {self.path!r}).")


@dataclass(frozen=True)
class Scored:
    """Scores of one prompt.

    Attributes:
        source: of the row.
        scores: one per response, NaN where no reward applied.
        answers: what the verifier read as the answer, None where it has no such notion or found none.
    """

    source: str
    scores: list[float]
    answers: list[str | None]

    @property
    def is_right(self) -> list[bool]:
        return [score >= RIGHT for score in self.scores]


def scored_rows(path: str, columns: Responses, reward: RewardSum) -> list[Scored]:
    """Score every response of a file.

    Args:
        path: parquet file.
        columns: names.
        reward: scores.

    Raises:
        DataError: a column is missing, or a row holds no list of texts.
    """
    needed = [
        columns.prompt_key,
        columns.response_key,
        columns.data_source_key,
        columns.reward_model_key,
    ]
    rows = open_rows(path, key="data.path", required=needed)
    found = []
    for index in range(len(rows)):
        row = rows[index]
        responses = row[columns.response_key]
        if not isinstance(responses, list) or not responses or not all(isinstance(r, str) for r in responses):
            raise DataError(
                f"{rows.where(index)}, column {columns.response_key!r} must hold a list of texts (found "
                f"{str(responses)[:60]!r}); name the column by data.response_key."
            )
        samples = [
            Sample(
                prompt=row[columns.prompt_key],
                completion=response,
                columns=row,
                data_source_key=columns.data_source_key,
                reward_model_key=columns.reward_model_key,
            )
            for response in responses
        ]
        scores = reward(samples).rewards.tolist()
        answers = [_answer(reward, sample) for sample in samples]
        found.append(Scored(str(row[columns.data_source_key]), scores, answers))
    return found


def report(rows: Sequence[Scored], *, seed: int) -> dict[str, dict[str, Any]]:
    """Mean score, accuracy, pass@k and maj@k of each source and of all rows ("all" comes last).

    k runs over the powers of 2 up to the least number of responses of a prompt. Each number is a mean over
    prompts with its bootstrap interval.

    Args:
        rows: scored prompts.
        seed: of resamples.
    """
    sources = sorted({row.source for row in rows})
    groups = {source: [row for row in rows if row.source == source] for source in sources}
    if len(sources) > 1:
        groups["all"] = list(rows)
    return {name: _numbers(group, seed) for name, group in groups.items()}


def comparison(rows: Sequence[Scored], others: Sequence[Scored], *, seed: int) -> dict[str, Any]:
    """Difference of the mean score between two files of the same prompts, row by row.

    Raises:
        DataError: the files have different rows.
    """
    if [row.source for row in rows] != [other.source for other in others]:
        raise DataError(
            f"data.compare must hold the same rows in the same order as data.path (found {len(others)} rows "
            f"and {len(rows)}, or other sources)."
        )
    differences = torch.tensor(
        [_mean(row.scores) - _mean(other.scores) for row, other in zip(rows, others, strict=True)]
    )
    interval = bootstrap_mean(differences, seed=seed)
    verdict = "no difference shown"
    if interval.low > 0:
        verdict = "data.path is better"
    elif interval.high < 0:
        verdict = "data.compare is better"
    return {"difference": interval._asdict(), "verdict": verdict}


def table(numbers: dict[str, dict[str, Any]]) -> str:
    """The report as a markdown table."""
    names = list(dict.fromkeys(name for row in numbers.values() for name in row))
    lines = [f"| source | {' | '.join(names)} |", f"|{' --- |' * (len(names) + 1)}"]
    for source, row in numbers.items():
        cells = [_cell(row.get(name)) for name in names]
        lines.append(f"| {source} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str], conf: Path) -> dict[str, Any]:
    """Compose, score, print and write.

    Args:
        arguments: `key=value`, as for train.py.
        conf: folder of yaml files.

    Returns:
        What was written.

    Raises:
        ConfigError: a key that does not exist, or no file.
        DataError: a row that cannot be scored.
    """
    tree = compose(Source(conf, "evaluate"), list(arguments)).tree
    reward: RewardSum = built(tree["reward"])
    data: Responses = built(tree["data"])
    assert data.path is not None
    rows = scored_rows(data.path, data, reward)
    found: dict[str, Any] = {"data.path": data.path, "scores": report(rows, seed=tree["seed"])}
    print(table(found["scores"]))
    if data.compare is not None:
        others = scored_rows(data.compare, data, reward)
        found["comparison"] = {
            "data.compare": data.compare,
            **comparison(rows, others, seed=tree["seed"]),
        }
        interval = found["comparison"]["difference"]
        print(
            f"\ndifference {interval['mean']:+.4f} (95 % interval {interval['low']:+.4f} to "
            f"{interval['high']:+.4f}): {found['comparison']['verdict']}"
        )
    _write(Path(data.path).with_suffix(".scores.json"), found)
    return found


def _numbers(rows: Sequence[Scored], seed: int) -> dict[str, Any]:
    drawn = min(len(row.scores) for row in rows)
    numbers: dict[str, Any] = {"prompts": len(rows), "responses": sum(len(row.scores) for row in rows)}

    def mean_of(values: list[float]) -> dict[str, float]:
        interval: Interval = bootstrap_mean(torch.tensor(values), seed=seed)
        return interval._asdict()

    numbers["mean"] = mean_of([_mean(row.scores) for row in rows])
    has_answers = any(answer is not None for row in rows for answer in row.answers)
    k = 1
    while k <= drawn:
        right = [(sum(row.is_right), len(row.scores)) for row in rows]
        numbers[f"pass@{k}"] = mean_of([pass_at_k(c, n, k) for c, n in right])
        if has_answers and k > 1:
            numbers[f"maj@{k}"] = mean_of(
                [majority_at_k(row.answers, row.is_right, k, draws=MAJORITY_DRAWS, seed=seed) for row in rows]
            )
        k *= 2
    return numbers


def _mean(scores: list[float]) -> float:
    """Mean of the scores that exist, 0 without any."""
    known = [score for score in scores if score == score]
    return sum(known) / len(known) if known else 0.0


def _answer(reward: RewardSum, sample: Sample) -> str | None:
    function: Reward = next(iter(reward.functions.values()))
    return function.answer(sample)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, dict):
        return f"{value['mean']:.3f} ({value['low']:.3f} to {value['high']:.3f})"
    return str(value)


def _write(path: Path, found: dict[str, Any]) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    os.replace(temporary, path)
    print(f"\nWrote {path}")


if __name__ == "__main__":
    from importlib.resources import files

    from lit_rl.configuration.report import print_user_error, user_error

    try:
        main(sys.argv[1:], Path(str(files("lit_rl.conf"))))
    except Exception as error:
        mistake = user_error(error)
        if mistake is None:
            raise
        print_user_error(mistake, full_trace=False)
        sys.exit(2)
