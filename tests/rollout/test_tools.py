"""ToolEnvironment: every way a call can go, and what the template is shown."""

import time
from pathlib import Path
from typing import Any

import pytest

from lit_rl.assets.calculator import calculator
from lit_rl.errors import ConfigError
from lit_rl.rollout.tools import ToolEnvironment


def slow(seconds: float) -> str:
    """Waits.

    Args:
        seconds: that it waits
    """
    time.sleep(seconds)
    return "done"


def pair(a: int, b: int = 2) -> dict[str, int]:
    """Both numbers.

    Args:
        a: the first
        b: the second
    """
    return {"a": a, "b": b}


def environment(**settings: Any) -> ToolEnvironment:
    return ToolEnvironment(**{"tools": [calculator, slow, pair], "tool_timeout": 0.05, **settings})


def said(text: str) -> list[str]:
    return [message["content"] for message in environment().step(text).messages]


@pytest.mark.parametrize(
    ("text", "answers"),
    [
        ('<tool_call>{"name": "calculator", "arguments": {"expression": "37*24"}}</tool_call>', ["888"]),
        ('I ask.\n<tool_call>\n{"name": "pair", "arguments": {"a": 1}}\n</tool_call>', ['{"a": 1, "b": 2}']),
        ('<tool_call>{"name": "pair", "arguments": "{\\"a\\": 1}"}</tool_call>', ['{"a": 1, "b": 2}']),
        ('<tool_call>{"name": "pair", "arguments": {"a": 1}}', ['{"a": 1, "b": 2}']),
        ('<tool_call>{"name": "nothing"}</tool_call>', ["error: there is no tool 'nothing'; there are "]),
        ('<tool_call>{"name": ["pair"]}</tool_call>', ["error: a call must be JSON"]),
        ("<tool_call>pair(1)</tool_call>", ["error: a call must be JSON of the form"]),
        ("<tool_call>[1, 2]</tool_call>", ["error: a call must be JSON"]),
        ('<tool_call>{"name": "pair", "arguments": [1]}</tool_call>', ["error: a call must be JSON"]),
        ('<tool_call>{"arguments": {}}</tool_call>', ["error: a call must be JSON"]),
        (
            '<tool_call>{"name": "pair", "arguments": {"c": 1}}</tool_call>',
            ["error: TypeError: pair() got an"],
        ),
        (
            '<tool_call>{"name": "calculator", "arguments": {"expression": "1/0"}}</tool_call>',
            ["error: ZeroDivisionError: division by zero"],
        ),
        (
            '<tool_call>{"name": "slow", "arguments": {"seconds": 5}}</tool_call>',
            ["error: slow took longer than 0.05 s"],
        ),
    ],
)
def test_a_call_is_answered_whatever_comes_of_it(text: str, answers: list[str]) -> None:
    turn = environment().step(text)
    assert not turn.done and len(turn.messages) == len(answers)
    for message, wanted in zip(turn.messages, answers, strict=True):
        assert message["role"] == "tool" and message["content"].startswith(wanted)
    is_error = answers[0].startswith("error:")
    assert turn.feedback == (turn.messages[0]["content"] if is_error else None)


def test_several_calls_of_a_turn_are_answered_in_order() -> None:
    call = '<tool_call>{{"name": "calculator", "arguments": {{"expression": "{}"}}}}</tool_call>'
    assert said(call.format("1+1") + " and " + call.format("2*(3-1)") + call.format("x")) == [
        "2",
        "4",
        "error: ValueError: an expression holds numbers, + - * / and parentheses",
    ]


def test_a_turn_without_a_call_is_the_last_one() -> None:
    turn = environment().step("888")
    assert turn.done and turn.messages == [] and turn.feedback is None


def test_the_template_gets_the_schemas() -> None:
    (schema,) = ToolEnvironment([calculator]).tool_schemas()
    assert schema["function"]["name"] == "calculator"
    assert schema["function"]["parameters"]["required"] == ["expression"]


class Counter(ToolEnvironment):
    """A tool with state."""

    def __init__(self) -> None:
        self.count = 0
        super().__init__([self.more])

    def more(self, by: int) -> int:
        """Count on.

        Args:
            by: how far
        """
        self.count += by
        return self.count


def test_a_row_s_tools_have_a_state_of_its_own() -> None:
    configured = Counter()
    call = '<tool_call>{"name": "more", "arguments": {"by": 2}}</tool_call>'
    first, second = configured.fresh(), configured.fresh()
    assert [first.step(call).messages[0]["content"] for _ in range(2)] == ["2", "4"]
    assert second.step(call).messages[0]["content"] == "2" and configured.count == 0


def test_tools_are_named_by_module_or_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        'def add(a: int) -> int:\n    """Adds.\n\n    Args:\n        a: x\n    """\n'
    )
    tools = ToolEnvironment(["lit_rl.assets.calculator.calculator", f"{tmp_path}/mine.py:add"]).tools
    assert list(tools) == ["calculator", "add"] and tools["calculator"] is calculator


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"tools": []}, "rollout.environment.tools must hold functions"),
        ({"tools": [pair, pair]}, "each of another name"),
        ({"tools": ["no.such.module"]}, "found 'no.such.module'"),
        ({"tools": ["lit_rl.assets.calculator.nothing"]}, "there is no function 'nothing'"),
        ({"tools": ["missing.py:add"]}, "rollout.environment.tools must be a Python file"),
        ({"tools": [lambda x: x]}, "needs annotated arguments and a docstring"),
        ({"max_turns": 0}, "rollout.environment.max_turns must be >= 1"),
        ({"tool_timeout": 0}, "rollout.environment.tool_timeout > 0"),
    ],
)
def test_what_cannot_be_a_tool_is_refused(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as error:
        environment(**settings)
    assert named in str(error.value)
