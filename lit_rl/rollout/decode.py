"""The decode loop: prompts read once, rows written together, finished rows dropped.

Nothing here knows of a trainer, of seeds or of weights: prompts and numbers in, ids and logps out.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lit_rl.batch import length_mask
from lit_rl.rollout.ends import StopStrings
from lit_rl.rollout.next_token import NextToken
from lit_rl.rollout.processors import Draw

_PROGRESS_EVERY = 8
"""Tokens between two reports of progress."""

_DROP_AT = 0.25
"""Share of finished rows in the batch at which dropping them pays for copying the cache."""


class Written(NamedTuple):
    """What was written. Beyond its length nothing in a row means anything.

    Attributes:
        ids: (B, T) long.
        lengths: (B,) long.
        logps: (B, T) float32.
        stopped: (B,) bool. False where the limit ended the row.
    """

    ids: Tensor
    lengths: Tensor
    logps: Tensor
    stopped: Tensor


@dataclass
class _Page:
    """Everything written so far (B rows) and the rows still in the batch (M).

    Attributes:
        ids: (B, S + T) long. Prompts and completions, V at prompt padding: no token to the processors.
        logps: (B, T) float32.
        lengths: (B,) long, 0 until a row has ended.
        rows: (M,) long. Which rows are in the batch.
        mask: (M, S + T) bool. False at prompt padding.
        prompt_len: (M,) long.
    """

    ids: Tensor
    logps: Tensor
    lengths: Tensor
    rows: Tensor
    mask: Tensor
    prompt_len: Tensor

    @classmethod
    def blank(cls, prompts: Tensor, mask: Tensor, prompt_len: Tensor, max_tokens: int) -> "_Page":
        """No token written yet. Prompts and mask are (B, S)."""
        rows, device = len(prompts), prompts.device
        return cls(
            ids=nn.functional.pad(prompts, (0, max_tokens)),
            logps=torch.zeros(rows, max_tokens, device=device),
            lengths=torch.zeros(rows, dtype=torch.long, device=device),
            rows=torch.arange(rows, device=device),
            mask=nn.functional.pad(mask, (0, max_tokens), value=True),
            prompt_len=prompt_len,
        )

    def drop_finished(self) -> Tensor:
        """Take the ended rows out of the batch: (M',) positions in the batch of those that stay."""
        stay = (self.lengths[self.rows] == 0).nonzero()[:, 0]
        self.rows, self.mask, self.prompt_len = self.rows[stay], self.mask[stay], self.prompt_len[stay]
        return stay


class Writer:
    """Writes completions.

    Args:
        draw: from logits to tokens.
        end_ids: ids that end a completion.
        stop: strings that do.
        max_tokens: T.
        on_finished: called with the number of finished rows, every few tokens.
    """

    def __init__(
        self,
        draw: Draw,
        *,
        end_ids: list[int],
        stop: StopStrings,
        max_tokens: int,
        on_finished: Callable[[int], None],
    ) -> None:
        self._draw = draw
        self._end_ids = end_ids
        self._stop = stop
        self._max_tokens = max_tokens
        self._on_finished = on_finished

    def __call__(
        self,
        next_token: NextToken,
        prompt_ids: Tensor,
        prompt_len: Tensor,
        prompt_of: Tensor,
        numbers: Tensor | None,
    ) -> Written:
        """Write one completion per row.

        Args:
            next_token: the model.
            prompt_ids: (P, S) long, left-padded; each prompt is read once.
            prompt_len: (P,) long.
            prompt_of: (B,) long. The prompt of each row.
            numbers: (B, T) float64, the noise; None when greedy.
        """
        width = prompt_ids.shape[1]
        mask = length_mask(prompt_len, width).flip(-1)  # (P, S)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        with next_token.reading(width + self._max_tokens):
            logits = next_token(prompt_ids.masked_fill(~mask, 0), positions, mask)[prompt_of]  # (B, V)
            next_token.keep(prompt_of)
            prompts = prompt_ids.masked_fill(~mask, logits.shape[-1])
            page = _Page.blank(prompts[prompt_of], mask[prompt_of], prompt_len[prompt_of], self._max_tokens)
            self._fill(page, next_token, logits, width, numbers)
        stopped = page.lengths > 0
        lengths = page.lengths.where(stopped, self._max_tokens)
        return Written(page.ids[:, width:], lengths, page.logps, stopped)

    def _fill(
        self, page: _Page, next_token: NextToken, logits: Tensor, width: int, numbers: Tensor | None
    ) -> None:
        """Write until every row has ended or holds T tokens."""
        for t in range(self._max_tokens):
            tokens = self._write(page, logits, width, t, numbers)
            in_batch = page.lengths[page.rows]
            left = len(in_batch) - int(in_batch.count_nonzero())
            if t % _PROGRESS_EVERY == _PROGRESS_EVERY - 1:
                self._on_finished(len(page.ids) - left)
            if left == 0 or t + 1 == self._max_tokens:
                return
            if left <= (1 - _DROP_AT) * len(in_batch):
                stay = page.drop_finished()
                next_token.keep(stay)
                tokens = tokens[stay]
            positions = page.prompt_len[:, None] + t
            logits = next_token(tokens[:, None], positions, page.mask[:, : width + t + 1])

    def _write(self, page: _Page, logits: Tensor, width: int, t: int, numbers: Tensor | None) -> Tensor:
        """Write token t of every row in the batch: (M,) long."""
        end = width + t
        tokens, logps = self._draw(
            logits,
            None if numbers is None else numbers[page.rows, t],
            page.ids[page.rows, :end] if self._draw.needs_history else None,
        )
        page.ids[page.rows, end] = tokens
        page.logps[page.rows, t] = logps
        lengths = page.lengths[page.rows]
        is_end = torch.zeros_like(tokens, dtype=torch.bool)
        for end_id in self._end_ids:
            is_end |= tokens == end_id
        if self._stop:
            is_end |= self._stop.are_complete(page.ids[page.rows, width : end + 1], lengths == 0)
        page.lengths[page.rows] = torch.where(is_end & (lengths == 0), t + 1, lengths)
        return tokens
