"""Rewards in processes and within a time limit: the same numbers, and no function can hold up a run."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from lit_rl.errors import ConfigError, DataError
from lit_rl.rewards import manager
from lit_rl.rewards.base import RewardSum, Sample
from lit_rl.rewards.by_source import BySource
from lit_rl.rewards.custom import from_function
from lit_rl.rewards.reward import Reward, RewardResult
from lit_rl.time_limit import OutOfTime, time_limit


class Length(Reward):
    def score(self, sample: Sample) -> RewardResult:
        return RewardResult(float(len(sample.completion)), f"{os.getpid()}")


class Hangs(Reward):
    """Sleeps for ever on rows that say so."""

    def score(self, sample: Sample) -> RewardResult:
        while sample.completion == "hang":
            time.sleep(0.01)
        return RewardResult(1.0)


class Deaf(Reward):
    """Ignores the alarm, as compiled code may."""

    def score(self, sample: Sample) -> RewardResult:
        until = time.monotonic() + 60
        while sample.completion == "hang" and time.monotonic() < until:
            try:
                time.sleep(0.5)
            except OutOfTime:
                continue
        return RewardResult(1.0)


SAMPLES = [Sample("q", "a" * n) for n in range(1, 8)]
HANGING = [Sample("q", text) for text in ("a", "hang", "b")]


def test_processes_give_the_same_scores_in_order() -> None:
    plain = RewardSum({"length": Length()})(SAMPLES)
    shared = RewardSum({"length": Length()}, reward_manager="prime", num_workers=3)(SAMPLES)
    assert shared.rewards.tolist() == plain.rewards.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    workers = set(shared.feedback)
    assert str(os.getpid()) not in workers and set(plain.feedback) == {str(os.getpid())}


@pytest.mark.field("rew/2")
@pytest.mark.parametrize("manager", ["naive", "prime"])
def test_a_hanging_row_fails_alone(manager: str) -> None:
    total = RewardSum({"f": Hangs()}, reward_manager=manager, timeout=0.3, on_error="zero")
    start = time.monotonic()
    scores = total(HANGING)
    assert scores.rewards.tolist() == [1.0, 0.0, 1.0] and scores.metrics["error_frac"] == pytest.approx(1 / 3)
    assert time.monotonic() - start < 5
    dropped = RewardSum({"f": Hangs()}, reward_manager=manager, timeout=0.3, on_error="drop")(HANGING)
    assert dropped.rewards.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("manager", ["naive", "prime"])
def test_a_hanging_row_ends_the_run_when_errors_do(manager: str) -> None:
    total = RewardSum({"f": Hangs()}, reward_manager=manager, timeout=0.3)
    with pytest.raises(DataError, match=r"'f' failed on sample 1 .*took longer than reward\.timeout, 0\.3 s"):
        total(HANGING)


def test_a_worker_that_hears_no_signal_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lit_rl.rewards.manager.GRACE", 0.3)
    total = RewardSum({"f": Deaf()}, reward_manager="prime", timeout=0.3, on_error="zero")
    assert total(HANGING).rewards.tolist() == [1.0, 0.0, 1.0]


def test_workers_end_though_the_run_handles_signals_itself() -> None:
    before = signal.signal(signal.SIGTERM, lambda signum, frame: None)
    try:
        total = RewardSum({"length": Length()}, reward_manager="prime")
        total(SAMPLES)
        total.manager.close()  # waits for them
    finally:
        signal.signal(signal.SIGTERM, before)


def test_the_alarm_is_off_after_the_block() -> None:
    with time_limit(0.05):
        pass
    time.sleep(0.1)
    with pytest.raises(OutOfTime), time_limit(0.05):
        time.sleep(1)


@pytest.mark.parametrize(
    "settings", [{"reward_manager": "batch"}, {"num_workers": 0}, {"timeout": 0.0}], ids=str
)
def test_settings_out_of_range_are_refused(settings: dict) -> None:
    with pytest.raises(ConfigError, match=f"reward.{next(iter(settings))}"):
        RewardSum({"length": Length()}, **settings)


def own_alarm(solution_str):
    """A checker that limits its time by a signal, as many do."""
    with time_limit(5):
        return float(solution_str == "7")


@pytest.mark.field("rew/1")
@pytest.mark.parametrize("reward", [BySource(), from_function(own_alarm)], ids=["shipped", "own alarm"])
def test_a_thread_and_a_process_score_as_the_main_thread_or_say_why_not(reward, sample, caplog) -> None:
    samples = [sample(text) for text in ("7", "8", "nothing", "7 ")]
    total = RewardSum({"f": reward}, on_error="zero")
    here = total(samples).rewards.tolist()
    in_processes = RewardSum({"f": reward}, reward_manager="prime")(samples).rewards.tolist()
    assert in_processes == here
    with ThreadPoolExecutor(1) as pool:
        in_thread = pool.submit(total, samples).result()
    if in_thread.metrics["error_frac"]:
        assert in_thread.metrics["error_frac"] == 1.0 and "signal only works in main thread" in caplog.text
    else:
        assert in_thread.rewards.tolist() == here


def test_the_limit_holds_in_a_thread_too() -> None:
    total = RewardSum({"f": Hangs()}, timeout=0.2, on_error="zero")
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(total, HANGING).result(timeout=5).rewards.tolist() == [1.0, 0.0, 1.0]
    time.sleep(0.1)
    assert [t for t in threading.enumerate() if t.name == "lit_rl_reward"] == []


@pytest.mark.field("rew/2")
@pytest.mark.parametrize("manager", ["naive", "prime"])
def test_five_batches_with_a_slow_row_each_take_as_long_as_the_first(manager: str) -> None:
    before = set(psutil.Process().children())
    total = RewardSum({"f": Hangs()}, reward_manager=manager, timeout=0.2, on_error="zero")
    samples, seconds = [Sample("q", "hang" if i == 3 else "a") for i in range(8)], []
    for _ in range(5):
        start = time.monotonic()
        assert total(samples).rewards.tolist() == [1, 1, 1, 0, 1, 1, 1, 1]
        seconds.append(time.monotonic() - start)
    assert max(seconds) < 2
    total.manager.close()
    left = set(psutil.Process().children()) - before
    assert [process for process in left if process.status() != psutil.STATUS_ZOMBIE] == []


def test_workers_end_at_once_however_early_they_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Told while a handler of the parent is still theirs, they would take the word and stay."""
    before = signal.signal(signal.SIGTERM, lambda signum, frame: None)
    remember = manager._remember

    def late(functions: dict[str, Reward]) -> None:
        time.sleep(0.3)
        remember(functions)

    monkeypatch.setattr(manager, "_remember", late)
    try:
        prime = manager.Prime({"f": Length()}, timeout=5.0, num_workers=2)
        processes = prime._workers()._pool
        ending = threading.Thread(target=prime.close, daemon=True)
        ending.start()
        ending.join(10)
        assert not ending.is_alive() and not any(process.is_alive() for process in processes)
    finally:
        signal.signal(signal.SIGTERM, before)
        for process in processes:
            process.kill()
