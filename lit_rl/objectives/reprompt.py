"""Reprompt: what the teacher gets to see, from the successes and the feedback of a group."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch

from lit_rl.data.chat import Chat
from lit_rl.errors import ConfigError

SLOTS = {
    "reprompt_template": ("prompt", "solution", "feedback"),
    "solution_template": ("successful_previous_attempt",),
    "feedback_template": ("feedback_raw",),
}
ELLIPSIS = "..."
TOLERANCE = 1e-6

Prompt = str | list[dict[str, Any]]


class TeacherPrompt(NamedTuple):
    """What one row's teacher is shown.

    Attributes:
        ids: of the prompt, generation header included; None where the row has no teacher.
        has_demonstration, has_feedback: what is in it.
        is_cut: solution or feedback lost its start, or all of itself, to `max_reprompt_len`.
        is_too_long: there was something to show, and the question alone fills `max_reprompt_len`.
    """

    ids: list[int] | None = None
    has_demonstration: bool = False
    has_feedback: bool = False
    is_cut: bool = False
    is_too_long: bool = False


@dataclass(frozen=True)
class Reprompt:
    """Builds the teacher's prompt (source: TRL SDPOConfig).

    A success of the same group is the demonstration; a row is never its own. Templates are filled as data:
    braces, format marks and the spelling of special tokens in a solution or in feedback stay as they are. The
    last user message is replaced, all other messages stay.

    Args:
        use_successful_as_teacher: successes of the group are demonstrations.
        dont_reprompt_on_self_success: a row never demonstrates to itself.
        skip_successful_rows: a row that succeeded has no teacher at all.
        success_reward_threshold: a weighted reward that reaches this (to 1e-6) is a success.
        demonstration: which of several successes: "first", "shortest", or "random" by seed.
        max_reprompt_len: tokens of the teacher's prompt. A longer one loses the start of the solution, then
            of the feedback, marked by "..."; if the question alone does not fit, the row has no teacher.
        reprompt_template: slots {prompt}, {solution}, {feedback}; {prompt} is compulsory.
        solution_template: slot {successful_previous_attempt}.
        feedback_template: slot {feedback_raw}.
        include_environment_feedback: show feedback, where there is any.
        feedback_source: whose feedback: "reward_or_column", the reward's text, else that of the column
            data.privileged_context_key; "reward_and_column", both, the reward's first, on lines of their own;
            or "reward" or "column" alone.
        environment_feedback_only_without_solution: only for rows without a demonstration.
        remove_thinking_from_demonstration: drop closed <think> blocks; an unclosed one stays.

    Raises:
        ConfigError: a template has unknown slots or lacks its own, a length is below 1, or nothing could ever
            be shown to the teacher.
    """

    key: ClassVar[str] = "algo.reprompt"

    use_successful_as_teacher: bool = True
    dont_reprompt_on_self_success: bool = True
    skip_successful_rows: bool = False
    success_reward_threshold: float = 1.0
    demonstration: Literal["first", "shortest", "random"] = "first"
    max_reprompt_len: int = 10240
    reprompt_template: str = "{prompt}{solution}{feedback}\n\nCorrectly solve the original question.\n"
    solution_template: str = "\nCorrect solution:\n\n{successful_previous_attempt}\n\n"
    feedback_template: str = (
        "\nThe following is feedback from your unsuccessful earlier attempt:\n\n{feedback_raw}\n\n"
    )
    include_environment_feedback: bool = False
    feedback_source: Literal["reward_or_column", "reward_and_column", "reward", "column"] = "reward_or_column"
    environment_feedback_only_without_solution: bool = False
    remove_thinking_from_demonstration: bool = False

    def __post_init__(self) -> None:
        if self.max_reprompt_len < 1:
            raise ConfigError(f"{self.key}.max_reprompt_len must be >= 1 (found {self.max_reprompt_len!r}).")
        if not self.use_successful_as_teacher and not self.include_environment_feedback:
            raise ConfigError(
                f"{self.key}.use_successful_as_teacher and {self.key}.include_environment_feedback must not "
                f"both be false: the teacher would have nothing to see."
            )
        for name, slots in SLOTS.items():
            found = re.findall(r"\{(\w*)\}", getattr(self, name))
            unknown = [slot for slot in found if slot not in slots]
            if unknown or slots[0] not in found:
                raise ConfigError(
                    f"{self.key}.{name} must hold {{{slots[0]}}} and no other slot than "
                    f"{', '.join('{' + slot + '}' for slot in slots)} (found {getattr(self, name)!r})."
                )

    @property
    def needs_column(self) -> bool:
        """Whether all feedback comes from a column of the data."""
        return self.include_environment_feedback and self.feedback_source == "column"

    def check_columns(self, available: Sequence[str], key: str) -> None:
        """Refuse data without the column that all feedback is to come from.

        Args:
            available: columns of the data.
            key: the column's name.

        Raises:
            ConfigError: there is no such column.
        """
        if self.needs_column and key not in available:
            raise ConfigError(
                f"{self.key}.feedback_source 'column' needs the column {key!r} that "
                f"data.privileged_context_key names (found {sorted(available)}); name the column with "
                "feedback, or take 'reward'."
            )

    def is_success(self, rewards: torch.Tensor) -> torch.Tensor:
        """(B,) bool, in one dtype on both sides; a row without a reward is none."""
        return rewards.double().nan_to_num(-torch.inf) >= self.success_reward_threshold - TOLERANCE

    def demonstration_text(self, completion: str) -> str:
        """What a success shows of itself; the empty string is no demonstration."""
        if self.remove_thinking_from_demonstration:
            return re.sub(r"<think>.*?</think>\s*", "", completion, flags=re.DOTALL).strip()
        return completion

    def demonstrations(
        self,
        success: list[bool],
        texts: list[str],
        num_generations: int,
        numbers: Sequence[float] | None = None,
    ) -> list[int | None]:
        """Which row is shown to each row's teacher, None where the group has none to show.

        Args:
            success: B times whether the row succeeded, the rows of a prompt adjacent.
            texts: B times what the row would show.
            num_generations: G.
            numbers: B numbers in [0, 1), each row's own, for demonstration="random".
        """
        if not self.use_successful_as_teacher:
            return [None] * len(success)
        out: list[int | None] = []
        for row in range(len(success)):
            start = row - row % num_generations
            usable = [
                i
                for i in range(start, start + num_generations)
                if success[i] and texts[i] and not (self.dont_reprompt_on_self_success and i == row)
            ]
            out.append(self._choice(usable, texts, numbers[row] if numbers else 0.0) if usable else None)
        return out

    def feedback(self, said: str | None, column: str | None) -> str | None:
        """The feedback on one row, None where there is none or it is off.

        Args:
            said: by the reward about this completion.
            column: from the data, about the prompt.
        """
        if not self.include_environment_feedback:
            return None
        found = {name: text for name, text in (("reward", said), ("column", column)) if text and text.strip()}
        if self.feedback_source == "reward_and_column":
            return "\n".join(found.values()) or None
        if self.feedback_source == "reward_or_column":
            return next(iter(found.values()), None)
        return found.get(self.feedback_source)

    def context(self, prompt: Prompt, demonstration: str | None, feedback: str | None) -> Prompt | None:
        """The prompt with what the teacher is shown, of any length; None when there is nothing to show.

        Args:
            prompt: the student's prompt, messages or a string.
            demonstration: text of a success.
            feedback: on this row, as `feedback` chose it.
        """
        feedback = self._beside(demonstration, feedback)
        if demonstration is None and feedback is None:
            return None
        return self._filled(prompt, demonstration, feedback)

    def teacher_prompt(
        self, chat: Chat, prompt: Prompt, demonstration: str | None, feedback: str | None
    ) -> TeacherPrompt:
        """`context` as ids within `max_reprompt_len`.

        Args:
            chat: renders messages and counts tokens.
            prompt, demonstration, feedback: as for `context`.
        """
        parts = {"solution": demonstration, "feedback": self._beside(demonstration, feedback)}
        if parts == {"solution": None, "feedback": None}:
            return TeacherPrompt()
        ids = self._ids(chat, prompt, parts)
        is_cut = len(ids) > self.max_reprompt_len
        for name in parts:
            while parts[name] and len(ids) > self.max_reprompt_len:
                parts[name] = _without_start(chat, parts[name] or "", len(ids) - self.max_reprompt_len)
                ids = self._ids(chat, prompt, parts)
        has = {name: text is not None for name, text in parts.items()}
        if len(ids) > self.max_reprompt_len or not any(has.values()):
            return TeacherPrompt(is_cut=True, is_too_long=True)
        return TeacherPrompt(ids, has["solution"], has["feedback"], is_cut)

    def _beside(self, demonstration: str | None, feedback: str | None) -> str | None:
        """The feedback that is shown beside this demonstration."""
        is_left_out = demonstration is not None and self.environment_feedback_only_without_solution
        has_text = self.include_environment_feedback and feedback is not None and feedback.strip()
        return feedback if has_text and not is_left_out else None

    def _ids(self, chat: Chat, prompt: Prompt, parts: dict[str, str | None]) -> list[int]:
        plain = {name: None if text is None else chat.verbatim(text) for name, text in parts.items()}
        return chat.ids(self._filled(prompt, **plain))

    def _filled(self, prompt: Prompt, solution: str | None, feedback: str | None) -> Prompt:
        shown = (
            "" if solution is None else _fill(self.solution_template, successful_previous_attempt=solution)
        )
        said = "" if feedback is None else _fill(self.feedback_template, feedback_raw=feedback)
        if isinstance(prompt, str):
            return _fill(self.reprompt_template, prompt=prompt, solution=shown, feedback=said)
        last = max(i for i, message in enumerate(prompt) if message["role"] == "user")
        text = _fill(
            self.reprompt_template, prompt=_text(prompt[last]["content"]), solution=shown, feedback=said
        )
        return [*prompt[:last], {**prompt[last], "content": text}, *prompt[last + 1 :]]

    def _choice(self, usable: list[int], texts: list[str], number: float) -> int:
        if self.demonstration == "shortest":
            return min(usable, key=lambda i: len(texts[i]))
        if self.demonstration == "random":
            return usable[int(number * len(usable))]
        return usable[0]


def _text(content: str | list[dict[str, Any]]) -> str:
    """The text of a message; of several parts, their texts with a space between."""
    if isinstance(content, str):
        return content
    return " ".join(part["text"] for part in content if part.get("type") == "text")


def _fill(template: str, **values: str) -> str:
    return re.sub(r"\{(\w+)\}", lambda match: values[match.group(1)], template)


def _without_start(chat: Chat, text: str, excess: int) -> str | None:
    """The end of the text, shorter by `excess` tokens, the ellipsis in front; None when nothing is left."""
    ids = chat.tokenizer(text, add_special_tokens=False)["input_ids"]
    mark = len(chat.tokenizer(ELLIPSIS, add_special_tokens=False)["input_ids"])
    kept = ids[excess + mark :]
    return ELLIPSIS + str(chat.tokenizer.decode(kept)) if kept else None
