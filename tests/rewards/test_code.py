"""Code against tests: scores, error text as feedback, and what ends the program does not end the run."""

import os

import psutil
import pytest

from lit_rl.errors import ConfigError, DataError
from lit_rl.rewards.base import RewardSum
from lit_rl.rewards.code import Code, cases
from lit_rl.rewards.reward import Sample
from lit_rl.rewards.sandbox import Limits, Sandbox

PAIRS = {"inputs": ["1 2\n", "5 5\n"], "outputs": ["3\n", "10"]}
ASSERTS = ["assert add(1, 2) == 3", "assert add(5, 5) == 10"]


def namespaces_are_allowed() -> bool:
    try:
        return Sandbox().run("print(1)").output == "1\n"
    except ConfigError:
        return False


ISOLATION = "namespaces" if namespaces_are_allowed() else "limits"


def asked(code: str, truth: object, fenced: bool = True) -> Sample:
    text = f"So:\n```python\n{code}\n```\nThat is it." if fenced else code
    return Sample("add", text, columns={"reward_model": {"ground_truth": truth}})


def score(code: str, truth: object, **settings) -> tuple[float | None, str]:
    result = Code(ISOLATION, **{"seconds": 20.0, **settings}).score(asked(code, truth))
    return result.score, result.feedback or ""


def test_pairs_are_compared_line_by_line_outside_the_program() -> None:
    right = "a, b = map(int, input().split())\nprint(a + b, ' ')"
    assert score(right, PAIRS) == (1.0, "")
    wrong, said = score("print(3)", PAIRS)
    assert wrong == 0.0 and said == (
        "1 of 2 tests passed. The first that failed: for the input '5 5\\n' it wrote '3\\n', not '10'."
    )
    assert score("print(3)", PAIRS, partial=True)[0] == 0.5
    assert score("import sys; sys.exit(0)", PAIRS)[0] == 0.0


def test_asserts_run_after_the_program_and_must_be_reached() -> None:
    assert score("def add(a, b):\n    return a + b", ASSERTS) == (1.0, "")
    value, said = score("def add(a, b):\n    return 3", ASSERTS, partial=True)
    assert value == 0.5 and "assert add(5, 5) == 10: it ended with code 1: " in said
    assert "AssertionError" in said
    for early in ("import sys; sys.exit(0)", "import os; os._exit(0)", "print('ok'); raise SystemExit"):
        value, said = score(early, ASSERTS)
        assert value == 0.0 and "ended before the test did" in said


@pytest.mark.parametrize(
    ("code", "seconds", "said"),
    [
        ("def add(a, b): return a +", 20.0, "SyntaxError"),
        ("1 / 0", 20.0, "ZeroDivisionError"),
        ("while True: pass", 1.0, "longer than 1 s"),
        ("import time; time.sleep(60)", 1.0, "longer than 1 s"),
        ("x = ' ' * 10**10", 20.0, "MemoryError"),
        ("while True: print('x' * 10**5)", 20.0, "more than 1048576 bytes"),
    ],
)
def test_the_error_is_the_feedback(code: str, seconds: float, said: str) -> None:
    value, feedback = score(code, PAIRS, seconds=seconds, max_tests=1)
    assert value == 0.0 and said in feedback


@pytest.mark.field("sec/4")
def test_hostile_programs_score_0_and_leave_nothing_behind() -> None:
    fork = "import os, time\nfor _ in range(100):\n    if os.fork() == 0:\n        time.sleep(77)\n"
    deaf = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(77)"
    codes = [
        "import os\nprint(os.listdir(os.path.expanduser('~root')))",
        "import socket\nsocket.create_connection(('192.0.2.1', 80), timeout=60)",
        fork,
        "x = bytearray(100 * 2**30)",
        deaf,
    ]
    total = RewardSum({"code": Code(ISOLATION, seconds=2.0, max_tests=1)})
    scores = total([asked(code, PAIRS) for code in codes])
    assert scores.rewards.tolist() == [0, 0, 0, 0, 0] and scores.metrics["error_frac"] == 0
    left = [process.cmdline() for process in psutil.Process().children(recursive=True)]
    assert [words for words in left if "program.py" in words] == []


def test_no_block_is_counted_apart_and_the_last_one_counts() -> None:
    reward = RewardSum({"code": Code(ISOLATION, seconds=20.0)})
    two = "```python\nprint(1)\n```\nbetter:\n```py\nprint(3)\n```"
    samples = [asked("print(3)", PAIRS, fenced=False), asked(two, PAIRS, fenced=False)]
    scores = reward(samples)
    assert [row["code/no_answer"] for row in scores.row_metrics] == [1.0, 0.0]
    assert scores.metrics["code/tests_passed"] == 0.5


@pytest.mark.parametrize(
    "truth", [{"inputs": ["1"], "outputs": []}, {"inputs": [1], "outputs": [2]}, [], 7, "assert (", [1]]
)
def test_a_reference_without_tests_is_the_data_s_mistake(truth: object) -> None:
    with pytest.raises(DataError, match="reward Code"):
        RewardSum({"code": Code(ISOLATION)}, on_error="zero")([asked("1", truth)])


def test_tests_may_stand_as_json() -> None:
    assert cases('{"inputs": ["1"], "outputs": ["2"]}') == cases({"inputs": ["1"], "outputs": ["2"]})
    assert cases('["assert f(1) == 2"]') == cases("assert f(1) == 2")


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigError, match="isolation of a sandbox must be one of namespaces, limits"):
        Sandbox(isolation="container")
    with pytest.raises(ConfigError, match="concurrency of the reward Code"):
        Code(concurrency=0)
    with pytest.raises(ConfigError, match="memory of a sandbox must be > 0"):
        Limits(memory=0)


@pytest.mark.skipif(ISOLATION == "limits", reason="namespaces are not allowed here")
def test_the_world_inside_is_empty() -> None:
    ran = Sandbox().run("import os\nprint(os.getpid(), sorted(os.environ), os.listdir('.'), os.getuid())")
    assert ran.output.startswith("2 ['HOME', 'LANG', 'PATH'] ['program.py'] ")
    assert int(ran.output.split()[-1]) not in (0, os.getuid())
