"""What rewards say about the responses to each prompt, and the numbers made of that.

Validation during training and `python -m lit_rl.evaluate` are both made of these functions. Rows are put in
the order of the data before anything is added up, so that a number does not depend on who scored which row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torchmetrics import MeanMetric

from lit_rl.functional.evaluation import majority_at_k, pass_at_k
from lit_rl.rewards.base import RewardSum, Scores, metric_sums
from lit_rl.rewards.reward import Sample

MAJORITY_DRAWS = 200


@dataclass(frozen=True)
class Scored:
    """One prompt with its n responses.

    Attributes:
        row: of the data.
        source: of the row.
        rewards: n weighted sums, NaN where no reward applied.
        is_right: n truths.
        answers: n extracted answers, None where the verifier has no such notion or found none; empty where
            nobody asked for them.
        parts: n scores by function, NaN where it did not apply.
        metrics: n times further numbers by name.
        lengths: n numbers of tokens; empty where they are not known.
    """

    row: int
    source: str
    rewards: list[float]
    is_right: list[bool]
    answers: list[str | None]
    parts: dict[str, list[float]]
    metrics: list[dict[str, float]]
    lengths: list[int]

    @property
    def mean(self) -> float:
        """Mean reward; a response without one counts 0."""
        return sum(0.0 if reward != reward else reward for reward in self.rewards) / len(self.rewards)


def scored(
    samples: Sequence[Sample], sources: Sequence[str], counts: Sequence[int], reward: RewardSum
) -> tuple[list[Scored], Scores]:
    """Score prompts together.

    Args:
        samples: the responses of all prompts, those of one prompt adjacent.
        sources: one per prompt.
        counts: responses of each prompt.
        reward: scores.

    Returns:
        The prompts, and what the reward said of all rows.
    """
    scores = reward(list(samples))
    is_right = reward.is_right(scores).tolist()
    rewards, parts = scores.rewards.tolist(), scores.rewards_per_func.T.tolist()
    out, start = [], 0
    for source, count in zip(sources, counts, strict=True):
        rows = slice(start, start + count)
        own = samples[rows]
        out.append(
            Scored(
                row=-1 if own[0].row is None else own[0].row,
                source=source,
                rewards=rewards[rows],
                is_right=is_right[rows],
                answers=[reward.answer(sample) for sample in own] if count > 1 else [],
                parts={name: part[rows] for name, part in zip(reward.names, parts, strict=True)},
                metrics=scores.row_metrics[rows],
                lengths=[len(sample.completion_ids) for sample in own],
            )
        )
        start += count
    return out, scores


def prompt_numbers(rows: Sequence[Scored], *, seed: int) -> dict[str, list[float]]:
    """Numbers by name, one per prompt (fewer where a number does not exist for every prompt).

    `mean`; `pass@k`, and `maj@k` where answers can be told apart, for the powers of 2 up to the least number
    of responses of a prompt; then what the reward functions counted, such as `<function>/no_answer`.

    Args:
        rows: scored prompts, at least one.
        seed: of the subsets for maj@k.
    """
    least = min(len(row.rewards) for row in rows)
    numbers = {"mean": [row.mean for row in rows]}
    has_answers = any(answer is not None for row in rows for answer in row.answers)
    k = 1
    while k <= least:
        numbers[f"pass@{k}"] = [pass_at_k(sum(row.is_right), len(row.is_right), k) for row in rows]
        if has_answers and k > 1:
            numbers[f"maj@{k}"] = [
                majority_at_k(row.answers, row.is_right, k, draws=MAJORITY_DRAWS, seed=seed) for row in rows
            ]
        k *= 2
    for row in rows:
        for name, (total, count) in metric_sums(row.metrics).items():
            numbers.setdefault(name, []).append(total / count)
    return numbers


def by_source(rows: Sequence[Scored]) -> dict[str, list[Scored]]:
    """Rows of each source, sources in order of their names."""
    return {source: [r for r in rows if r.source == source] for source in sorted({r.source for r in rows})}


def mean_of(values: Sequence[float]) -> float:
    """Mean in float64; 0 without values. The values are those of all ranks already."""
    if not values:
        return 0.0
    mean = MeanMetric(nan_strategy="error", sync_on_compute=False).set_dtype(torch.float64)
    mean.update(torch.tensor(values, dtype=torch.float64))
    return float(mean.compute())
