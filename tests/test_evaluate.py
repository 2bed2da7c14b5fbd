"""`python -m lit_rl.evaluate`: scores by source, pass@k and maj@k, paired comparison, and what is refused."""

import json
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from lit_rl.configuration.report import user_error
from lit_rl.errors import DataError
from lit_rl.evaluate import main
from lit_rl.functional.evaluation import bootstrap_mean, majority_at_k, pass_at_k, sign_flip_p

CONF = Path(__file__).resolve().parents[1] / "conf"


def responses(path: Path, rows: list[tuple[str, str, list[str]]]) -> Path:
    """A file of (source, ground truth, responses)."""
    pq.write_table(
        pa.Table.from_pylist(
            [
                {
                    "prompt": "q",
                    "data_source": source,
                    "reward_model": {"ground_truth": truth},
                    "responses": answers,
                }
                for source, truth, answers in rows
            ]
        ),
        path,
    )
    return path


ROWS = [
    ("openai/gsm8k", "12", ["#### 12", "#### 12.0", "#### 7", "no number"]),
    ("openai/gsm8k", "5", ["#### 4", "#### 4", "#### 4", "#### 5"]),
    ("sciknoweval/x", "B", ["<answer>b</answer>", "<answer>A</answer>", "B", "<answer>(B).</answer>"]),
]


def test_scores_by_source_worked_by_hand(tmp_path: Path) -> None:
    found = main([f"data.path={responses(tmp_path / 'r.parquet', ROWS)}"], CONF)["scores"]
    gsm8k, science = found["openai/gsm8k"], found["sciknoweval/x"]
    assert gsm8k["mean"]["mean"] == pytest.approx((2 / 4 + 1 / 4) / 2)
    # pass@2 = 1 - C(n - c, 2) / C(n, 2): 1 - 1/6 and 1 - 3/6
    assert gsm8k["pass@2"]["mean"] == pytest.approx((5 / 6 + 3 / 6) / 2)
    assert gsm8k["pass@4"]["mean"] == 1.0 and science["pass@1"]["mean"] == 0.5
    # all four votes: 12 wins its prompt, 4 wins the other; B wins
    assert gsm8k["maj@4"]["mean"] == 0.5 and science["maj@4"]["mean"] == 1.0
    assert found["all"]["prompts"] == 3
    # one of eight has no number; of the four, one is no letter in its block
    assert gsm8k["by_source/no_answer"]["mean"] == 1 / 8 and science["by_source/no_answer"]["mean"] == 1 / 4
    assert json.loads((tmp_path / "r.scores.json").read_text())["scores"] == found


