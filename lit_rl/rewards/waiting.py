"""Rewards that wait for something else, such as a server: all rows of all such functions wait together."""

import asyncio
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from lit_rl.rewards.manager import GRACE
from lit_rl.rewards.reward import Reward, RewardResult, Sample
from lit_rl.time_limit import OutOfTime, in_thread

Outcome = RewardResult | Exception


class WaitingReward(Reward):
    """A reward with a coroutine. It is called in this process whatever the manager, and never in shares."""

    @abstractmethod
    async def outcomes(self, samples: list[Sample], timeout: float) -> Sequence[Outcome]:
        """A result for each row, or what went wrong with it.

        Args:
            samples: B rows.
            timeout: seconds per call.
        """

    def longest(self, count: int, timeout: float) -> float:
        """Seconds after which every one of so many rows has its result or has failed."""
        return 2 * timeout

    def __call__(self, samples: list[Sample]) -> list[RewardResult]:
        """One result per sample, without a limit of time. Raises what a row raised."""
        results = []
        for outcome in in_thread(lambda: asyncio.run(self.outcomes(samples, 1e9)), 1e9):
            if isinstance(outcome, Exception):
                raise outcome
            results.append(outcome)
        return results

    def score(self, sample: Sample) -> RewardResult:
        """The result of the sample alone."""
        return self([sample])[0]


def awaited(
    functions: Mapping[str, WaitingReward], samples: list[Sample], timeout: float
) -> dict[str, Sequence[Outcome]]:
    """Outcomes of all functions by name, in the order of the rows.

    The event loop has a thread of its own, so that it does not matter whether the caller has one too.

    Args:
        functions: by name.
        samples: B rows.
        timeout: seconds per call. A coroutine that does not give way within it blocks all rows, and all fail.
    """
    if not functions:
        return {}

    async def together() -> list[Sequence[Outcome]]:
        return await asyncio.gather(*(f.outcomes(samples, timeout) for f in functions.values()))

    try:
        longest = max(f.longest(len(samples), timeout) for f in functions.values())
        lists = in_thread(lambda: asyncio.run(together()), longest + GRACE)
    except OutOfTime:
        error = OutOfTime(f"an asynchronous reward function gave no way within reward.timeout, {timeout:g} s")
        lists = [[error] * len(samples) for _ in functions]
    return dict(zip(functions, lists, strict=True))


async def outcome_of(call: Any, timeout: float) -> Any:
    """What a coroutine returns, or the exception that ended it.

    Args:
        call: the coroutine.
        timeout: seconds.
    """
    limit = asyncio.timeout(timeout)
    try:
        async with limit:
            return await call
    except Exception as error:
        if isinstance(error, TimeoutError) and limit.expired():
            return OutOfTime(f"took longer than reward.timeout, {timeout:g} s")
        return error
