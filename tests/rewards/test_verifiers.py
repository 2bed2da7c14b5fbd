import json
from decimal import Decimal
from pathlib import Path

import pytest

from lit_rl.errors import ConfigError, DataError
from lit_rl.rewards.arithmetic import Arithmetic
from lit_rl.rewards.base import RewardSum
from lit_rl.rewards.by_source import BySource
from lit_rl.rewards.exact_match import ExactMatch
from lit_rl.rewards.gsm8k import GSM8K, last_number, marked_number, verl_answer
from lit_rl.rewards.multiple_choice import MultipleChoice
from lit_rl.rewards.random import Random
from lit_rl.rewards.reward import Reward, RewardResult

VERL = json.loads((Path(__file__).parent / "gsm8k_verl_cases.json").read_text())["cases"]


@pytest.mark.parametrize("method", ["strict", "flexible"])
@pytest.mark.parametrize("case", VERL, ids=lambda case: case["id"])
def test_verls_gsm8k_rules_are_followed_to_the_letter(sample, case, method) -> None:
    text, truth = case["inputs"]["response"], case["inputs"]["ground_truth"]
    expected = case["expected"][method]
    assert verl_answer(text, is_strict=method == "strict") == expected["extracted"]
    row = sample(text, truth)
    assert GSM8K(f"verl_{method}").score(row).score == expected["score"]
    assert GSM8K(f"verl_{method}", format_score=0.1).score(row).score == expected["score_with_format_0_1"]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("#### 7", "7"),
        ("####7", "7"),
        ("####\n7", "7"),
        ("#### $1,234.50", "1234.5"),
        ("#### \\$18", "18"),
        ("#### 18.00", "18"),
        ("#### 42.", "42"),
        ("#### 42 apples", "42"),
        ("#### 18kg", "18"),
        ("#### 50%", "50"),
        ("#### -$12", "-12"),
        ("#### - 12", "-12"),
        ("#### \u22125", "-5"),
        ("#### .5", "0.5"),
        ("#### 007", "7"),
        ("#### 5\nwait, no\n#### 6", "6"),
        ("#### 6" + " and so on" * 100, "6"),
        ("#### 3/4", None),
        ("#### 12:30", None),
        ("#### 3-4", None),
        ("#### 1e3", None),
        ("#### 123/4", None),
        ("#### seven", None),
        ("#### 5\n####", None),
        ("#### \u0663", None),
        ("### 9", None),
        ("the answer is 7", None),
    ],
)
def test_the_number_after_the_last_marker_is_read_as_a_number(text, number) -> None:
    assert marked_number(text) == (None if number is None else Decimal(number))


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("10 - 72", "72"),
        ("it is 5-3=2", "2"),
        ("it lies at -3", "-3"),
        ("That makes $1,000.", "1000"),
        ("a range of 3-4", "4"),
        ("none", None),
    ],
)
def test_the_last_number_is_found_anywhere(text, number) -> None:
    assert last_number(text) == (None if number is None else Decimal(number))


def test_strict_needs_the_marker_and_flexible_does_not(sample) -> None:
    row = sample("The answer is 7.", "7")
    assert GSM8K("strict").score(row).score == 0
    assert GSM8K("flexible").score(row).score == 1
    assert (
        GSM8K("flexible").score(sample("#### 6, not 7", "7")).score == 0
    )  # the marker wins where there is one


def test_gsm8k_reads_the_ground_truth_the_same_way(sample) -> None:
    assert GSM8K().score(sample("#### 1234", "1,234")).score == 1
    assert GSM8K().score(sample("#### 1234", "3 * 4\n#### $1,234.0")).score == 1


def test_gsm8k_feedback_names_the_number_that_was_read(sample) -> None:
    wrong = GSM8K().score(sample("#### 1,8.0", "7"))
    assert (wrong.score, wrong.feedback) == (0, "Your answer was 18.0, which is wrong.")
    assert GSM8K().score(sample("7", "7")).feedback == "There was no number after #### in your answer."
    assert GSM8K().score(sample("#### 7", "7")).feedback is None


def test_an_unknown_gsm8k_method_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"strict, flexible.*'loose'"):
        GSM8K("loose")


