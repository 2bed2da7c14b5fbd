"""Asynchronous reward functions: everything waits together, order and failures stay with their rows."""

import asyncio
import time

import pytest

from lit_rl.errors import DataError
from lit_rl.rewards.base import RewardSum
from lit_rl.rewards.custom import from_function
from lit_rl.rewards.reward import Sample
from lit_rl.rewards.waiting import WaitingReward

WAIT = 0.3


def texts(*completions: str) -> list[Sample]:
    return [Sample("q", completion) for completion in completions]


async def by_row(solution_str, extra_info=None):
    await asyncio.sleep(WAIT)
    return {"score": float(solution_str), "feedback": f"row {solution_str}", "seen": 1}


async def by_batch(completions, **columns):
    await asyncio.gather(*(asyncio.sleep(WAIT) for _ in completions))
    return [float(text) / 10 for text in completions]


class Judge:
    """An object with an asynchronous call."""

    async def __call__(self, solution_str):
        await asyncio.sleep(WAIT)
        return 1.0


async def broken(solution_str):
    if solution_str == "1":
        raise KeyError("lost")
    if solution_str == "2":
        await asyncio.sleep(60)
    return "high" if solution_str == "3" else 1.0


async def broken_batch(completions):
    return [await broken(text) for text in completions]


async def blocking(solution_str):
    time.sleep(3)
    return 1.0


@pytest.mark.field("rew/6")
def test_all_rows_of_all_functions_wait_together_and_keep_their_order() -> None:
    functions = {"row": by_row, "batch": by_batch, "object": Judge()}
    total = RewardSum({name: from_function(f) for name, f in functions.items()})
    samples = texts(*map(str, range(16)))
    start = time.monotonic()
    scores = total(samples)
    assert time.monotonic() - start < 3 * WAIT
    assert scores.rewards.tolist() == pytest.approx([i + i / 10 + 1 for i in range(16)])
    assert scores.feedback[7] == "row 7" and scores.metrics["row/seen"] == 1.0


@pytest.mark.field("rew/6")
@pytest.mark.parametrize("function", [broken, broken_batch])
def test_a_call_that_fails_does_not_lose_the_others(function, caplog) -> None:
    total = RewardSum({"f": from_function(function)}, timeout=0.3, on_error="zero")
    scores = total(texts(*"01234"))
    assert scores.rewards.tolist() == [1, 0, 0, 0, 1] and scores.metrics["error_frac"] == 0.6
    for reason in ("KeyError: 'lost'", "longer than reward.timeout, 0.3 s", "must return a number or None"):
        assert reason in caplog.text
    with pytest.raises(DataError, match=r"'f' failed on sample 1 .*KeyError: 'lost'"):
        RewardSum({"f": from_function(function)}, timeout=0.3)(texts(*"01234"))


def test_a_coroutine_that_never_gives_way_fails_and_does_not_hold_the_run(monkeypatch) -> None:
    monkeypatch.setattr("lit_rl.rewards.waiting.GRACE", 0.1)
    total = RewardSum({"f": from_function(blocking)}, timeout=0.1, on_error="zero")
    start = time.monotonic()
    assert total(texts("0")).rewards.tolist() == [0] and time.monotonic() - start < 2


def test_a_caller_with_an_event_loop_of_its_own_may_score_too() -> None:
    reward = from_function(by_row)
    assert isinstance(reward, WaitingReward)

    async def notebook():
        return RewardSum({"f": reward})(texts("3")).rewards.tolist(), reward.score(*texts("4")).score

    assert asyncio.run(notebook()) == ([3.0], 4.0)


def test_a_column_that_is_missing_stops_whatever_on_error_says() -> None:
    async def f(completions, answer):
        return [1.0 for _ in completions]

    with pytest.raises(DataError, match=r"needs the columns \['answer'\]"):
        RewardSum({"f": from_function(f)}, on_error="zero")(texts("1", "2"))
