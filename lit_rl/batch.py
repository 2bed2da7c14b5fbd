"""RolloutBatch: what a step carries from the prompt to the loss, and the axis legend used everywhere.

Axes: `P` prompts, `G` completions per prompt, `B = P * G` rows (the G rows of a prompt adjacent), `S` prompt
tokens (left-padded), `T` completion tokens (right-padded), `V` vocabulary, `K` top entries, `R` reward
functions.

Existence comes from lengths: position s of row b is a prompt token when `s >= S - prompt_len[b]`, position t
is a completion token when `t < completion_len[b]`. `completion_mask` says only where a token counts in a
loss. What stands at other positions is never read. Tokens that an environment wrote (`foreign_mask`) exist,
are attended to, and count in no loss.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from lit_rl.images import ImageTensors


@dataclass
class RolloutBatch:
    """Rows of one step. Fields that a stage has not filled yet are None.

    Attributes:
        prompt_ids: (B, S) long, left-padded. The ids generated from are the ids trained on.
        prompt_len: (B,) long.
        prompt_row: (B,) long. Index of the data row, over all files.
        columns: data columns by name, each a list of B plain Python values.
        images: B times what a vision-language model reads beside the prompt, None in a row without images;
            None for data without images. Rows of one prompt share their tensors, which stay in CPU memory.
        num_generations: G; rows g, g+1, ..., g+G-1 belong to one prompt.
        completion_ids: (B, T) long, right-padded. Sampled tokens, the end token included.
        completion_len: (B,) long.
        completion_mask: (B, T) bool. True where a token counts in a loss.
        foreign_mask: (B, T) bool. True at tokens that an environment wrote; None where there is none. A
            completion ends in a token of the policy.
        conversations: B times what the environment made of the row (`rollout.conversation.Conversation`).
        finish_reason: B times "stop" (an end token or string) or "length" (the limit, of tokens or turns).
        policy_version: (B,) long. Weights that wrote the row.
        rollout_logps: (B, T) float. As the engine reported them, at the sampling temperature.
        feedback: B times the text that the reward returned, or None.
        rewards: (B,) float. Weighted sum, NaN where no function applied.
        rewards_per_func: (B, R) float. NaN where a function did not apply.
        baselines: (B,) float. Reward of the greedy completion of the row's prompt, NaN where it has none.
        advantages: (B,) or (B, T) float.
        old_logps: (B, T) float. By the training model before the step's first update.
        ref_logps: (B, T) float. Under the reference.
        ref_kl: (B, T) float. Exact KL of the policy, before the step's first update, from the reference.
        rollout_is_weights: (B, T) float. Training over engine probability, bounded.
        noise: (B, T) float. Uniform numbers, a stream per row, for a loss that picks tokens by chance.
        picked: (B, T) bool. Tokens that such a loss treats apart.
        values, returns: (B, T) float. The critic's output and its target.
        teacher_prompt_ids: (B, S') long, left-padded. The teacher's prompt.
        teacher_prompt_len: (B,) long.
        teacher_images: B times the images of the teacher's prompt, as `images`.
        teacher_logps: (B, T) float. Under the teacher, with its own prompt.
        teacher_top_ids: (B, T, K) long. The teacher's most likely tokens, where an engine scored for it.
        teacher_top_logps: (B, T, K) float. Of those, over the whole vocabulary.
        self_distillation_mask: (B,) bool. Rows that have a teacher context and are distilled.
        distillation_weights: (B,) float. Factor of the row's distillation loss; None weighs all alike.
    """

    prompt_ids: Tensor
    prompt_len: Tensor
    prompt_row: Tensor
    columns: dict[str, list[Any]] = field(default_factory=dict)
    images: list[ImageTensors | None] | None = None
    num_generations: int = 1
    completion_ids: Tensor | None = None
    completion_len: Tensor | None = None
    completion_mask: Tensor | None = None
    foreign_mask: Tensor | None = None
    conversations: list[Any] | None = None
    finish_reason: list[str] | None = None
    policy_version: Tensor | None = None
    rollout_logps: Tensor | None = None
    feedback: list[str | None] | None = None
    rewards: Tensor | None = None
    rewards_per_func: Tensor | None = None
    baselines: Tensor | None = None
    advantages: Tensor | None = None
    old_logps: Tensor | None = None
    ref_logps: Tensor | None = None
    ref_kl: Tensor | None = None
    rollout_is_weights: Tensor | None = None
    noise: Tensor | None = None
    picked: Tensor | None = None
    values: Tensor | None = None
    returns: Tensor | None = None
    teacher_prompt_ids: Tensor | None = None
    teacher_prompt_len: Tensor | None = None
    teacher_images: list[ImageTensors | None] | None = None
    teacher_logps: Tensor | None = None
    teacher_top_ids: Tensor | None = None
    teacher_top_logps: Tensor | None = None
    self_distillation_mask: Tensor | None = None
    distillation_weights: Tensor | None = None

    def __len__(self) -> int:
        return self.prompt_ids.shape[0]

    @property
    def prompt_mask(self) -> Tensor:
        """(B, S) bool. True at real prompt tokens."""
        width = self.prompt_ids.shape[1]
        positions = torch.arange(width, device=self.prompt_ids.device)
        return positions >= width - self.prompt_len[:, None]

    @property
    def token_mask(self) -> Tensor:
        """(B, T) bool. True at real completion tokens, counted in a loss or not."""
        assert self.completion_ids is not None and self.completion_len is not None
        return length_mask(self.completion_len, self.completion_ids.shape[1])

    @property
    def written_mask(self) -> Tensor:
        """(B, T) bool. True at completion tokens that the policy wrote, counted in a loss or not."""
        return self.token_mask if self.foreign_mask is None else self.token_mask & ~self.foreign_mask

    def select(self, index: Tensor | list[int] | slice) -> "RolloutBatch":
        """The rows at these positions, in this order. Padding widths stay as they are."""
        if isinstance(index, slice):
            positions = list(range(len(self)))[index]
        else:
            positions = index.tolist() if isinstance(index, Tensor) else list(index)
        rows = torch.tensor(positions, dtype=torch.long)

        def pick(value: Any) -> Any:
            if isinstance(value, Tensor):
                return value[rows.to(value.device)]
            if isinstance(value, list):
                return [value[i] for i in positions]
            if isinstance(value, dict):
                return {name: pick(column) for name, column in value.items()}
            return value

        picked: dict[str, Any] = {f.name: pick(getattr(self, f.name)) for f in fields(self)}
        return replace(self, **picked)

    def prompts(self) -> "RolloutBatch":
        """The prompts of the groups, one row each, without anything that was filled in."""
        first = self.select(slice(0, None, self.num_generations))
        return RolloutBatch(
            first.prompt_ids, first.prompt_len, first.prompt_row, first.columns, images=first.images
        )

    def put_(self, index: list[int], other: "RolloutBatch") -> None:
        """Write another batch's rows over these, in place; padding grows where theirs is wider.

        Args:
            index: a position here for each row of the other batch.
            other: a batch in which the same fields are filled.
        """
        assert len(index) == len(other)
        rows = torch.tensor(index, dtype=torch.long)
        for f in fields(self):
            mine, theirs = getattr(self, f.name), getattr(other, f.name)
            if isinstance(mine, Tensor):
                mine, theirs = _same_width(mine, theirs, "left" if f.name in LEFT_PADDED else "right")
                setattr(self, f.name, mine.index_copy(0, rows.to(mine.device), theirs.to(mine)))
            elif isinstance(mine, list):
                setattr(self, f.name, _written_over(mine, index, theirs))
        names = dict.fromkeys([*self.columns, *other.columns])
        nothing, none = [None] * len(self), [None] * len(other)
        self.columns = {
            name: _written_over(self.columns.get(name, nothing), index, other.columns.get(name, none))
            for name in names
        }

    def repeat(self, num_generations: int) -> "RolloutBatch":
        """Each row G times, adjacent: P prompts become P * G rows."""
        index = torch.arange(len(self)).repeat_interleave(num_generations)
        return replace(self.select(index), num_generations=num_generations)

    def to(self, device: torch.device | str) -> "RolloutBatch":
        """Tensors on the device, everything else shared."""
        return self._with_tensors(lambda tensor: tensor.to(device))

    def pin_memory(self) -> "RolloutBatch":
        """Tensors in pinned memory, everything else shared; torch's loader calls it."""
        return self._with_tensors(Tensor.pin_memory)

    def _with_tensors(self, changed: Callable[[Tensor], Tensor]) -> "RolloutBatch":
        values: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        tensors: dict[str, Any] = {k: changed(v) for k, v in values.items() if isinstance(v, Tensor)}
        return replace(self, **tensors)


LEFT_PADDED = ("prompt_ids", "teacher_prompt_ids")


def _same_width(mine: Tensor, theirs: Tensor, side: str) -> tuple[Tensor, Tensor]:
    if mine.dim() == 1:
        return mine, theirs
    width = max(mine.shape[1], theirs.shape[1])

    def widened(tensor: Tensor) -> Tensor:
        missing = width - tensor.shape[1]
        return torch.nn.functional.pad(tensor, (missing, 0) if side == "left" else (0, missing))

    return widened(mine), widened(theirs)


def _written_over(mine: list[Any], index: list[int], theirs: list[Any]) -> list[Any]:
    out = list(mine)
    for position, value in zip(index, theirs, strict=True):
        out[position] = value
    return out


def length_mask(lengths: Tensor, width: int) -> Tensor:
    """(B, width) bool, true at the first lengths[b] positions of row b.

    Args:
        lengths: (B,) long.
    """
    return torch.arange(width, device=lengths.device) < lengths[:, None]


def padded(rows: list[list[int]], side: str, fill: int = 0) -> tuple[Tensor, Tensor]:
    """Rows of ids as one tensor: ((B, width) long, (B,) long lengths).

    Args:
        rows: ids of each row.
        side: "left" or "right", where padding goes.
        fill: the id at padding; never read.
    """
    assert side in ("left", "right")
    width = max((len(row) for row in rows), default=0)
    out = torch.full((len(rows), width), fill, dtype=torch.long)
    for i, row in enumerate(rows):
        if row:
            start = width - len(row) if side == "left" else 0
            out[i, start : start + len(row)] = torch.tensor(row, dtype=torch.long)
    return out, torch.tensor([len(row) for row in rows], dtype=torch.long)


def prompt_numbers(prompt_ids: Tensor, prompt_len: Tensor) -> list[int]:
    """B numbers, equal for rows with the same prompt, counted from 0 in the order of first appearance.

    Args:
        prompt_ids: (B, S) long, left-padded.
        prompt_len: (B,) long.
    """
    ids, lengths = prompt_ids.cpu().numpy(), prompt_len.tolist()
    seen: dict[bytes, int] = {}
    texts = (row[len(row) - length :].tobytes() for row, length in zip(ids, lengths, strict=True))
    return [seen.setdefault(text, len(seen)) for text in texts]
