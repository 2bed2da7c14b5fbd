"""Conversations: turns of the policy and of an environment, until each row is done.

The ids that the policy wrote are never decoded and encoded again: the environment's messages are tokenized
alone, as the chat template writes them behind a turn of the assistant, and appended. A row's completion is
everything after its first prompt. All of it is attended to; `foreign_mask` marks what the environment wrote,
which is no part of `completion_mask`. A completion ends in a token of the policy.

To an engine each turn is a prompt of its own. The `prompt_row` of a later turn is a number made of data row,
generation and position in the completion, so that every turn has noise of its own and no result depends on
the rows beside it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from lit_rl.batch import RolloutBatch, length_mask, padded
from lit_rl.errors import ConfigError, DataError
from lit_rl.rollout.environment import Environment, Message, Turn
from lit_rl.rollout.sampling import Sampling
from lit_rl.seeding import derived_seed
from lit_rl.time_limit import OutOfTime, limited

Write = Callable[..., RolloutBatch]
"""An engine's `generate` with seed and step given: (prompts, num_generations=, sampling=) -> rows."""
Following = Callable[[list[Message], bool, int], list[int]]
"""(messages, whether the prompt is a plain text, last id of the policy's turn) -> ids behind that turn."""


class Renderer(Protocol):
    """What is needed of a chat template and its tokenizer."""

    def prompt_ids(self, prompt: Any, where: str) -> list[int]: ...
    def decode(self, ids: list[int]) -> str: ...


class Conversation(NamedTuple):
    """What a row's environment made of it.

    Attributes:
        messages: after the prompt, the policy's turns among them.
        reward: sum over the turns; None where no turn had one.
        feedback: of all turns, on lines of their own; None where there is none.
        turns: of the policy.
        prompt: messages of the prompt where the environment gave them; None: the data's.
    """

    messages: list[Message]
    reward: float | None
    feedback: str | None
    turns: int
    prompt: list[Message] | None = None


@dataclass
class _Row:
    """A conversation under way; `is_own` and `logps` are as long as `ids`."""

    environment: Environment
    number: int
    generation: int
    prompt: list[int]
    opening: list[Message] | None
    is_text: bool
    ids: list[int] = field(default_factory=list)
    is_own: list[bool] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    feedback: list[str] = field(default_factory=list)
    turns: int = 0
    finish_reason: str = "stop"

    def extend(self, ids: Sequence[int], logps: Sequence[float], *, is_own: bool) -> None:
        self.ids += ids
        self.logps += logps
        self.is_own += [is_own] * len(ids)

    def done(self) -> Conversation:
        reward = sum(self.rewards) if self.rewards else None
        return Conversation(self.messages, reward, "\n".join(self.feedback) or None, self.turns, self.opening)


