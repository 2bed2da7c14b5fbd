"""The judge against a server in a process of its own, which stands in for a model's."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lit_rl.errors import ConfigError, DataError
from lit_rl.rewards.base import RewardSum
from lit_rl.rewards.judge import Judge
from lit_rl.rewards.reward import Sample


@pytest.fixture
def url() -> Iterator[str]:
    """Address of a fresh server."""
    script = Path(__file__).with_name("stand_in_judge.py")
    process = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}/v1"
    finally:
        process.terminate()
        process.wait()


def judge(url: str, **settings) -> Judge:
    return Judge(url, "stand-in", **{"api_key": "open sesame", "backoff": 0.02, **settings})


def answers(*texts: str) -> list[Sample]:
    cells = {"reward_model": {"ground_truth": "7 {completion}"}}
    return [Sample([{"role": "user", "content": "3+4=?"}], text, columns=cells) for text in texts]


def test_grades_become_scores_the_rest_feedback_and_every_token_is_counted(url: str) -> None:
    total = RewardSum({"judge": judge(url, prompt_price=2.0, completion_price=50.0)})
    scores = total(answers("7", "10", "0", "busy", "quota", "drops"))
    assert scores.rewards.tolist() == pytest.approx([0.7, 1.0, 0.0, 0.6, 0.6, 0.6])
    assert scores.feedback[0] == "A grade of  would be unfair.\nNot bad."
    assert [row["judge/retries"] for row in scores.row_metrics] == [0, 0, 0, 2, 1, 1]
    assert scores.metrics["judge/prompt_tokens"] == 100
    assert scores.metrics["judge/cost"] == pytest.approx((100 * 2 + 10 * 50) / 1e6)


def test_what_stays_wrong_fails_its_row_alone_and_says_why(url: str, caplog) -> None:
    own = judge(url, max_retries=1, request_timeout=0.3)
    total = RewardSum({"judge": own}, on_error="drop")
    start = time.monotonic()
    scores = total(answers("7", "down", "babble", "hundred", "hangs", "3"))
    assert scores.rewards.isnan().tolist() == [False, True, True, True, True, False]
    assert scores.metrics["error_frac"] == pytest.approx(4 / 6) and time.monotonic() - start < 4
    for reason in ("answered 500", "no number from 0 to 10: 'I would rather", "Score: 100", "ReadTimeout"):
        assert reason in caplog.text
    with pytest.raises(DataError, match=r"'judge' failed on sample 1 .*answered 500"):
        RewardSum({"judge": own})(answers("7", "down"))


def test_a_wrong_key_is_told_at_once(url: str) -> None:
    with pytest.raises(DataError, match=r"'judge' failed on sample 0 .*401"):
        RewardSum({"judge": judge(url, api_key="open barley", backoff=60.0)})(answers("7"))


def test_reward_timeout_limits_a_row_with_all_its_requests(url: str, caplog) -> None:
    total = RewardSum({"judge": judge(url, max_retries=1000)}, timeout=0.3, on_error="zero")
    assert total(answers("down", "7")).rewards.tolist() == pytest.approx([0.0, 0.7])
    assert "longer than reward.timeout, 0.3 s" in caplog.text


def test_many_rows_wait_for_their_turn_without_running_out_of_time(url: str) -> None:
    total = RewardSum({"judge": judge(url, concurrency=2)}, timeout=2.0)
    assert total(answers(*["7"] * 40)).rewards.tolist() == pytest.approx([0.7] * 40)


def test_no_server_is_a_failure_of_rows() -> None:
    with pytest.raises(DataError, match=r"'judge' failed on sample 0 .*ConnectError"):
        RewardSum({"judge": judge("http://127.0.0.1:9/v1", max_retries=1)})(answers("7"))


def test_slots_are_filled_once() -> None:
    text = judge("http://x", template="{prompt}|{completion}|{ground_truth}|{other}").message(
        answers("{ground_truth}")[0]
    )
    assert text == "user: 3+4=?|{ground_truth}|7 {completion}|{other}"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"template": "grade it"}, "judge.template must be a text with the slot {completion}"),
        ({"low": 10.0}, "judge.high must be above low"),
        ({"score_pattern": "("}, "score_pattern must be a regular expression"),
        ({"score_pattern": "Score"}, "score_pattern must have a group"),
        ({"concurrency": 0}, "judge.concurrency must be >= 1"),
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        judge("http://x", **settings)
    with pytest.raises(ConfigError, match=r"judge\.base_url must be an http"):
        Judge("localhost:8000", "m")
