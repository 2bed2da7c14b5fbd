"""Environment: the other side of a conversation, which answers the policy between its turns."""

import copy
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

Message = dict[str, Any]


@dataclass(frozen=True)
class Turn:
    """What an environment says to one turn of the policy.

    Attributes:
        messages: that the policy reads next, each with role and content; at least one unless done.
        done: the conversation is over; `messages` is then read by nobody.
        reward: of this turn; those of a conversation are added up. None where there is none.
        feedback: on what was wrong, for algorithms that learn from it.
    """

    messages: list[Message] = field(default_factory=list)
    done: bool = False
    reward: float | None = None
    feedback: str | None = None


class Environment(ABC):
    """Answers one rollout row. Subclasses override `step`, and `reset` where the row's data matter.

    Every row has an object of its own, with its state in plain attributes, so that nothing of one row can
    reach another and a subclass reads like a single conversation. What a conversation says must depend on the
    row and on what the policy wrote alone: then a resumed run is the same run.

    Attributes:
        max_turns: of the policy, in one conversation; None is no limit but that of the tokens.
        step_timeout: seconds for `reset` and for `step`; None where the class keeps a limit itself.
        rows_at_once: rows whose `reset` or `step` may run at the same time, each in a thread, which suits an
            environment that waits for something. 1 is one row after another, in the main thread.
    """

    max_turns: int | None = None
    step_timeout: float | None = 30.0
    rows_at_once: int = 1
    key: ClassVar[str] = "rollout.environment"

    def fresh(self) -> "Environment":
        """An object for one more row, in the state that the configuration made."""
        return copy.deepcopy(self)

    def reset(self, row: dict[str, Any]) -> list[Message] | None:
        """Begin a conversation.

        Args:
            row: the data row, its columns by name.

        Returns:
            The messages of the prompt, in place of the data's; None: the data's prompt as it is. The same for
            every completion of a data row.
        """
        return None

    @abstractmethod
    def step(self, completion: str) -> Turn:
        """Answer a turn of the policy.

        Args:
            completion: text of this turn, special tokens left out. A turn that the token limit cut comes here
                too, for its reward; the conversation then ends whatever is returned.
        """

    def tool_schemas(self) -> list[dict[str, Any]]:
        """JSON schemas of tools, for the variable `tools` of the chat template."""
        return []
