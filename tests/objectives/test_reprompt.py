import pytest
import torch

from lit_rl.data.chat import Chat
from lit_rl.errors import ConfigError
from lit_rl.objectives.reprompt import Reprompt

QUESTION = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "47+38=?"}]


def text(chat: Chat, ids: list[int] | None) -> str:
    assert ids is not None
    return chat.tokenizer.decode(ids)


def test_the_default_templates_give_the_documented_text(chat: Chat) -> None:
    both = Reprompt(include_environment_feedback=True)
    assert text(chat, both.prompt_ids(chat, QUESTION, "85", "75 is too low.")) == (
        "<|system|>Be brief.<|end|><|user|>47+38=?\nCorrect solution:\n\n85\n\n"
        "\nThe following is feedback from your unsuccessful earlier attempt:\n\n75 is too low.\n\n"
        "\n\nCorrectly solve the original question.\n<|end|><|assistant|>"
    )


def test_a_string_prompt_stays_a_string(chat: Chat) -> None:
    ids = Reprompt().prompt_ids(chat, "47+38=", "85", None)
    assert text(chat, ids).startswith("47+38=\nCorrect solution:\n\n85")


def test_nothing_to_show_is_no_teacher(chat: Chat) -> None:
    reprompt = Reprompt(include_environment_feedback=True)
    assert reprompt.prompt_ids(chat, QUESTION, None, None) is None
    assert reprompt.prompt_ids(chat, QUESTION, None, "  \n") is None
    assert Reprompt().prompt_ids(chat, QUESTION, None, "too low") is None


def test_feedback_only_without_a_solution(chat: Chat) -> None:
    reprompt = Reprompt(include_environment_feedback=True, environment_feedback_only_without_solution=True)
    assert "too low" not in text(chat, reprompt.prompt_ids(chat, QUESTION, "85", "too low"))
    assert "too low" in text(chat, reprompt.prompt_ids(chat, QUESTION, None, "too low"))


@pytest.mark.field("sdpo/9")
@pytest.mark.parametrize("solution", ["{}", "%s", r"\frac{a}{b}", "{feedback}", "{0}", "{prompt"])
def test_model_text_appears_verbatim(chat: Chat, solution: str) -> None:
    question = [{"role": "user", "content": r"\frac{a}{b} and {x} and {solution}"}]
    shown = text(chat, Reprompt().prompt_ids(chat, question, solution, None))
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
    draws = {draw(success, texts, 4, torch.Generator().manual_seed(seed))[3] for seed in range(30)}
    assert draws == {0, 1, 2}


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
    whole = Reprompt(max_reprompt_len=1024).prompt_ids(chat, QUESTION, solution, None)
    assert solution in text(chat, whole)
    ids = Reprompt(max_reprompt_len=256).prompt_ids(chat, QUESTION, solution, None)
    shown = text(chat, ids)
    assert ids is not None and len(ids) == 256
    assert "47+38=?" in shown and shown.endswith(
        "Correctly solve the original question.\n<|end|><|assistant|>"
    )
    assert "..." in shown and solution[-50:] in shown and solution not in shown


def test_the_solution_is_cut_before_the_feedback(chat: Chat) -> None:
    reprompt = Reprompt(max_reprompt_len=220, include_environment_feedback=True)
    shown = text(chat, reprompt.prompt_ids(chat, QUESTION, "9" * 100, "75 is too low."))
    assert "75 is too low." in shown and "9" * 100 not in shown


def test_a_question_that_does_not_fit_has_no_teacher(chat: Chat) -> None:
    assert Reprompt(max_reprompt_len=30).prompt_ids(chat, QUESTION, "85", None) is None


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
