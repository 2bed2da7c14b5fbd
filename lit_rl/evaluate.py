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
from lit_rl.functional.evaluation import bootstrap_mean, sign_flip_p
from lit_rl.rewards.base import RewardSum, Sample
from lit_rl.rewards.scored import Scored, by_source, prompt_numbers, scored

SIGNIFICANT = 0.05

ROWS_AT_ONCE = 64
"""Prompts that are scored together."""

DEFAULT_SOURCE = "all"


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


def scored_rows(path: str, columns: Responses, reward: RewardSum) -> tuple[list[Scored], list[str]]:
    """Score every response of a file.

    Args:
        path: parquet file.
        columns: names.
        reward: scores.

    Returns:
        The prompts in the order of the file, and what tells each from the others.

    Raises:
        DataError: a column is missing, or a row holds no list of texts.
    """
    source_key = columns.data_source_key
    named = [source_key] if source_key != Responses.data_source_key else []
    rows = open_rows(path, key="data.path", required=[columns.prompt_key, columns.response_key, *named])
    found: list[Scored] = []
    prompts: list[str] = []
    for start in range(0, len(rows), ROWS_AT_ONCE):
        part = [(i, rows[i]) for i in range(start, min(start + ROWS_AT_ONCE, len(rows)))]
        samples = [_samples(row, i, columns, rows.where(i)) for i, row in part]
        sources = [str(row.get(source_key) or DEFAULT_SOURCE) for _, row in part]
        together = [sample for own in samples for sample in own]
        found += scored(together, sources, [len(own) for own in samples], reward)[0]
        prompts += [repr((row[columns.prompt_key], row.get(columns.reward_model_key))) for _, row in part]
    return found, prompts


def _samples(row: dict[str, Any], index: int, columns: Responses, where: str) -> list[Sample]:
    responses = row[columns.response_key]
    if not isinstance(responses, list) or not responses or not all(isinstance(r, str) for r in responses):
        raise DataError(
            f"{where}, column {columns.response_key!r} must hold a list of texts (found "
            f"{str(responses)[:60]!r}); name the column by data.response_key."
        )
    return [
        Sample(
            prompt=row[columns.prompt_key],
            completion=response,
            columns=row,
            row=index,
            data_source_key=columns.data_source_key,
            reward_model_key=columns.reward_model_key,
        )
        for response in responses
    ]


def report(rows: Sequence[Scored], *, seed: int) -> dict[str, dict[str, Any]]:
    """Mean score, pass@k, maj@k and what the rewards counted, of each source and of all rows ("all" is last).

    Each number is a mean over prompts with its bootstrap interval; see `prompt_numbers`.

    Args:
        rows: scored prompts.
        seed: of resamples.
    """
    groups = by_source(rows)
    if len(groups) > 1:
        groups["all"] = list(rows)
    return {name: _numbers(group, seed) for name, group in groups.items()}


def comparison(rows: Sequence[Scored], others: Sequence[Scored], *, seed: int) -> dict[str, Any]:
    """Difference of the mean score between two lists of the same prompts, prompt by prompt, with a verdict.

    A file is better when the bootstrap interval leaves out 0 and a sign-flip test, which few prompts cannot
    pass, has p < 0.05. Source of the test: Fisher, "The Design of Experiments" (1935), section 21.
    """
    pairs = zip(rows, others, strict=True)
    differences = torch.tensor([row.mean - other.mean for row, other in pairs], dtype=torch.float64)
    interval = bootstrap_mean(differences, seed=seed)
    chance = sign_flip_p(differences, seed=seed)
    verdict = "no difference shown"
    if chance < SIGNIFICANT and interval.low > 0:
        verdict = "data.path is better"
    elif chance < SIGNIFICANT and interval.high < 0:
        verdict = "data.compare is better"
    return {"difference": interval._asdict(), "p": chance, "verdict": verdict}


def comparisons(rows: Sequence[Scored], others: Sequence[Scored], *, seed: int) -> dict[str, Any]:
    """`comparison` of all rows, and under `sources` of each source where there are several."""
    found = comparison(rows, others, seed=seed)
    sources = sorted({row.source for row in rows})
    if len(sources) > 1:
        found["sources"] = {
            source: comparison(
                [row for row in rows if row.source == source],
                [other for row, other in zip(rows, others, strict=True) if row.source == source],
                seed=seed,
            )
            for source in sources
        }
    return found


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
    reward.to_(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    data: Responses = built(tree["data"])
    assert data.path is not None
    rows, prompts = scored_rows(data.path, data, reward)
    found: dict[str, Any] = {"data.path": data.path, "scores": report(rows, seed=tree["seed"])}
    print(table(found["scores"]))
    if data.compare is not None:
        others, same = scored_rows(data.compare, data, reward)
        if prompts != same:
            raise DataError(
                f"data.compare must hold the same prompts in the same order as data.path (found {len(same)} "
                f"rows and {len(prompts)}, and the first that differs is {_first_difference(prompts, same)})."
            )
        found["comparison"] = {
            "data.compare": data.compare,
            **comparisons(rows, others, seed=tree["seed"]),
        }
        for name, one in {**found["comparison"].get("sources", {}), "all": found["comparison"]}.items():
            interval = one["difference"]
            print(
                f"\n{name}: difference {interval['mean']:+.4f} (95 % interval {interval['low']:+.4f} to "
                f"{interval['high']:+.4f}, p = {one['p']:.3g}): {one['verdict']}"
            )
    _write(Path(data.path).with_suffix(".scores.json"), found)
    return found


def _first_difference(prompts: list[str], others: list[str]) -> int:
    """Number of the first row that differs."""
    same = [a == b for a, b in zip(prompts, others, strict=False)]
    return same.index(False) if False in same else len(same)


def _numbers(rows: Sequence[Scored], seed: int) -> dict[str, Any]:
    numbers: dict[str, Any] = {"prompts": len(rows), "responses": sum(len(row.rewards) for row in rows)}
    for name, values in prompt_numbers(rows, seed=seed).items():
        numbers[name] = bootstrap_mean(torch.tensor(values), seed=seed)._asdict()
    return numbers


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
