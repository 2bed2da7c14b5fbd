"""The decode loop: prompts read once, rows written together, finished ones replaced by waiting ones.

Nothing here knows of a trainer, of seeds or of weights: prompts and numbers in, ids and logps out.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lit_rl.batch import length_mask
from lit_rl.images import RowImages, image_inputs
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
    """All B rows, written or not.

    Attributes:
        prompts: (P, S) long, -1 at padding.
        prompt_of: (B,) long. The prompt of each row.
        prompt_len: (B,) long.
        ids: (B, S + T) long. Prompts and completions, -1 at prompt padding.
        numbers: (B, T) float64, the noise; None when greedy.
        logps: (B, T) float32.
        lengths: (B,) long, 0 until a row has ended.
        stopped: (B,) bool.
        images: of the P prompts, or None.
    """

    prompts: Tensor
    prompt_of: Tensor
    prompt_len: Tensor
    ids: Tensor
    numbers: Tensor | None
    logps: Tensor
    lengths: Tensor
    stopped: Tensor
    images: RowImages | None

    @property
    def width(self) -> int:
        """S, where completions begin."""
        return self.prompts.shape[1]

    def is_open(self, rows: Tensor) -> Tensor:
        """Which of these rows have not ended: bool."""
        return self.lengths[rows] == 0


@dataclass
class _Cohort:
    """Rows that came into the batch together, and so hold as many tokens.

    Attributes:
        rows: (N,) long. Their place in the page.
        t: tokens written of each.
    """

    rows: Tensor
    t: int = 0


class _Batch:
    """The M rows that are written together: their cohorts, and what the model may look at.

    All rows end in the same column of the cache; shorter ones are padded at the left.

    Attributes:
        cohorts: one after another.
        mask: (M, W) bool over the columns of the cache, false at padding.
    """

    def __init__(self) -> None:
        self.cohorts: list[_Cohort] = []
        self.mask = torch.ones(0, 0, dtype=torch.bool)

    @property
    def rows(self) -> Tensor:
        """(M,) long."""
        return torch.cat([cohort.rows for cohort in self.cohorts])

    def __len__(self) -> int:
        return sum(len(cohort.rows) for cohort in self.cohorts)

    def positions(self, page: _Page) -> Tensor:
        """Of the newest token of each row: (M, 1) long."""
        return torch.cat([page.prompt_len[c.rows] + c.t - 1 for c in self.cohorts])[:, None]

    def join(self, rows: Tensor, mask: Tensor) -> None:
        """Take rows with their prompts' masks (N, S') in, below the others."""
        parts = [self.mask, mask] if self.cohorts else [mask]
        width = max(m.shape[1] for m in parts)
        self.mask = torch.cat([nn.functional.pad(m, (width - m.shape[1], 0), value=False) for m in parts])
        self.cohorts.append(_Cohort(rows))

    def drop(self, stay: Tensor) -> None:
        """Keep the rows where stay, (M,) bool, is true."""
        sizes = [len(cohort.rows) for cohort in self.cohorts]
        kept = [
            _Cohort(cohort.rows[here], cohort.t)
            for cohort, here in zip(self.cohorts, stay.split(sizes), strict=True)
        ]
        self.cohorts = [cohort for cohort in kept if len(cohort.rows)]
        self.mask = self.mask[stay]


class Writer:
    """Writes completions.

    Args:
        draw: from logits to tokens.
        end_ids: ids that end a completion.
        stop: strings that do.
        max_tokens: T.
        max_rows: M, rows written together at most. The others wait until enough of them have ended.
        on_finished: called with the number of finished rows, every few tokens.
    """

    def __init__(
        self,
        draw: Draw,
        *,
        end_ids: list[int],
        stop: StopStrings,
        max_tokens: int,
        max_rows: int,
        on_finished: Callable[[int], None],
    ) -> None:
        self._draw = draw
        self._end_ids = end_ids
        self._stop = stop
        self._max_tokens = max_tokens
        self._max_rows = max_rows
        self._on_finished = on_finished

    def __call__(
        self,
        next_token: NextToken,
        prompt_ids: Tensor,
        prompt_len: Tensor,
        prompt_of: Tensor,
        numbers: Tensor | None,
        images: RowImages | None = None,
    ) -> Written:
        """Write one completion per row.

        Args:
            next_token: the model.
            prompt_ids: (P, S) long, left-padded; a prompt is read once for all rows that begin together.
            prompt_len: (P,) long.
            prompt_of: (B,) long, ascending. The prompt of each row.
            numbers: (B, T) float64, the noise; None when greedy.
            images: of the P prompts; None for data without images.
        """
        rows, width, device = len(prompt_of), prompt_ids.shape[1], prompt_ids.device
        prompts = prompt_ids.masked_fill(~length_mask(prompt_len, width).flip(-1), -1)
        page = _Page(
            prompts=prompts,
            prompt_of=prompt_of,
            prompt_len=prompt_len[prompt_of],
            ids=nn.functional.pad(prompts[prompt_of], (0, self._max_tokens)),
            numbers=numbers,
            logps=torch.zeros(rows, self._max_tokens, device=device),
            lengths=torch.zeros(rows, dtype=torch.long, device=device),
            stopped=torch.zeros(rows, dtype=torch.bool, device=device),
            images=images,
        )
        with next_token.reading(width + self._max_tokens):
            self._fill(page, next_token)
        return Written(page.ids[:, width:], page.lengths, page.logps, page.stopped)

    def _fill(self, page: _Page, next_token: NextToken) -> None:
        """Write until every row has ended or holds T tokens."""
        batch, begun = _Batch(), min(self._max_rows, len(page.ids))
        logits = self._begin(page, batch, next_token, torch.arange(begun, device=page.ids.device))
        for loop in count(1):
            tokens = self._write(page, batch, logits)
            is_open = page.is_open(batch.rows)
            left = int(is_open.count_nonzero())
            is_done = left == 0 and begun == len(page.ids)
            if is_done or loop % _PROGRESS_EVERY == 0:
                self._on_finished(begun - left)
            if is_done:
                return
            is_oldest_done = batch.cohorts[0].t == self._max_tokens
            if is_oldest_done or left <= (1 - _DROP_AT) * len(batch):
                batch.drop(is_open)
                next_token.keep(is_open.nonzero()[:, 0])
                batch.mask = next_token.trimmed(batch.mask)
                tokens = tokens[is_open]
            if left:
                batch.mask = nn.functional.pad(batch.mask, (0, 1), value=True)
                logits = next_token(tokens[:, None], batch.positions(page), batch.mask)
            free = self._max_rows - len(batch) if next_token.can_join or not left else 0
            if begun < len(page.ids) and free >= _DROP_AT * self._max_rows:
                new = torch.arange(begun, min(begun + free, len(page.ids)), device=page.ids.device)
                joined = self._begin(page, batch, next_token, new)
                logits = torch.cat([logits, joined]) if left else joined
                begun += len(new)

    def _begin(self, page: _Page, batch: _Batch, next_token: NextToken, rows: Tensor) -> Tensor:
        """Read the prompts of these rows into the batch: (N, V) logits of their first tokens."""
        prompts, prompt_of = page.prompt_of[rows].unique_consecutive(return_inverse=True)
        ids = page.prompts[prompts]
        ids = ids[:, page.width - int((ids >= 0).sum(-1).max()) :]
        mask = ids >= 0
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        images = None
        if page.images is not None:
            own = [page.images[i] for i in prompts.tolist()]
            images = image_inputs(own, mask.sum(-1), ids.shape[1], side="left")
        logits = next_token.join(ids.clamp(min=0), positions, mask, prompt_of, images)
        batch.join(rows, mask[prompt_of])
        return logits

    def _write(self, page: _Page, batch: _Batch, logits: Tensor) -> Tensor:
        """Write the next token of every row in the batch: (M,) long."""
        parts = logits.split([len(cohort.rows) for cohort in batch.cohorts])
        return torch.cat(
            [self._write_cohort(page, c, part) for c, part in zip(batch.cohorts, parts, strict=True)]
        )

    def _write_cohort(self, page: _Page, cohort: _Cohort, logits: Tensor) -> Tensor:
        rows, t, end = cohort.rows, cohort.t, page.width + cohort.t
        history = page.ids[rows, :end] if self._draw.needs_history else None
        tokens, logps = self._draw(
            logits,
            None if page.numbers is None else page.numbers[rows, t],
            None if history is None else history.where(history >= 0, logits.shape[-1]),
        )
        page.ids[rows, end] = tokens
        page.logps[rows, t] = logps
        is_open = page.is_open(rows)
        is_end = torch.zeros_like(tokens, dtype=torch.bool)
        for end_id in self._end_ids:
            is_end |= tokens == end_id
        if self._stop:
            is_end |= self._stop.are_complete(page.ids[rows, page.width : end + 1], is_open)
        is_end &= is_open
        page.stopped[rows] |= is_end
        is_last = is_end | is_open if t + 1 == self._max_tokens else is_end
        page.lengths[rows] = page.lengths[rows].masked_fill(is_last, t + 1)
        cohort.t = t + 1
        return tokens
