"""Refills and greedy baselines: what is replaced, by which rows, at what cost, and where it stops."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lit_rl.algorithms.refills import Refills, greedy_rewards
from lit_rl.batch import RolloutBatch, length_mask, padded
from lit_rl.data.order import RowOrder, rows_not_in_use
from lit_rl.data.parquet import Block
from lit_rl.errors import ConfigError
from lit_rl.metrics import MetricSums
from lit_rl.objectives.dynamic_sampling import DynamicSampling
from lit_rl.rewards.base import Scores
from lit_rl.rollout.sampling import Sampling

G = 2
ORDER = RowOrder([Block(list(range(20)), 20)], shuffle=True, seed=5)


class FakeStep:
    """What refills need of a module. A prompt's row decides its length, its completions and their rewards.

    Rows below `flat_below` get equal rewards. Completion g of row r has r + g + 1 tokens.
    """

    data_source_key = "data_source"

    def __init__(self, flat_below: int, order: RowOrder = ORDER) -> None:
        self.flat_below, self.order = flat_below, order
        self.sums, self.device, self.sampling = MetricSums(), torch.device("cpu"), Sampling(temperature=0.7)
        self.clock = lambda phase: nullcontext()
        self.trainer = SimpleNamespace(datamodule=self)
        self.more: Any = self.completions
        self.asked: list[tuple[list[int], int, float, str]] = []
        self.samples = lambda rollout: rollout
        self.reward = self.scores

    def fresh_rows(self, start: int, count: int, in_use: set[int]) -> tuple[list[int], int]:
        return rows_not_in_use(self.order, start, count, in_use)

    def train_rows(self, rows: list[int]) -> RolloutBatch:
        ids, lengths = padded([[row] * (row % 5 + 1) for row in rows], "left")
        return RolloutBatch(ids, lengths, torch.tensor(rows), {"name": [f"row {row}" for row in rows]})

    def completions(self, prompts: RolloutBatch, sampling: Sampling, n: int, purpose: str) -> RolloutBatch:
        self.asked.append((prompts.prompt_row.tolist(), n, sampling.temperature, purpose))
        rows = prompts.repeat(n)
        lengths = [row + i % n + 1 for i, row in enumerate(rows.prompt_row.tolist())]
        ids, completion_len = padded([[length] * length for length in lengths], "right")
        return replace(
            rows,
            completion_ids=ids,
            completion_len=completion_len,
            completion_mask=length_mask(completion_len, ids.shape[1]),
            finish_reason=[f"{length}" for length in lengths],
            policy_version=torch.zeros(len(rows)),
        )

    def scores(self, rollout: RolloutBatch) -> Scores:
        flat = rollout.prompt_row < self.flat_below
        own = torch.where(flat, 1.0, (torch.arange(len(rollout)) % rollout.num_generations).float())
        return Scores(own, own[:, None], [str(row) for row in rollout.prompt_row.tolist()], [])

    def rollout(self, rows: list[int]) -> RolloutBatch:
        rollout = self.completions(self.train_rows(rows), self.sampling, G, "train")
        scores = self.scores(rollout)
        rollout.rewards, rollout.rewards_per_func = scores.rewards, scores.rewards_per_func
        rollout.feedback = scores.feedback
        self.asked.clear()
        return rollout


def same(a: RolloutBatch, b: RolloutBatch) -> bool:
    """Row by row what exists is the same, whatever the padding is."""
    texts = [
        (r.prompt_row.tolist(), r.columns, r.finish_reason, r.feedback, r.rewards.tolist()) for r in (a, b)
    ]
    prompts = [r.prompt_ids[r.prompt_mask].tolist() for r in (a, b)]
    tokens = [r.completion_ids[r.completion_mask].tolist() for r in (a, b)]
    return texts[0] == texts[1] and prompts[0] == prompts[1] and tokens[0] == tokens[1]


def test_groups_without_a_spread_are_replaced_in_their_place_until_none_is_left() -> None:
    step, refills = FakeStep(flat_below=10), Refills(DynamicSampling(max_refills=9))
    rollout = step.rollout([3, 15, 4, 12])
    refills(step, rollout)  # type: ignore[arg-type]
    rows = rollout.prompt_row[::G].tolist()
    assert rows[1] == 15 and rows[3] == 12 and min(rows) >= 10 and len(set(rows)) == 4
    assert same(rollout, step.rollout(rows))
    assert [ask[1:] for ask in step.asked] == [(G, 0.7, "train")] * len(step.asked)
    asked = [row for ask in step.asked for row in ask[0]]
    assert len(set(asked)) == len(asked) and not {3, 15, 4, 12} & set(asked)  # no prompt twice in a step


def test_what_it_costs_is_counted() -> None:
    step, refills = FakeStep(flat_below=10), Refills(DynamicSampling(max_refills=9))
    rollout = step.rollout([3, 15, 4, 12])
    refills(step, rollout)  # type: ignore[arg-type]
    asked = [row for ask in step.asked for row in ask[0]]
    metrics = step.sums.reduce()
    assert metrics["refill/rounds"] == len(step.asked) and metrics["refill/prompts"] == len(asked)
    assert metrics["refill/tokens"] == sum(2 * row + 3 for row in asked)
    everything = [3, 15, 4, 12, *asked]
    assert metrics["refill/reward"] == pytest.approx(
        sum(1.0 if row < 10 else 0.5 for row in everything) / len(everything)
    )
    # all tokens of the step: those of the rows that stay, counted at its end, and those of the dropped ones
    step.sums.add("rollout/tokens", rollout.completion_len.sum())
    assert step.sums.reduce()["rollout/tokens"] == sum(2 * row + 3 for row in everything)


def test_what_is_flat_at_the_limit_stays() -> None:
    step, refills = FakeStep(flat_below=20), Refills(DynamicSampling(max_refills=2))
    rollout = step.rollout([0, 1])
    refills(step, rollout)  # type: ignore[arg-type]
    assert len(step.asked) == 2 and len(rollout) == 2 * G
    assert same(rollout, step.rollout(rollout.prompt_row[::G].tolist()))


def test_when_every_row_is_in_the_step_it_stops() -> None:
    order = RowOrder([Block(list(range(5)), 5)], shuffle=True, seed=5)
    step, refills = FakeStep(flat_below=20, order=order), Refills(DynamicSampling(max_refills=50))
    rollout = step.rollout([0, 1, 2])
    refills(step, rollout)  # type: ignore[arg-type]
    assert [len(ask[0]) for ask in step.asked] == [2]  # the two that were left, for three flat groups
    assert refills.drawn <= 5


def test_the_place_in_the_second_order_is_saved_and_goes_on() -> None:
    straight, first, second = (Refills(DynamicSampling(max_refills=1)) for _ in range(3))
    step = FakeStep(flat_below=20)
    steps = [step.rollout([i, i + 1]) for i in range(4)]
    for rollout in steps:
        straight(step, rollout)  # type: ignore[arg-type]
    again = [step.rollout([i, i + 1]) for i in range(4)]
    first(step, again[0])  # type: ignore[arg-type]
    second.load_state_dict(first.state_dict())
    for rollout in again[1:]:
        second(step, rollout)  # type: ignore[arg-type]
    assert all(same(a, b) for a, b in zip(steps, again, strict=True))
    assert second.state_dict() == straight.state_dict() != {"drawn": 0}
    assert straight.is_moving and not Refills(DynamicSampling()).is_moving


def test_rows_not_in_use_run_through_the_order_again_and_again() -> None:
    rows, start = rows_not_in_use(ORDER, 0, 15, set())
    assert rows == list(ORDER.epoch(0))[:15] and start == 15
    more, start = rows_not_in_use(ORDER, start, 10, set())
    both = [*list(ORDER.epoch(0))[15:], *ORDER.epoch(1)]
    assert more == list(dict.fromkeys(both))[:10] and len(set(more)) == 10 and start >= 25
    left, _ = rows_not_in_use(ORDER, 7, 9, set(range(18)))
    assert sorted(left) == [18, 19]


def test_a_greedy_completion_of_each_prompt_is_scored_and_counted() -> None:
    step = FakeStep(flat_below=12)
    rollout = step.rollout([3, 15, 4])
    baselines = greedy_rewards(step, rollout)  # type: ignore[arg-type]
    assert step.asked == [([3, 15, 4], 1, 0.0, "baseline")]
    assert baselines.tolist() == [1.0, 1.0, 0.0, 0.0, 1.0, 1.0]  # row 15 counts up from 0
    metrics = step.sums.reduce()
    assert metrics["rollout/baseline_reward"] == pytest.approx(2 / 3)
    assert metrics["rollout/baseline_tokens"] == 4 + 16 + 5


def test_stored_rollouts_cannot_be_refilled() -> None:
    step = FakeStep(flat_below=20)
    step.more = None
    with pytest.raises(ConfigError, match="RolloutGeneration"):
        Refills(DynamicSampling(max_refills=1))(step, step.rollout([0, 1]))  # type: ignore[arg-type]


def test_a_negative_limit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"algo\.dynamic_sampling\.max_refills must be >= 0"):
        DynamicSampling(max_refills=-1)