class Conversations:
    """Has conversations written.

    Args:
        environment: copied for each row.
        chat: renders prompts and decodes turns.
        following: ids of an environment's messages behind a turn.
        prompt_key: column of the prompt.
        room: tokens of prompt and completion together that the engine can hold; None is no limit.

    Raises:
        ConfigError: the environment allows no row at once.
    """

    def __init__(
        self,
        environment: Environment,
        *,
        chat: Renderer,
        following: Following,
        prompt_key: str,
        room: int | None = None,
    ) -> None:
        if environment.rows_at_once < 1:
            raise ConfigError(
                f"{Environment.key}.rows_at_once must be >= 1 (found {environment.rows_at_once!r})."
            )
        self.environment, self.chat, self.following = environment, chat, following
        self.prompt_key, self.room = prompt_key, room

    def __call__(
        self, prompts: RolloutBatch, write: Write, *, num_generations: int, sampling: Sampling
    ) -> RolloutBatch:
        """As `RolloutEngine.generate`, with `foreign_mask` and `conversations` filled.

        Args:
            prompts: P rows without completions.
            write: writes one turn.
            num_generations: G.
            sampling: `max_completion_length` is of the whole completion, the environment's tokens included.

        Raises:
            DataError: the environment raises, hangs, or breaks its contract; the row and turn are named.
        """
        limit = sampling.effective().max_completion_length
        prompts, environments, openings = self._begun(prompts, num_generations)
        written = write(prompts, num_generations=num_generations, sampling=sampling)
        rows = self._rows(written, environments, openings)
        for row, turn in zip(rows, _turns(written), strict=True):
            self._take(row, *turn, limit)
        open_rows = self._answered(rows, limit)
        while open_rows:
            for group in self._groups(open_rows, limit):
                left = max(limit - len(row.ids) for row in group)
                turn_sampling = replace(sampling.effective(), max_completion_length=left)
                more = write(self._as_prompts(group, written), num_generations=1, sampling=turn_sampling)
                for row, turn in zip(group, _turns(more), strict=True):
                    self._take(row, *turn, limit)
            open_rows = self._answered(open_rows, limit)
        return _filled(written, rows)

    def _begun(
        self, prompts: RolloutBatch, num_generations: int
    ) -> tuple[RolloutBatch, list[Environment], list[list[Message] | None]]:
        """The prompts that conversations begin with; environment and messages of the prompt of all rows."""
        G, numbers, ids = num_generations, prompts.prompt_row.tolist(), _prompts(prompts)
        columns = [{name: values[p] for name, values in prompts.columns.items()} for p in range(len(ids))]
        environments = [self.environment.fresh() for _ in range(len(ids) * G)]
        openings: list[list[Message] | None] = self._together(
            partial(_called, environment, "reset", numbers[b // G], 0, columns[b // G])
            for b, environment in enumerate(environments)
        )
        for p, number in enumerate(numbers):
            said = openings[p * G : (p + 1) * G]
            if any(other != said[0] for other in said):
                raise DataError(
                    f"{Environment.key}: reset gave the completions of data row {number} different prompts; "
                    "they are compared with each other, so it must depend on the row alone."
                )
            if said[0] is not None:
                ids[p] = self.chat.prompt_ids(said[0], f"{Environment.key}: prompt of data row {number}")
        prompt_ids, prompt_len = (tensor.to(prompts.prompt_ids.device) for tensor in padded(ids, "left"))
        return replace(prompts, prompt_ids=prompt_ids, prompt_len=prompt_len), environments, openings

    def _rows(
        self,
        written: RolloutBatch,
        environments: list[Environment],
        openings: list[list[Message] | None],
    ) -> list[_Row]:
        G, numbers, ids = written.num_generations, written.prompt_row.tolist(), _prompts(written)
        data = written.columns.get(self.prompt_key, [None] * len(written))
        is_text = [not said and isinstance(text, str) for said, text in zip(openings, data, strict=True)]
        return [
            _Row(environments[b], numbers[b], b % G, ids[b], openings[b], is_text[b])
            for b in range(len(written))
        ]

    def _take(self, row: _Row, ids: list[int], logps: list[float], reason: str, limit: int) -> None:
        """Append a turn of the policy, cut where the row's own tokens end."""
        left = limit - len(row.ids)
        row.extend(ids[:left], logps[:left], is_own=True)
        row.turns += 1
        row.finish_reason = "length" if len(ids) > left else reason
        text = self.chat.decode(ids[:left])
        row.messages.append({"role": "assistant", "content": text})

    def _together(self, calls: Iterable[Callable[[], Any]]) -> list[Any]:
        """What the calls return, in their order; so many at once as the environment allows.

        Raises:
            DataError: what the first of them to fail, in their order, raises.
        """
        if self.environment.rows_at_once == 1:
            return [call() for call in calls]
        pool = ThreadPoolExecutor(self.environment.rows_at_once, "lit_rl_environment")
        try:
            return list(pool.map(lambda call: call(), calls))
        finally:
            pool.shutdown(cancel_futures=True)

    def _answered(self, rows: list[_Row], limit: int) -> list[_Row]:
        """Have the environments answer. Returns the rows that go on, which then end in what was said."""
        turns = self._together(
            partial(_called, row.environment, "step", row.number, row.turns, row.messages[-1]["content"])
            for row in rows
        )
        return [row for row, turn in zip(rows, turns, strict=True) if self._goes_on(row, turn, limit)]

    def _goes_on(self, row: _Row, turn: Turn, limit: int) -> bool:
        """Append what the environment said, if the row goes on."""
        if turn.reward is not None:
            row.rewards.append(float(turn.reward))
        if turn.feedback:
            row.feedback.append(turn.feedback)
        if turn.done or row.finish_reason == "length":
            return False
        if row.turns == row.environment.max_turns:
            row.finish_reason = "length"
            return False
        if not turn.messages:
            raise DataError(
                f"{Environment.key}: step gave no messages for turn {row.turns} of data row {row.number} and "
                "is not done; give at least one."
            )
        ids = self.following(turn.messages, row.is_text, row.ids[-1])
        if len(row.ids) + len(ids) >= limit:
            row.finish_reason = "length"
            return False
        row.extend(ids, [0.0] * len(ids), is_own=False)
        row.messages += turn.messages
        return True

    def _groups(self, rows: list[_Row], limit: int) -> Iterator[list[_Row]]:
        """Rows that are written together: the longest prompt and the most tokens left fit in the room."""
        group: list[_Row] = []
        longest = most = 0
        for row in sorted(rows, key=lambda row: len(row.prompt) + len(row.ids)):
            longest, left = len(row.prompt) + len(row.ids), limit - len(row.ids)
            if group and self.room is not None and longest + max(most, left) > self.room:
                yield group
                group, most = [], 0
            group.append(row)
            most = max(most, left)
        yield group

    def _as_prompts(self, rows: list[_Row], like: RolloutBatch) -> RolloutBatch:
        """Everything so far of these rows as prompts, each with a number of its own."""
        ids, lengths = padded([row.prompt + row.ids for row in rows], "left")
        numbers = [derived_seed("turn", row.number, row.generation, len(row.ids)) for row in rows]
        device = like.prompt_ids.device
        return RolloutBatch(ids.to(device), lengths.to(device), torch.tensor(numbers, device=device))


def _turns(written: RolloutBatch) -> Iterator[tuple[list[int], list[float], str]]:
    """Ids, log-probabilities and end of each row; log-probabilities are NaN where the engine has none."""
    assert written.completion_ids is not None and written.completion_len is not None
    assert written.finish_reason is not None
    shape = written.completion_ids.shape
    logps = torch.full(shape, torch.nan) if written.rollout_logps is None else written.rollout_logps
    lengths = written.completion_len.tolist()
    for ids, values, length, reason in zip(
        written.completion_ids.tolist(), logps.tolist(), lengths, written.finish_reason, strict=True
    ):
        yield ids[:length], values[:length], reason


def _prompts(rows: RolloutBatch) -> list[list[int]]:
    width = rows.prompt_ids.shape[1]
    return [
        ids[width - n :] for ids, n in zip(rows.prompt_ids.tolist(), rows.prompt_len.tolist(), strict=True)
    ]


def _filled(first: RolloutBatch, rows: list[_Row]) -> RolloutBatch:
    """The rows of the first turn with whole completions."""
    device = first.prompt_ids.device
    ids, lengths = padded([row.ids for row in rows], "right")
    own, _ = padded([[int(is_own) for is_own in row.is_own] for row in rows], "right")
    exists = length_mask(lengths, ids.shape[1])
    logps = None
    if first.rollout_logps is not None:
        logps = torch.zeros(ids.shape, dtype=first.rollout_logps.dtype)
        logps[exists] = torch.tensor([value for row in rows for value in row.logps], dtype=logps.dtype)
        logps = logps.to(device)
    return replace(
        first,
        completion_ids=ids.to(device),
        completion_len=lengths.to(device),
        completion_mask=(exists & own.bool()).to(device),
        foreign_mask=(exists & ~own.bool()).to(device),
        finish_reason=[row.finish_reason for row in rows],
        rollout_logps=logps,
        conversations=[row.done() for row in rows],
    )


def _called(environment: Environment, method: str, number: int, turn: int, argument: Any) -> Any:
    """What the method returns within `step_timeout`."""
    function, seconds = getattr(environment, method), environment.step_timeout
    where = f"{Environment.key}: {method} of {type(environment).__name__}, data row {number}, turn {turn},"
    try:
        if seconds is None:
            return function(argument)
        return limited(lambda: function(argument), seconds, "step_timeout")
    except OutOfTime as error:
        raise DataError(f"{where} {error}.") from error
    except Exception as error:
        raise DataError(f"{where} raised {type(error).__name__}: {error}") from error
