import pytest

from lit_rl.errors import ConfigError, DataError
from lit_rl.rewards.base import RewardSum
from lit_rl.rewards.by_source import BySource
from lit_rl.rewards.custom import from_function, load_function
from lit_rl.rewards.exact_match import ExactMatch
from lit_rl.rewards.reward import Sample


@pytest.fixture
def write(tmp_path):
    def write_file(text: str) -> str:
        path = tmp_path / "score.py"
        path.write_text(text)
        return str(path)

    return write_file


def test_verls_signature_gets_the_row_and_may_say_more_than_a_score(sample, write) -> None:
    path = write(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    right = solution_str == ground_truth and extra_info['index'] == 3 and data_source == 'mine'\n"
        "    return {'score': float(right), 'feedback': 'no', 'length': len(solution_str), 'pred': 'text'}\n"
    )
    result = load_function(path, "compute_score").score(sample("7", "7", "mine", extra_info={"index": 3}))
    assert (result.score, result.feedback, result.metrics) == (1.0, "no", {"length": 1.0})


def test_verls_function_gets_only_what_it_names(sample) -> None:
    assert from_function(lambda solution_str: 0.5).score(Sample(prompt="p", completion="7")).score == 0.5
    everything = from_function(lambda solution_str, **kwargs: len(kwargs))
    assert everything.score(sample("7")).score == 3


@pytest.mark.field("data/5")
def test_trls_signature_gets_aligned_columns_with_plain_values(sample) -> None:
    seen = {}

    def f(prompts, completions, meta, tags=None, **kwargs):
        seen.update(prompts=prompts, completions=completions, meta=meta, tags=tags, rest=sorted(kwargs))
        return [float(c[0]["content"]) for c in completions]

    metas = [{"a": 1, "b": None}, {"a": 2, "b": "x"}]
    rows = [sample(str(i), meta=metas[i // 2], tags=["t"] * i) for i in range(4)]
    assert [result.score for result in from_function(f)(rows)] == [0, 1, 2, 3]
    assert seen["meta"] == [metas[0], metas[0], metas[1], metas[1]]
    assert seen["tags"] == [[], ["t"], ["t", "t"], ["t", "t", "t"]]
    assert seen["completions"][1] == [{"role": "assistant", "content": "1"}]
    assert seen["prompts"][0] == [{"role": "user", "content": "3+4=?"}]
    assert seen["rest"] == ["completion_ids", "data_source", "reward_model"]


def test_trls_completions_are_texts_where_prompts_are(sample) -> None:
    f = from_function(
        lambda completions, completion_ids: [
            len(c) + len(i) for c, i in zip(completions, completion_ids, strict=True)
        ]
    )
    assert f.score(Sample(prompt="3+4=", completion="7", completion_ids=[5, 1])).score == 3


@pytest.mark.field("data/5")
def test_an_unknown_column_is_refused_before_the_first_rollout(sample) -> None:
    reward = RewardSum({"f": from_function(lambda completions, answer, tags=None: [1.0])})
    with pytest.raises(
        ConfigError, match=r"reward_funcs.f needs the columns \['answer'\].*\['meta', 'prompt'\]"
    ):
        reward.check_columns(["prompt", "meta"])
    reward.check_columns(["prompt", "answer"])
    with pytest.raises(DataError, match=r"needs the columns \['answer'\]"):
        reward([sample("7")])


def test_your_function_takes_the_place_of_by_source_and_joins_others(write) -> None:
    path = write("def mine(solution_str):\n    return 1.0\n")
    settings = {"path": path, "name": "mine"}
    replaced = RewardSum({"by_source": BySource(), "exact": ExactMatch()}, [0.5, 1.0], settings)
    assert replaced.names == ["mine", "exact"]
    assert RewardSum({"exact": ExactMatch()}, custom_reward_function=settings).names == ["exact", "mine"]
    assert RewardSum(custom_reward_function=settings).names == ["mine"]


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        (None, "compute_score", "custom_reward_function.path must be a Python file .*does not exist"),
        ("x = 1", "compute_score", "custom_reward_function.name must be a function in .*'compute_score'"),
        ("x = 1", "x", "custom_reward_function.name must be a function in .*'x'"),
        ("import nothing_like_it", "f", "path: running .* raised ModuleNotFoundError"),
        ("def f(text): pass", "f", r"must take solution_str .*completions .*found \['text'\]"),
        ("def f(solution_str, answer): pass", "f", r"'f' needs \['answer'\]"),
    ],
)
def test_a_file_that_cannot_score_is_refused(write, text, name, message) -> None:
    path = "nowhere.py" if text is None else write(text)
    with pytest.raises(ConfigError, match=message):
        load_function(path, name)
