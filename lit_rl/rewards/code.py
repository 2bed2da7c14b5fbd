"""Code: a program in the completion against tests, in the sandbox."""

import ast
import asyncio
import json
import math
import re
import secrets
from collections.abc import Mapping
from typing import Any, NamedTuple

from lit_rl.errors import ConfigError, DataError
from lit_rl.rewards.reward import AN_ANSWER, NO_ANSWER, RewardResult, Sample
from lit_rl.rewards.sandbox import Limits, Ran, Sandbox
from lit_rl.rewards.waiting import Outcome, WaitingReward, outcome_of

_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)
SHOWN = 300
"""Characters of an error that feedback repeats."""


class Case(NamedTuple):
    """One test.

    Attributes:
        stdin: what the program reads; None for a test that is code.
        wanted: what it must write, or the code of the test.
    """

    stdin: str | None
    wanted: str


class Code(WaitingReward):
    """The share of tests that the last ```python block of the completion passes; 1 or 0 unless `partial`.

    The reference answer is, as it stands or as JSON, either `{"inputs": [...], "outputs": [...]}` (what the
    program reads and must write; lines are compared without white space at their ends), or one or several
    texts of Python code that run after the program and must not raise. Tests that are code run beside the
    program they judge: one that sets out to can fool them. Pairs are compared outside of it.

    Feedback is the first failure: what was wanted and found, or the end of the error. Metrics: `tests_passed`
    (the share) and `no_answer` (there was no block).

    Each program runs in a process of its own; see `lit_rl/rewards/README.md` for what it can do there.

    Args:
        isolation: "namespaces" or "limits"; see `Sandbox`.
        partial: score the share of tests instead of all or nothing.
        max_tests: tests that are run, the first ones.
        concurrency: programs at a time.
        seconds: per test, from start to end.
        memory: bytes of address space, each process.

    Raises:
        ConfigError: a value is out of range.
    """

    def __init__(
        self,
        isolation: str = "namespaces",
        partial: bool = False,
        max_tests: int = 20,
        concurrency: int = 4,
        seconds: float = 5.0,
        memory: int = 512 * 2**20,
    ) -> None:
        for name, value in (("max_tests", max_tests), ("concurrency", concurrency)):
            if value < 1:
                raise ConfigError(f"{name} of the reward Code must be >= 1 (found {value!r}).")
        limits = Limits(seconds=seconds, cpu_seconds=max(math.ceil(seconds), 1), memory=memory)
        self.sandbox = Sandbox(limits, isolation)
        self.partial, self.max_tests, self.concurrency = partial, max_tests, concurrency

    async def outcomes(self, samples: list[Sample], timeout: float) -> list[Outcome]:
        """A result for each row, or what went wrong with it."""
        places = asyncio.Semaphore(self.concurrency)

        async def in_turn(sample: Sample) -> Outcome:
            async with places:
                return await outcome_of(asyncio.to_thread(self.judged, sample), timeout)

        return await asyncio.gather(*map(in_turn, samples))

    def longest(self, count: int, timeout: float) -> float:
        """Seconds after which every row has its result or has failed."""
        return timeout * math.ceil(count / self.concurrency)

    def judged(self, sample: Sample) -> RewardResult:
        """The result of one sample.

        Raises:
            DataError: the reference answer holds no tests.
        """
        tests = cases(sample.ground_truth)[: self.max_tests]
        program = self.answer(sample)
        if program is None:
            return RewardResult(0.0, "There was no ```python block in your answer.", NO_ANSWER)
        complaints = [self._complaint(program, test) for test in tests]
        share = sum(complaint is None for complaint in complaints) / len(tests)
        first = next((complaint for complaint in complaints if complaint is not None), None)
        feedback = None
        if first is not None:
            passed = sum(complaint is None for complaint in complaints)
            feedback = f"{passed} of {len(tests)} tests passed. The first that failed: {first}"
        score = share if self.partial else float(share == 1.0)
        return RewardResult(score, feedback, {"tests_passed": share, **AN_ANSWER})

    def answer(self, sample: Sample) -> str | None:
        """The last block of code."""
        blocks = _BLOCK.findall(sample.answer)
        return blocks[-1] if blocks else None

    def _complaint(self, program: str, test: Case) -> str | None:
        """What is wrong with the program; None where it passes."""
        if test.stdin is not None:
            ran = self.sandbox.run(program, test.stdin)
            failure = _failure(ran, self.sandbox.limits)
            if failure is None and _lines(ran.output) != _lines(test.wanted):
                failure = f"it wrote {_cut(ran.output)!r}, not {_cut(test.wanted)!r}"
            return None if failure is None else f"for the input {_cut(test.stdin)!r} {failure}."
        mark = secrets.token_hex(16)
        ran = self.sandbox.run(f"{program}\n{test.wanted}\nprint('\\n{mark}')\n")
        failure = _failure(ran, self.sandbox.limits)
        if failure is None and _lines(ran.output)[-1:] != [mark]:
            failure = "the program ended before the test did"
        return None if failure is None else f"{_cut(test.wanted)}: {failure}."


def cases(truth: Any) -> list[Case]:
    """The tests of a reference answer.

    Args:
        truth: pairs or code, see `Code`; also as a JSON text.

    Raises:
        DataError: it is neither.
    """
    if isinstance(truth, str):
        try:
            truth = json.loads(truth)
        except json.JSONDecodeError:
            _check_code(truth)
            return [Case(None, truth)]
    if isinstance(truth, Mapping) and {"inputs", "outputs"} <= truth.keys():
        inputs, outputs = list(truth["inputs"]), list(truth["outputs"])
        if inputs and len(inputs) == len(outputs) and all(isinstance(t, str) for t in [*inputs, *outputs]):
            return [Case(read, wanted) for read, wanted in zip(inputs, outputs, strict=True)]
    if isinstance(truth, list) and truth and all(isinstance(test, str) for test in truth):
        for test in truth:
            _check_code(test)
        return [Case(None, test) for test in truth]
    raise DataError(
        "The reward Code needs a ground_truth with as many inputs as outputs, all texts, or texts of Python "
        f"code (found {str(truth)[:80]!r})."
    )


def _check_code(test: str) -> None:
    try:
        ast.parse(test)
    except (SyntaxError, ValueError) as error:
        raise DataError(f"The reward Code found a test that is no Python ({error}): {test[:80]!r}.") from None


def _failure(ran: Ran, limits: Limits) -> str | None:
    """Why a program did not end well; None where it did."""
    if ran.limit == "time":
        return f"it took longer than {limits.seconds:g} s"
    if ran.limit == "output":
        return f"it wrote more than {limits.output} bytes"
    if ran.code == 0:
        return None
    end = ran.error.strip()[-SHOWN:]
    return f"it ended with code {ran.code}" + (f": {end}" if end else "")


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _cut(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."
