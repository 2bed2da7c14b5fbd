"""The decode loop: prompts read once, rows written together, finished rows dropped.

Nothing here knows of a trainer, of seeds or of text: a model, prompts, numbers in; ids and log-probabilities out.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lit_rl.batch import length_mask
from lit_rl.errors import ConfigError
from lit_rl.rollout.cache import decoding_cache
from lit_rl.rollout.ends import StopStrings
from lit_rl.rollout.processors import Draw

_PROGRESS_EVERY = 8
"""Tokens between two calls of `on_finished`."""


class Written(NamedTuple):
    """What was written for each row: ids (B, T) long, lengths (B,) long, logps (B, T) float32, stopped (B,) bool."""

    ids: Tensor
    lengths: Tensor
    logps: Tensor
    stopped: Tensor


class NextToken:
    """The logits of the next token under any causal LM of transformers.

    Args:
        model: a `...ForCausalLM`, with or without LoRA layers in it.
        cache_implementation: see `decoding_cache`.

    Raises:
        ConfigError: the model's forward takes no key-value cache or no attention mask.
    """

    def __init__(self, model: nn.Module, cache_implementation: str | None = None) -> None:
        self.model = model
        self._implementation = cache_implementation
        accepted = set(inspect.signature(model.forward).parameters)
        names = [name for name in ("cache", "past_key_values") if name in accepted]
        if not names or "attention_mask" not in accepted:
            raise ConfigError(
                f"model.path names a {type(model).__name__}, whose forward takes no key-value cache or no attention "
                "mask; rollout=hf cannot decode with it, choose another engine."
            )
        self._cache_name = names[0]
        self._accepted = accepted
        self._fixed = {"use_cache": True} | ({"logits_to_keep": 1} if "logits_to_keep" in accepted else {})

    @property
    def config(self):
        """The model's configuration, of its text part."""
        return self.model.config.get_text_config(decoder=True)  # type: ignore[operator, union-attr]

    def start(self, max_length: int) -> None:
        """Forget everything read so far and get ready for at most so many tokens per row."""
        self.cache = decoding_cache(self.config, self._implementation, max_length)

    def __call__(self, ids: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """Read tokens: (B, V) logits after the last one.

        Args:
            ids: (B, n) long.
            positions: (B, n) long.
            mask: (B, tokens read before + n) bool, false at padding.
        """
        inputs = {"position_ids": positions} if "position_ids" in self._accepted else {}
        inputs[self._cache_name] = self.cache
        return self.model(input_ids=ids, attention_mask=mask.long(), **inputs, **self._fixed).logits[:, -1]

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows of the cache, in this order; a row may come several times."""
        self.cache.reorder_cache(rows)


@dataclass
class _Rows:
    """The rows still in the batch, M of them. Fields of one value per row move together.

    Attributes:
        index: (M,) long. Where each stands in the result.
        mask: (M, S + T) bool. False at prompt padding.
        prompt_len: (M,) long.
        is_done: (M,) bool. Ended, but not dropped yet.
    """

    index: Tensor
    mask: Tensor
    prompt_len: Tensor
    is_done: Tensor

    def keep(self, rows: Tensor) -> None:
        """Only these, in this order."""
        self.index, self.mask = self.index[rows], self.mask[rows]
        self.prompt_len, self.is_done = self.prompt_len[rows], self.is_done[rows]


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
        on_finished: Callable[[int], None] | None = None,
    ) -> None:
        self._draw = draw
        self._end_ids = end_ids
        self._stop = stop
        self._max_tokens = max_tokens
        self._on_finished = on_finished or (lambda count: None)

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
        width, device = prompt_ids.shape[1], prompt_ids.device
        prompt_mask = length_mask(prompt_len, width).flip(-1)  # (P, S)
        next_token.start(width + self._max_tokens)
        logits = next_token(
            prompt_ids.masked_fill(~prompt_mask, 0), (prompt_mask.cumsum(-1) - 1).clamp(min=0), prompt_mask
        )
        logits = logits[prompt_of]  # (B, V)
        next_token.keep(prompt_of)
        rows = _Rows(
            index=torch.arange(len(prompt_of), device=device),
            mask=nn.functional.pad(prompt_mask, (0, self._max_tokens), value=True)[prompt_of],
            prompt_len=prompt_len[prompt_of],
            is_done=torch.zeros(len(prompt_of), dtype=torch.bool, device=device),
        )
        # Ids beyond the vocabulary are no token to the processors.
        history = prompt_ids.masked_fill(~prompt_mask, logits.shape[-1])[prompt_of]
        return self._written(next_token, logits, rows, history, numbers)

    def _written(
        self, next_token: NextToken, logits: Tensor, rows: _Rows, prompts: Tensor, numbers: Tensor | None
    ) -> Written:
        count, width, device = len(prompts), prompts.shape[1], prompts.device
        ids = nn.functional.pad(prompts, (0, self._max_tokens))  # (B, S + T)
        logps = torch.zeros(count, self._max_tokens, device=device)
        lengths = torch.full((count,), self._max_tokens, device=device)
        end_ids = torch.tensor(self._end_ids, dtype=torch.long, device=device)
        for t in range(self._max_tokens):
            end = width + t
            tokens, token_logps = self._draw(
                logits,
                None if numbers is None else numbers[rows.index, t],
                ids[rows.index, :end] if self._draw.needs_history else None,
            )
            ids[rows.index, end] = tokens
            logps[rows.index, t] = token_logps
            ends = (tokens[:, None] == end_ids).any(-1) & ~rows.is_done
            if self._stop:
                ends |= self._string_ends(ids, rows, slice(width, end + 1))
            lengths[rows.index[ends]] = t + 1
            rows.is_done |= ends
            left = len(rows.is_done) - int(rows.is_done.sum())
            if t % _PROGRESS_EVERY == _PROGRESS_EVERY - 1:
                self._on_finished(count - left)
            if left == 0 or t + 1 == self._max_tokens:
                break
            if left <= 0.75 * len(rows.is_done):
                keep = (~rows.is_done).nonzero()[:, 0]
                next_token.keep(keep)
                rows.keep(keep)
                tokens = tokens[keep]
            logits = next_token(tokens[:, None], (rows.prompt_len + t)[:, None], rows.mask[:, : end + 1])
        ...
