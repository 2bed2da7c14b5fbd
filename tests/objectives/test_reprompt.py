from typing import Any

import pytest
import torch

from lit_rl.data.chat import Chat
from lit_rl.errors import ConfigError
from lit_rl.objectives.reprompt import Reprompt, TeacherPrompt

QUESTION = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "47+38=?"}]


def text(chat: Chat, prompt: TeacherPrompt) -> str:
    assert prompt.ids is not None
    return chat.tokenizer.decode(prompt.ids)


def test_the_default_templates_give_the_documented_text(chat: Chat) -> None:
    both = Reprompt(include_environment_feedback=True)
    assert text(chat, both.teacher_prompt(chat, QUESTION, "85", "75 is too low.")) == (
        "<|system|>Be brief.<|end|><|user|>47+38=?\nCorrect solution:\n\n85\n\n"
        "\nThe following is feedback from your unsuccessful earlier attempt:\n\n75 is too low.\n\n"
        "\n\nCorrectly solve the original question.\n<|end|><|assistant|>"
    )


def test_a_string_prompt_stays_a_string(chat: Chat) -> None:
    ids = Reprompt().teacher_prompt(chat, "47+38=", "85", None)
    assert text(chat, ids).startswith("47+38=\nCorrect solution:\n\n85")


def test_nothing_to_show_is_no_teacher(chat: Chat) -> None:
    reprompt = Reprompt(include_environment_feedback=True)
    assert reprompt.teacher_prompt(chat, QUESTION, None, None) == TeacherPrompt()
    assert reprompt.teacher_prompt(chat, QUESTION, None, "  \n") == TeacherPrompt()
    assert Reprompt().teacher_prompt(chat, QUESTION, None, "too low") == TeacherPrompt()


def test_feedback_only_without_a_solution(chat: Chat) -> None:
    reprompt = Reprompt(include_environment_feedback=True, environment_feedback_only_without_solution=True)
    assert "too low" not in text(chat, reprompt.teacher_prompt(chat, QUESTION, "85", "too low"))
    assert "too low" in text(chat, reprompt.teacher_prompt(chat, QUESTION, None, "too low"))


@pytest.mark.field("sdpo/9")
@pytest.mark.parametrize("solution", ["{}", "%s", r"\frac{a}{b}", "{feedback}", "{0}", "{prompt"])
def test_model_text_appears_verbatim(chat: Chat, solution: str) -> None:
    question = [{"role": "user", "content": r"\frac{a}{b} and {x} and {solution}"}]
    shown = text(chat, Reprompt().teacher_prompt(chat, question, solution, None))
    assert question[0]["content"] in shown
    assert f"Correct solution:\n\n{solution}\n\n" in shown


@pytest.mark.parametrize(
    ("success", "expected"),
    [
        ([False, True, False, True], [1, 3, 1, 1]),  # a row never demonstrates to itself
        ([False, True, False, False], [1, None, 1, 1]),
        ([False] * 4, [None] * 4),
    ],
)
def test_the_first_other_success_demonstrates(success: list[bool], expected: list[int | None]) -> None:
    assert Reprompt().demonstrations(success, ["a", "b", "c", "d"], 4) == expected


@pytest.mark.field("sdpo/9")
def test_a_demonstration_comes_from_the_own_group() -> None:
    shown = Reprompt().demonstrations([True, False, False, True], ["p", "q", "r", "s"], 2)
    assert shown == [None, 0, 3, None]


def test_own_success_may_demonstrate_when_asked() -> None:
    own = Reprompt(dont_reprompt_on_self_success=False)
    assert own.demonstrations([False, True], ["a", "b"], 2) == [1, 1]


def test_the_choice_among_several_successes() -> None:
    success, texts = [True, True, True, False], ["long text", "ab", "abc", "x"]
    assert Reprompt(demonstration="shortest").demonstrations(success, texts, 4)[3] == 1
    draw = Reprompt(demonstration="random").demonstrations
    numbers = [0.0, 0.33, 0.34, 0.67, 0.99]
    assert [draw(success, texts, 4, [number] * 4)[3] for number in numbers] == [0, 0, 1, 2, 2]


@pytest.mark.field("data/4")
def test_thinking_is_removed_only_when_asked() -> None:
    keep, drop = Reprompt(), Reprompt(remove_thinking_from_demonstration=True)
    closed, unclosed, only = "<think>a\nb</think> 85", "<think>never closed", "<think>all</think>"
    assert keep.demonstration_text(closed) == closed and drop.demonstration_text(closed) == "85"
    assert drop.demonstration_text(unclosed) == unclosed, "an unclosed block stays"
    texts = [drop.demonstration_text(text) for text in (only, "7")]
    assert drop.demonstrations([True, False], texts, 2) == [None, None], "no text is no demonstration"


@pytest.mark.field("sdpo/1")
def test_an_over_long_reprompt_keeps_question_and_instruction(chat: Chat) -> None:
    solution = "".join(str(i % 10) for i in range(400))
    whole = Reprompt(max_reprompt_len=1024).teacher_prompt(chat, QUESTION, solution, None)
    assert solution in text(chat, whole) and not whole.is_cut
    prompt = Reprompt(max_reprompt_len=256).teacher_prompt(chat, QUESTION, solution, None)
    shown = text(chat, prompt)
    assert prompt.ids is not None and len(prompt.ids) == 256 and prompt.is_cut and not prompt.is_too_long
    assert "47+38=?" in shown and shown.endswith(
        "Correctly solve the original question.\n<|end|><|assistant|>"
    )
    assert "..." in shown and solution[-50:] in shown and solution not in shown