def test_pass_at_k_is_the_mean_over_all_subsets() -> None:
    is_right = [True, False, False, True, False]
    for k in range(1, 6):
        subsets = list(combinations(is_right, k))
        assert pass_at_k(2, 5, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_majority_counts_answers_and_none_has_no_vote() -> None:
    answers, is_right = ["a", "b", "b", None, None, None], [False, True, True, False, False, False]
    assert majority_at_k(answers, is_right, 6, draws=1, seed=0) == 1.0
    assert majority_at_k([None, None], [False, False], 2, draws=1, seed=0) == 0.0
    # of the subsets of two of [a, b, b]: ab, ab tie and a came first, bb is right
    third = majority_at_k(["a", "b", "b"], [False, True, True], 2, draws=3000, seed=0)
    assert third == pytest.approx(1 / 3, abs=0.03)


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    generator = torch.Generator().manual_seed(0)
    covered = 0
    for trial in range(200):
        values = (torch.rand(60, generator=generator) < 0.3).double()
        interval = bootstrap_mean(values, draws=400, seed=trial)
        covered += interval.low <= 0.3 <= interval.high
    assert 0.88 <= covered / 200 <= 0.99


def test_a_comparison_says_which_is_better_or_that_nothing_is_shown(tmp_path: Path) -> None:
    right, wrong = ["#### 1"] * 2, ["#### 2"] * 2
    good = responses(tmp_path / "good.parquet", [("openai/gsm8k", "1", right)] * 20)
    bad = responses(tmp_path / "bad.parquet", [("openai/gsm8k", "1", wrong)] * 20)
    mixed = [("openai/gsm8k", "1", right if i % 2 else wrong) for i in range(20)]
    turned = [("openai/gsm8k", "1", wrong if i % 2 else right) for i in range(20)]
    verdicts = {
        (str(a), str(b)): main([f"data.path={a}", f"data.compare={b}"], CONF)["comparison"]["verdict"]
        for a, b in [
            (good, bad),
            (bad, good),
            (
                responses(tmp_path / "mixed.parquet", mixed),
                responses(tmp_path / "turned.parquet", turned),
            ),
        ]
    }
    assert list(verdicts.values()) == ["data.path is better", "data.compare is better", "no difference shown"]


def test_few_prompts_show_no_difference_however_large(tmp_path: Path) -> None:
    good = responses(tmp_path / "good.parquet", [("openai/gsm8k", "1", ["#### 1"])] * 5)
    bad = responses(tmp_path / "bad.parquet", [("openai/gsm8k", "1", ["#### 2"])] * 5)
    found = main([f"data.path={good}", f"data.compare={bad}"], CONF)["comparison"]
    assert found["difference"]["low"] == 1.0 and found["p"] == 2 / 2**5
    assert found["verdict"] == "no difference shown"


def test_sources_are_compared_on_their_own_too(tmp_path: Path) -> None:
    right, wrong = ("openai/gsm8k", "1", ["#### 1"]), ("openai/gsm8k", "1", ["#### 2"])
    same = ("sciknoweval/x", "B", ["<answer>B</answer>"])
    good = responses(tmp_path / "good.parquet", [right, same] * 10)
    bad = responses(tmp_path / "bad.parquet", [wrong, same] * 10)
    sources = main([f"data.path={good}", f"data.compare={bad}"], CONF)["comparison"]["sources"]
    assert sources["openai/gsm8k"]["verdict"] == "data.path is better"
    assert sources["sciknoweval/x"] == {
        "difference": {"mean": 0.0, "low": 0.0, "high": 0.0},
        "p": 1.0,
        "verdict": "no difference shown",
    }


def test_sign_flips_are_counted_exactly_or_drawn() -> None:
    # 3 and 1 of one sign, 2 of the other: sums of +-3 +-1 +-2 as far from 0 as 2 are +-2, +-4, +-6
    assert sign_flip_p(torch.tensor([3.0, 1.0, -2.0, 0.0])) == 6 / 8
    generator = torch.Generator().manual_seed(0)
    chances = [sign_flip_p(torch.randn(30, generator=generator), draws=400, seed=seed) for seed in range(200)]
    assert 0.01 < sum(p < 0.05 for p in chances) / 200 < 0.1  # no difference is there
    assert sign_flip_p(torch.ones(30)) == 1 / 10_001


def test_other_prompts_cannot_be_compared(tmp_path: Path) -> None:
    first = responses(tmp_path / "a.parquet", [("openai/gsm8k", "1", ["#### 1"])] * 3)
    other = responses(tmp_path / "b.parquet", [("openai/gsm8k", t, ["#### 1"]) for t in ("1", "2", "1")])
    with pytest.raises(DataError, match=r"same prompts in the same order.*first that differs is 1"):
        main([f"data.path={first}", f"data.compare={other}"], CONF)


def test_a_file_without_sources_is_one_source(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": ["q"], "responses": [["a", "bc"]]}), tmp_path / "r.parquet")
    score = tmp_path / "score.py"
    score.write_text("def mine(completions, **columns):\n    return [float(len(c)) for c in completions]\n")
    own = [f"reward.custom_reward_function.path={score}", "reward.custom_reward_function.name=mine"]
    found = main([f"data.path={tmp_path / 'r.parquet'}", *own], CONF)["scores"]
    assert list(found) == ["all"] and found["all"]["mean"]["mean"] == 1.5
    with pytest.raises(DataError, match="'topic'"):
        main([f"data.path={tmp_path / 'r.parquet'}", *own, "data.data_source_key=topic"], CONF)


def test_a_reward_of_your_own_scores_the_responses(tmp_path: Path) -> None:
    score = tmp_path / "score.py"
    score.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return float(len(solution_str))\n"
    )
    path = responses(tmp_path / "r.parquet", [("any", "x", ["a", "abc"])])
    found = main([f"data.path={path}", f"reward.custom_reward_function.path={score}"], CONF)
    assert found["scores"]["any"]["mean"]["mean"] == 2.0


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ([], "data.path"),
        (["data.path=missing.parquet"], "missing.parquet"),
        (["data.response=x"], "data.response"),
        (["reward.on_error=ignore"], "reward.on_error"),
    ],
)
def test_what_cannot_be_scored_is_named(overrides: list[str], named: str) -> None:
    with pytest.raises(Exception) as caught:
        main(overrides, CONF)
    mistake = user_error(caught.value)
    assert mistake is not None and named in str(mistake)


def test_a_row_without_a_list_of_texts_is_named(tmp_path: Path) -> None:
    table = pa.table(
        {
            "prompt": ["q"],
            "data_source": ["openai/gsm8k"],
            "reward_model": [{"ground_truth": "1"}],
            "responses": ["x"],
        }
    )
    pq.write_table(table, tmp_path / "r.parquet")
    with pytest.raises(DataError, match=r"row 0, column 'responses' must hold a list of texts"):
        main([f"data.path={tmp_path / 'r.parquet'}"], CONF)


def test_the_command_ends_with_2_and_no_traceback_for_a_users_mistake() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lit_rl.evaluate", "data.path=missing.parquet"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and "missing.parquet" in done.stderr and "Traceback" not in done.stderr
