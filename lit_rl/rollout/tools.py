"""ToolEnvironment: Python functions that the policy calls in the middle of its answer."""

import importlib
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from lit_rl.errors import ConfigError
from lit_rl.rollout.environment import Environment, Message, Turn
from lit_rl.time_limit import OutOfTime, limited
from lit_rl.user_code import module_of

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


class ToolEnvironment(Environment):
    """Runs the tool calls of a turn and answers with what they return; a turn without one is the last.

    A call is `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as the chat templates of Qwen,
    Hermes and SmolLM teach it; a turn may hold several. Whatever goes wrong with a call is its answer, in one
    line that starts with "error:", and feedback: the policy can mend it, and the run goes on.

    A subclass with state gives bound methods: each row's object then has tools of its own.

    Args:
        tools: functions with annotated arguments and a Google docstring, of which the template's schemas are
            made; in yaml `package.module.function` or `file.py:function`.
        max_turns: of the policy; the last one may still be an answer.
        tool_timeout: seconds per call.
        role: of the answers, for templates without the role "tool".
        rows_at_once: rows whose tools may run at the same time, each in a thread, which suits tools that wait
            for something, such as a search; 1 is one row after another.

    Raises:
        ConfigError: no tools, one that cannot be imported or described, two of a name, or a number out of
            range.
    """

    step_timeout = None

    def __init__(
        self,
        tools: Sequence[Callable[..., Any] | str],
        max_turns: int = 8,
        tool_timeout: float = 10.0,
        role: str = "tool",
        rows_at_once: int = 1,
    ) -> None:
        if rows_at_once < 1:
            raise ConfigError(f"{self.key}.rows_at_once must be >= 1 (found {rows_at_once!r}).")
        if max_turns < 1 or tool_timeout <= 0:
            raise ConfigError(
                f"{self.key}.max_turns must be >= 1 (found {max_turns!r}) and {self.key}.tool_timeout > 0 "
                f"(found {tool_timeout!r})."
            )
        functions = [_imported(tool, self.key) if isinstance(tool, str) else tool for tool in tools]
        self.tools = {function.__name__: function for function in functions}
        if not functions or len(self.tools) < len(functions):
            names = [function.__name__ for function in functions]
            raise ConfigError(f"{self.key}.tools must hold functions, each of another name (found {names}).")
        self._schemas = [_schema(function, self.key) for function in functions]
        self.max_turns, self.tool_timeout, self.role = max_turns, tool_timeout, role
        self.rows_at_once = rows_at_once

    def tool_schemas(self) -> list[dict[str, Any]]:
        """One per tool, by transformers."""
        return self._schemas

    def step(self, completion: str) -> Turn:
        """See `Environment.step`."""
        calls = _CALL.findall(completion)
        answers = [self.answer(call) for call in calls]
        errors = [answer["content"] for answer in answers if answer["content"].startswith("error:")]
        return Turn(answers, done=not calls, feedback="\n".join(errors) or None)

    def answer(self, call: str) -> Message:
        """The message that answers one call.

        Args:
            call: what stands between the marks.
        """
        try:
            asked = json.loads(call)
            name, arguments = asked["name"], asked.get("arguments", {})
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
            function = self.tools.get(name)
            is_call = isinstance(arguments, dict)
        except (ValueError, TypeError, KeyError, AttributeError):
            is_call = False
        if not is_call:
            form = '{"name": ..., "arguments": {...}}'
            return self._message(None, f"error: a call must be JSON of the form {form}")
        if function is None:
            return self._message(
                str(name), f"error: there is no tool {name!r}; there are {', '.join(self.tools)}"
            )
        try:
            value = limited(lambda: function(**arguments), self.tool_timeout, f"{self.key}.tool_timeout")
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        except OutOfTime:
            text = f"error: {name} took longer than {self.tool_timeout:g} s"
        except Exception as error:
            text = f"error: {type(error).__name__}: {error}".rstrip(": ")
        return self._message(name, text)

    def _message(self, name: str | None, content: str) -> Message:
        named = {} if name is None else {"name": name}
        return {"role": self.role, **named, "content": content}


def _imported(path: str, key: str) -> Callable[..., Any]:
    """The function at `package.module.function` or `file.py:function`."""
    file, colon, name = path.rpartition(":")
    if colon:
        module: Any = module_of(file, f"{key}.tools")
    else:
        package, _, name = path.rpartition(".")
        try:
            module = importlib.import_module(package)
        except (ImportError, ValueError) as error:
            raise ConfigError(
                f"{key}.tools must hold package.module.function or file.py:function (found {path!r}): "
                f"{error}."
            ) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"{key}.tools: there is no function {name!r} (found {path!r}).")
    return function


def _schema(function: Callable[..., Any], key: str) -> dict[str, Any]:
    from transformers.utils import get_json_schema

    try:
        return get_json_schema(function)
    except Exception as error:  # of several kinds, some of them private
        raise ConfigError(
            f"{key}.tools: {function.__name__} needs annotated arguments and a docstring with an Args "
            f"section: {error}."
        ) from error