def length_of(chat: Chat, solution: str | None, feedback: str | None) -> int:
    """Tokens of the uncut prompt."""
    reprompt = Reprompt(include_environment_feedback=True)
    prompt = reprompt.teacher_prompt(chat, QUESTION, solution, feedback)
    assert prompt.ids is not None
    return len(prompt.ids)


def test_the_solution_is_cut_before_the_feedback(chat: Chat) -> None:
    limit = length_of(chat, "9" * 100, "75 is too low.") - 60
    reprompt = Reprompt(max_reprompt_len=limit, include_environment_feedback=True)
    prompt = reprompt.teacher_prompt(chat, QUESTION, "9" * 100, "75 is too low.")
    shown = text(chat, prompt)
    assert "75 is too low." in shown and "9" * 100 not in shown and "...99" in shown
    assert prompt.has_demonstration and prompt.has_feedback


def test_the_feedback_is_cut_when_no_solution_is_left(chat: Chat) -> None:
    limit = length_of(chat, None, "x" * 60) - 20
    reprompt = Reprompt(max_reprompt_len=limit, include_environment_feedback=True)
    prompt = reprompt.teacher_prompt(chat, QUESTION, "85", "x" * 60)
    shown = text(chat, prompt)
    assert "Correct solution" not in shown and "...xx" in shown and "47+38=?" in shown
    assert not prompt.has_demonstration and prompt.has_feedback and prompt.is_cut


def test_a_question_that_does_not_fit_has_no_teacher_and_is_counted(chat: Chat) -> None:
    assert Reprompt(max_reprompt_len=30).teacher_prompt(chat, QUESTION, "85", None) == TeacherPrompt(
        is_cut=True, is_too_long=True
    )


@pytest.mark.field("sdpo/9")
@pytest.mark.parametrize("token", ["<|end|>", "<|user|>", "<pad>", "\ufdd0", "\ufdd01\ufdd1"])
def test_the_spelling_of_a_special_token_in_model_text_is_text(chat: Chat, token: str) -> None:
    """A solution that writes <|end|><|user|> must neither end the turn nor open one."""
    both = Reprompt(include_environment_feedback=True)
    solution, feedback = f"8{token}5", f"{token}{token} no"
    ids = both.teacher_prompt(chat, QUESTION, solution, feedback).ids
    plain = both.teacher_prompt(chat, QUESTION, "85", "no").ids
    assert ids is not None and plain is not None
    special = set(chat.tokenizer.all_special_ids) - {chat.tokenizer.unk_token_id}
    assert [i for i in ids if i in special] == [i for i in plain if i in special]
    if token.startswith("<"):
        shown = chat.tokenizer.decode(ids)
        assert f"Correct solution:\n\n{solution}\n\n" in shown and f"attempt:\n\n{feedback}\n\n" in shown


def test_the_turns_around_the_question_stay(chat: Chat) -> None:
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1+1=?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "47+38=?"},
    ]
    context = Reprompt().context(turns, "85", None)
    assert context is not None and context[:3] == turns[:3] and context[3]["role"] == "user"
    assert context[3]["content"].startswith("47+38=?\nCorrect solution:\n\n85")
    assert turns[3]["content"] == "47+38=?", "the student's prompt is left alone"
    shown = text(chat, Reprompt().teacher_prompt(chat, turns, "85", None))
    assert shown.startswith(
        "<|system|>Be brief.<|end|><|user|>1+1=?<|end|><|assistant|>2<|end|><|user|>47+38=?"
    )


@pytest.mark.parametrize(
    ("source", "said", "column", "expected"),
    [
        ("reward_or_column", "too low", "hint", "too low"),
        ("reward_or_column", " \n", "hint", "hint"),
        ("reward_or_column", None, None, None),
        ("reward_and_column", "too low", "hint", "too low\nhint"),
        ("reward_and_column", None, "hint", "hint"),
        ("reward_and_column", "", None, None),
        ("reward", "too low", "hint", "too low"),
        ("reward", None, "hint", None),
        ("column", "too low", "hint", "hint"),
        ("column", "too low", None, None),
    ],
)
def test_the_reward_speaks_before_the_column(
    source: Any, said: str | None, column: str | None, expected: str | None
) -> None:
    reprompt = Reprompt(include_environment_feedback=True, feedback_source=source)
    assert reprompt.feedback(said, column) == expected
    assert Reprompt(feedback_source=source).feedback(said, column) is None, "off is off"


def test_feedback_from_a_column_needs_the_column() -> None:
    reprompt = Reprompt(include_environment_feedback=True, feedback_source="column")
    reprompt.check_columns(["prompt", "hint"], "hint")
    with pytest.raises(ConfigError, match=r"algo\.reprompt\.feedback_source .*'hint'.*'prompt'"):
        reprompt.check_columns(["prompt"], "hint")
    Reprompt(include_environment_feedback=True).check_columns(["prompt"], "hint")


@pytest.mark.field("sdpo/10")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_success_is_not_missed_by_rounding(dtype: torch.dtype) -> None:
    weights = torch.tensor([0.7, 0.2, 0.1], dtype=dtype)
    total = (weights * torch.ones(3, dtype=dtype)).sum()
    rewards = torch.stack([total, torch.tensor(0.999, dtype=dtype), torch.tensor(float("nan"), dtype=dtype)])
    assert Reprompt().is_success(rewards).tolist() == [True, False, False]


@pytest.mark.parametrize(
    "settings",
    [
        {"reprompt_template": "{solution}"},
        {"reprompt_template": "{prompt}{hint}"},
        {"solution_template": "no slot"},
        {"max_reprompt_len": 0},
        {"use_successful_as_teacher": False},
    ],
)
def test_what_cannot_work_is_refused(settings: dict) -> None:
    with pytest.raises(ConfigError, match=r"algo\.reprompt\."):
        Reprompt(**settings)
