"""Rows as one flat sequence without padding, in which rows with the same prompt share it.

The flat sequence holds every distinct prompt once, then the completion tokens that predict another one. Each
token-wise layer sees exactly these tokens. Attention sees them as two grids: prompts among themselves, and
bundles of completions of one prompt, which look at that prompt and at their own row. A bundle's keys are its
prompt's and those of all its rows, so that a prompt's keys are copied once per bundle and not once per row.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_rl.batch import prompt_numbers


class Grid(NamedTuple):
    """A stretch of the flat sequence as (R, W) rows with padding.

    Attributes:
        start, size: the stretch.
        token: (R, W) long, the token of the stretch at each place; 0 at padding.
        is_token: (R, W) bool.
        places: (size,) long, the place of each token, counted through the rows.
    """

    start: int
    size: int
    token: Tensor
    is_token: Tensor
    places: Tensor

    def filled(self, values: Tensor, padding: int) -> Tensor:
        """(size,) -> (R, W), with this number at padding."""
        return values.new_full(self.token.shape, padding).masked_scatter_(self.is_token, values)

    def spread(self, flat: Tensor) -> Tensor:
        """(N, ...) -> (R, W, ...)."""
        stretch = flat[self.start : self.start + self.size]
        if self.size < self.token.numel():
            stretch = _Spread.apply(stretch, self.token.flatten(), self.places)
        return stretch.unflatten(0, self.token.shape)

    def collected(self, spread: Tensor) -> Tensor:
        """(R, W, ...) -> (size, ...)."""
        places = spread.flatten(0, 1)
        if self.size < self.token.numel():
            return _Collected.apply(places, self.token.flatten(), self.places, self.is_token.flatten())
        return places


class FlatRows(NamedTuple):
    """Where everything stands in the flat sequence of N tokens.

    Attributes:
        ids, positions: (1, N) long.
        predicts: (M,) long. The flat position that predicts each completion token, row by row.
        prompts: (P, S) grid.
        bundles: (K, Q) grid; K may be 0.
        bundle_prompt: (K,) long. The prompt of each bundle.
        bundle_row: (K, Q) long. The row of each token; -1 at padding.
        bundle_position: (K, Q) long. Its position in the row, the prompt counted.
        prompt_len: (P,) long.
    """

    ids: Tensor
    positions: Tensor
    predicts: Tensor
    prompts: Grid
    bundles: Grid
    bundle_prompt: Tensor
    bundle_row: Tensor
    bundle_position: Tensor
    prompt_len: Tensor

    def to(self, device: torch.device) -> "FlatRows":
        """All tensors on the device."""
        return FlatRows(*(_moved(value, device) for value in self))


@dataclass(frozen=True)
class _Row:
    """A row that has a completion: number, prompt, and how many of its tokens predict another one."""

    number: int
    prompt: int
    own: int


def flat_rows(
    prompt_ids: Tensor,
    prompt_len: Tensor,
    completion_ids: Tensor,
    completion_len: Tensor,
) -> FlatRows | None:
    """The flat sequence, or None where it is hardly shorter than the padded rows.

    Args:
        prompt_ids: (B, S) long, left-padded.
        prompt_len: (B,) long.
        completion_ids: (B, T) long, right-padded.
        completion_len: (B,) long.
    """
    device, width = prompt_ids.device, prompt_ids.shape[1]
    lens, counts = prompt_len.tolist(), completion_len.tolist()
    numbers = prompt_numbers(prompt_ids, prompt_len)
    rows = [_Row(row, numbers[row], count - 1) for row, count in enumerate(counts) if count]
    first = {row.prompt: row.number for row in reversed(rows)}  # row that a prompt is read from
    places = {prompt: place for place, prompt in enumerate(sorted(first))}
    rows = sorted((replace(row, prompt=places[row.prompt]) for row in rows), key=lambda row: row.prompt)
    sources = [first[prompt] for prompt in places]
    sizes = [lens[row] for row in sources]
    tokens = sum(sizes) + sum(row.own for row in rows)
    if not rows or not is_shorter(tokens, len(rows) * max(lens[row.number] + row.own for row in rows)):
        return None
    prompts, completions = prompt_ids.cpu(), completion_ids.cpu()
    texts = [prompts[row, width - lens[row] :] for row in sources]
    texts += [completions[row.number, : row.own] for row in rows]
    return _laid_out(rows, sizes)._replace(ids=torch.cat(texts)[None]).to(device)


def unpadded_rows(
    prompt_ids: Tensor,
    prompt_len: Tensor,
    completion_ids: Tensor,
    completion_len: Tensor,
) -> FlatRows | None:
    """Rows one after another, each with its own prompt; arguments and None as in `flat_rows`."""
    lens, counts = prompt_len.tolist(), completion_len.tolist()
    rows = [row for row, count in enumerate(counts) if count]
    sizes = [lens[row] + counts[row] - 1 for row in rows]
    if not rows or not is_shorter(sum(sizes), len(rows) * max(sizes)):
        return None
    prompts, completions, width = prompt_ids.cpu(), completion_ids.cpu(), prompt_ids.shape[1]
    parts = [(prompts[row, width - lens[row] :], completions[row, : counts[row] - 1]) for row in rows]
    grid, none = _grid(0, torch.tensor(sizes)), torch.zeros(0, dtype=torch.long)
    positions = torch.arange(max(sizes)).expand_as(grid.token)[grid.is_token]
    starts = torch.tensor([0, *sizes]).cumsum(0).tolist()
    predicts = [
        torch.arange(start + lens[row] - 1, start + size)
        for row, start, size in zip(rows, starts, sizes, strict=False)
    ]
    return FlatRows(
        ids=torch.cat([part for both in parts for part in both])[None],
        positions=positions[None],
        predicts=torch.cat(predicts),
        prompts=grid,
        bundles=_grid(grid.size, none),
        bundle_prompt=none,
        bundle_row=none.view(0, 0),
        bundle_position=none.view(0, 0),
        prompt_len=torch.tensor(sizes),
    ).to(prompt_ids.device)


def is_shorter(tokens: int, padded_tokens: int) -> bool:
    """Whether a flat sequence pays for its bookkeeping.

    Args:
        tokens: of the flat sequence.
        padded_tokens: of the rows side by side.
    """
    return tokens <= 0.9 * padded_tokens


def _laid_out(rows: list[_Row], sizes: list[int]) -> FlatRows:
    """Everything but the ids, on the CPU."""
    prompt_len = torch.tensor(sizes)
    prompts = _grid(0, prompt_len)
    owns = torch.tensor([row.own for row in rows])
    starts = owns.cumsum(0) - owns  # (rows,) of each row's tokens among the completion tokens
    bundles = list(_bundles(rows, max(sizes)))
    bundle_len = torch.tensor([int(owns[part].sum()) for part in bundles], dtype=torch.long)
    grid = _grid(prompts.size, bundle_len)
    row_of = torch.arange(len(rows)).repeat_interleave(owns)  # (tokens,)
    positions = torch.arange(grid.size) - starts[row_of] + prompt_len[[row.prompt for row in rows]][row_of]
    prompt_positions = torch.arange(prompts.token.shape[1]).expand_as(prompts.token)[prompts.is_token]
    return FlatRows(
        ids=prompt_positions,
        positions=torch.cat([prompt_positions, positions])[None],
        predicts=_predicting(rows, sizes, starts + prompts.size),
        prompts=prompts,
        bundles=grid,
        bundle_prompt=torch.tensor([rows[part.start].prompt for part in bundles], dtype=torch.long),
        bundle_row=grid.filled(row_of, -1),
        bundle_position=grid.filled(positions, 0),
        prompt_len=prompt_len,
    )


def _predicting(rows: list[_Row], sizes: list[int], starts: Tensor) -> Tensor:
    """(M,) in the order of the rows as they were given."""
    ends = torch.tensor(sizes).cumsum(0) - 1
    parts: dict[int, Tensor] = {}
    for row, start in zip(rows, starts.tolist(), strict=True):
        parts[row.number] = torch.cat([ends[row.prompt, None], torch.arange(start, start + row.own)])
    return torch.cat([parts[number] for number in sorted(parts)])


def _bundles(rows: list[_Row], longest_prompt: int) -> Iterator[slice]:
    """Rows of one prompt that attend together.

    Inside a bundle every token is compared with the tokens of all its rows. That is wasted work, and held to
    half of what the prompt costs anyway.
    """
    room = longest_prompt // 2
    start, used = 0, 0
    for i, row in enumerate(rows):
        if i > start and (row.prompt != rows[start].prompt or used + row.own > room):
            if used:
                yield slice(start, i)
            start, used = i, 0
        used += row.own
    if used:
        yield slice(start, len(rows))


def _grid(start: int, lengths: Tensor) -> Grid:
    width = int(lengths.max()) if len(lengths) else 0
    is_token = torch.arange(width) < lengths[:, None]
    size = int(lengths.sum())
    token = torch.zeros_like(is_token, dtype=torch.long).masked_scatter_(is_token, torch.arange(size))
    return Grid(start, size, token, is_token, is_token.flatten().nonzero()[:, 0])


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Grid):
        return Grid(*(_moved(inner, device) for inner in value))
    return value.to(device) if isinstance(value, Tensor) else value


class _Spread(torch.autograd.Function):
    """Tokens to places. Each token has one place, so that the backward is a selection and adds nothing up."""

    @staticmethod
    def forward(ctx: Any, flat: Tensor, index: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return flat.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        return gradient.index_select(0, places), None, None


class _Collected(torch.autograd.Function):
    """Places to tokens; padding gets a gradient of zero."""

    @staticmethod
    def forward(ctx: Any, spread: Tensor, index: Tensor, places: Tensor, is_token: Tensor) -> Tensor:
        ctx.save_for_backward(index, is_token)
        return spread.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        index, is_token = ctx.saved_tensors
        shape = (-1, *[1] * (gradient.dim() - 1))
        return gradient.index_select(0, index).masked_fill_(~is_token.view(shape), 0), None, None, None
