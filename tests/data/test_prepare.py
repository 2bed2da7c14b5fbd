import json
import re
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from byte_tokenizer import byte_tokenizer

from lit_rl.data.parquet import open_rows
from lit_rl.data.prepare.__main__ import main
from lit_rl.data.prepare.rows import MAKERS
from lit_rl.data.prompts import PromptDataModule
from lit_rl.errors import ConfigError, DataError

HERE = Path(__file__).parent


def stored(name: str) -> list[dict]:
    return pq.read_table(HERE / name).to_pylist()


def lines(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_gsm8k_from_raw_rows_is_the_set_as_it_is_used(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    rows = stored("gsm8k_8.parquet")
    raw = [{name: row["extra_info"][name] for name in ("question", "answer")} for row in rows]
    out = tmp_path / "out"
    assert main(["gsm8k", "--train", lines(tmp_path / "raw.jsonl", raw), "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"{out / 'train.parquet'}: 8 rows\n"
    made = pq.read_table(out / "train.parquet").to_pylist()
    for i, (mine, theirs) in enumerate(zip(made, rows, strict=True)):
        assert mine == {**theirs, "extra_info": {**theirs["extra_info"], "index": i}}
    assert not list(out.glob("*.part"))


def test_sciknoweval_from_raw_rows_is_the_set_as_it_is_used(tmp_path: Path) -> None:
    rows = stored("sciknoweval_8.parquet")
    for row in rows:
        asked = row["prompt"][1]["content"].removesuffix("\nPlease reason step by step.")
        question, _, options = asked.rpartition("\n\nA: ")
        texts = [text.partition(": ")[2] for text in f"A: {options}".split("\n")]
        raw = {
            "question": question,
            "choices": {"text": texts, "label": list("ABCD")[: len(texts)]},
            "answerKey": row["reward_model"]["ground_truth"],
            "domain": row["data_source"].partition("/")[2].title(),
        }
        made = MAKERS["sciknoweval"](raw, "train", 3, "here")
        assert made["prompt"] == row["prompt"] and made["data_source"] == row["data_source"]
        assert made["reward_model"] == row["reward_model"]


def test_the_answer_of_math_is_the_last_box_with_its_braces(tmp_path: Path) -> None:
    raw = {"problem": "p", "solution": r"\boxed{1}, so \boxed{\frac{1}{2}} it is", "level": "Level 3"}
    assert MAKERS["math"](raw, "train", 0, "here")["reward_model"]["ground_truth"] == r"\frac{1}{2}"


def test_lines_of_ones_own_become_rows_that_can_be_trained_on(tmp_path: Path) -> None:
    raw = [{"ask": f"q{i}", "right": str(i), "level": i} for i in range(3)]
    source = lines(tmp_path / "mine.jsonl", raw)
    arguments = ["--prompt", "ask", "--answer", "right", "--data-source", "mine", "--out", str(tmp_path)]
    assert main(["jsonl", "--train", source, "--test", source, *arguments]) == 0
    rows = open_rows(str(tmp_path / "train.parquet"), key="data.train_files")
    assert rows[1] == {
        "data_source": "mine",
        "prompt": [{"role": "user", "content": "q1"}],
        "ability": "",
        "reward_model": {"style": "rule", "ground_truth": "1"},
        "extra_info": {"split": "train", "index": 1},
        "level": 1,
    }
    data = PromptDataModule(
        train_files=str(tmp_path / "train.parquet"),
        val_files=None,
        train_batch_size=3,
        tokenizer=byte_tokenizer(),
    )
    data.setup("fit")
    assert sorted(next(iter(data.train_dataloader())).columns["level"]) == [0, 1, 2]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"ask": "a"}\n{"ask": ', r"raw\.jsonl, line 2 is no JSON"),
        (b'{"ask": "a"}\n[1]\n', r"raw\.jsonl, line 2 must be a JSON object \(found list\)"),
        ('{"ask": "\u00e9"}\n'.encode("latin-1"), r"raw\.jsonl, line 1 is not UTF-8"),
        (b'{"ask": "a"}\n\n{"ask": null}\n', r"raw\.jsonl, line 3, column 'ask' must be text or messages"),
        (b'{"ask": "a", "n": 1}\n' * 1000 + b'{"ask": "a", "n": "x"}\n', "rows 1000 to 1001 do not fit"),
        (b"", "would hold no rows"),
    ],
)
def test_a_line_that_cannot_be_used_is_named(
    content: bytes, words: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "raw.jsonl").write_bytes(content)
    arguments = ["--train", str(tmp_path / "raw.jsonl"), "--prompt", "ask", "--out", str(tmp_path / "out")]
    assert main(["jsonl", *arguments]) == 2
    assert re.search(words, capsys.readouterr().err)
    assert not (tmp_path / "out" / "train.parquet").exists()


@pytest.mark.parametrize(
    ("source", "raw", "words"),
    [
        ("gsm8k", {"question": "q", "answer": "5"}, "column 'answer' must hold '#### number'"),
        ("gsm8k", {"answer": "#### 5"}, "column 'question' must be text"),
        ("math", {"problem": "p", "solution": "1"}, r"column 'solution' must hold \boxed{}"),
        (
            "sciknoweval",
            {"question": "q", "answerKey": "E", "choices": {"label": ["A"], "text": ["a"]}},
            "column 'choices' must hold the option 'E'",
        ),
    ],
)
def test_a_raw_row_that_does_not_fit_its_source_is_named(
    source: str, raw: dict, words: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert main([source, "--train", lines(tmp_path / "raw.jsonl", [raw]), "--out", str(tmp_path)]) == 2
    assert "raw.jsonl, line 1, " in (said := capsys.readouterr().err) and words in said


def test_an_unknown_source_or_none_of_its_files_is_named(capsys: pytest.CaptureFixture) -> None:
    assert main(["gsm9k"]) == 2 and main(["sciknoweval"]) == 2
    said = capsys.readouterr().err
    assert "must be one of gsm8k, math, sciknoweval, jsonl, reasoning_gym:TASK (found 'gsm9k')" in said
    assert "The source sciknoweval needs files" in said


def test_a_file_that_prepare_makes_is_hinted_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(DataError, match=r"not a file\); python -m lit_rl\.data\.prepare gsm8k makes it\."):
        open_rows("~/.cache/lit_rl/gsm8k/train.parquet", key="data.train_files")


MakeModule = Callable[..., PromptDataModule]


@pytest.fixture
def gym() -> MakeModule:
    pytest.importorskip("reasoning_gym")
    from lit_rl.data.reasoning_gym import ReasoningGymDataModule

    return lambda **settings: ReasoningGymDataModule(
        **{"train_batch_size": 4, "tokenizer": byte_tokenizer(), "max_prompt_length": None, **settings}
    )


def test_a_task_of_reasoning_gym_needs_no_file_and_brings_its_verifier(gym: MakeModule) -> None:
    from lit_rl.rewards.base import Sample
    from lit_rl.rewards.by_source import BySource

    data = gym(task="chain_sum", train_size=12, val_size=6)
    data.setup("fit")
    assert data.num_rows() == {"train": 12, "val": 6}
    batch = next(iter(data.train_dataloader()))
    row = {name: values[0] for name, values in batch.columns.items()}
    truth = row["reward_model"]["ground_truth"]
    scores = [
        BySource().score(Sample(row["prompt"], text, columns=row)).score
        for text in (f"so <answer>{truth}</answer>", truth, "<answer>no idea</answer>", " ")
    ]
    assert scores[:2] == [1.0, 1.0] and scores[2] < 1 and scores[3] == 0


def test_questions_of_reasoning_gym_are_a_function_of_the_seed(gym: MakeModule) -> None:
    def first(split: str = "train", **settings: object) -> list[str]:
        data = gym(task="chain_sum", train_size=8, val_size=8, **settings)
        source = data.train_files if split == "train" else data.val_files
        return [source[i]["prompt"][0]["content"] for i in range(8)]

    assert first() == first() != first(seed=7)
    assert not set(first()) & set(first("val"))


def test_reasoning_gym_is_refused_without_a_task_or_with_files(gym: MakeModule) -> None:
    for settings, words in (
        ({}, r"data\.task must name a task"),
        ({"task": "chess960"}, r"data\.task must be one of .*chain_sum.*\(found 'chess960'\)"),
        ({"task": "chain_sum", "train_files": "a.parquet"}, r"data\.train_files .* has no effect with"),
        ({"task": "chain_sum", "val_size": -1}, r"data\.val_size must be >= 0"),
    ):
        with pytest.raises(ConfigError, match=words):
            gym(**settings)


def test_prepare_writes_a_task_of_reasoning_gym(gym: MakeModule, tmp_path: Path) -> None:
    arguments = ["--rows", "5", "--test-rows", "3", "--out", str(tmp_path)]
    assert main(["reasoning_gym:chain_sum", *arguments]) == 0
    assert [pq.read_metadata(tmp_path / f"{split}.parquet").num_rows for split in ("train", "test")] == [5, 3]