@pytest.mark.parametrize(
    ("text", "score", "feedback"),
    [
        ("<answer>\nB\n</answer>", 1, None),
        ("<answer>(b).</answer>", 1, None),
        ("<answer>A</answer> no: <answer>B</answer>", 1, None),
        ("<answer>B</answer> no: <answer>A</answer>", 0, "Your answer was A, which is wrong."),
        (
            "<answer>B: 3 N</answer>",
            0,
            "Your answer must be one letter inside <answer> </answer>; there was none.",
        ),
        ("B", 0, "Your answer must be one letter inside <answer> </answer>; there was none."),
        ("<answer>B", 0, "Your answer must be one letter inside <answer> </answer>; there was none."),
    ],
)
def test_multiple_choice_wants_one_letter_in_the_last_answer_block(sample, text, score, feedback) -> None:
    result = MultipleChoice().score(sample(text, "B"))
    assert (result.score, result.feedback) == (score, feedback)


@pytest.mark.parametrize(
    ("text", "score", "feedback"),
    [
        ("85", 1, None),
        (" 85\n", 1, None),
        ("75", 0, "75 is too low."),
        ("95", 0, "95 is too high."),
        ("84", 0, "84: the last digit is wrong."),
        ("85 apples", 0, "85 apple is not a number."),
        ("085", 0, "085 is too high."),
        ("1234567", 0, "1234567 is not a number."),
        ("", 0, " is not a number."),
    ],
)
def test_arithmetic_feedback_says_what_is_wrong_in_one_line(sample, text, score, feedback) -> None:
    result = Arithmetic().score(sample(text, "85"))
    assert (result.score, result.feedback) == (score, feedback)


def test_exact_match_compares_the_text(sample) -> None:
    assert ExactMatch().score(sample(" Paris ", "Paris")).score == 1
    assert ExactMatch().score(sample("paris", "Paris")).feedback == "Your answer was paris, which is wrong."
    assert ExactMatch(ignore_case=True).score(sample("paris", "Paris")).score == 1
    assert ExactMatch().score(sample("", "Paris")).feedback == "Your answer was empty."


def test_the_coin_is_fair_repeatable_and_blind_to_the_answer(sample) -> None:
    coin = Random(seed=3)
    rows = [sample(str(i), truth="7") for i in range(2000)]
    scores = [result.score for result in coin(rows)]
    assert scores == [result.score for result in coin([sample(str(i), truth="8") for i in range(2000)])]
    assert set(scores) == {0.0, 1.0}
    assert abs(sum(scores) / 2000 - 0.5) < 0.05  # 4.5 standard deviations
    assert scores != [result.score for result in Random(seed=4)(rows)]


def test_the_source_picks_the_verifier_and_results_keep_their_order(sample) -> None:
    rows = [
        sample("#### 7", "7", "openai/gsm8k"),
        sample("7", "7", "lit_rl/arithmetic_sub"),
        sample("<answer>A</answer>", "A", "sciknoweval/physics"),
        sample("7", "7", "openai/gsm8k"),
    ]
    assert [result.score for result in BySource()(rows)] == [1, 1, 1, 0]
    assert BySource().score(rows[3]).score == 0


def test_the_longest_source_name_wins_and_yours_come_first(sample) -> None:
    class Always(Reward):
        def score(self, sample) -> RewardResult:
            return RewardResult(0.25)

    sources = BySource({"lit_rl/arithmetic_add": Always(), "lit_rl": Always()})
    rows = [sample("7", "7", "lit_rl/arithmetic_add"), sample("7", "7", "lit_rl/arithmetic_sub")]
    assert [result.score for result in sources(rows)] == [0.25, 1]


def test_an_unknown_source_names_the_known_ones_and_the_way_out(sample) -> None:
    with pytest.raises(DataError, match=r"'my/data'.*openai/gsm8k.*custom_reward_function.path"):
        BySource()([sample("7", source="my/data")])


def test_a_row_without_reference_answer_names_the_column(sample) -> None:
    with pytest.raises(DataError, match=r"'reward_model' \(data.reward_model_key\).*found '7'"):
        Arithmetic()([sample("7", reward_model="7")])


@pytest.mark.parametrize(
    ("reward", "right", "wrong", "none"),
    [
        (GSM8K(), "#### 7", "#### 8", "seven"),
        (MultipleChoice(), "<answer>B</answer>", "<answer>A</answer>", "7"),
        (Arithmetic(), "7", "8", "seven"),
        (ExactMatch(), "7", "8", "  "),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_no_answer_is_counted_apart_from_a_wrong_one(sample, reward, right, wrong, none) -> None:
    truth = "B" if isinstance(reward, MultipleChoice) else "7"
    scores = RewardSum({"f": reward})([sample(text, truth) for text in (right, wrong, none, none)])
    assert scores.metrics["f/no_answer"] == 0.5
    assert scores.rewards.tolist() == [1, 0, 0, 0]
