"""SFTDataModule: conversations in, RolloutBatch with filled completions out; for supervised training."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from lit_rl.batch import RolloutBatch, padded
from lit_rl.data.base import Collate, RowDataModule, ValidationSource, columns_of
from lit_rl.data.chat import Chat, Supervised
from lit_rl.data.loader import LoaderOptions
from lit_rl.data.parquet import CACHE_DIR, Rows, RowSource
from lit_rl.data.scan import BAD_ROW, Judge
from lit_rl.errors import ConfigError, DataError


class SFTDataModule(RowDataModule):
    """Conversations whose assistant turns are supervised (source: verl SFT, `data.*`).

    A row is one conversation: the prompt is everything before the first assistant content, the completion
    the rest, and its mask is true at assistant content and end tokens. Rows are cut on the right to
    `max_length`. All rows are rendered before the first step; those without a supervised token left are
    dropped and counted in the log.

    Args:
        train_files: parquet files, globs, URLs; in Python also a Dataset or a list of rows.
        val_files: likewise, or several by name, each with its own metric; null: there is nothing to validate
            on.
        train_max_samples: rows used, the first ones; -1 is all.
        val_max_samples: likewise.
        total_epochs: passes over the training rows when `trainer.max_steps` is -1; may be a fraction.
        train_batch_size: rows per step over all ranks; the ranks must divide it.
        val_batch_size: rows per validation batch over all ranks.
        messages_key: column with the conversation.
        max_length: tokens per row, prompt and completion; null is no limit.
        shuffle: a new order in each data epoch; False is the order of the files.
        seed: of the order.
        tokenizer: as `model.path`, or a tokenizer.
        trust_remote_code: run Python code that comes with the tokenizer.
        chat_template_kwargs: variables of the chat template.
        on_bad_row: error, or skip: leave out rows without a usable conversation, and say how many.
        loader: torch's loader settings.
        cache_dir: where copies of remote files lie, and of files in row groups too large to read at random.

    Raises:
        ConfigError: a value is out of range.
    """

    def __init__(
        self,
        *,
        train_files: RowSource | None = None,
        val_files: ValidationSource = None,
        train_max_samples: int = -1,
        val_max_samples: int = -1,
        total_epochs: float = 1.0,
        train_batch_size: int = 256,
        val_batch_size: int = 64,
        messages_key: str = "messages",
        max_length: int | None = 2048,
        shuffle: bool = True,
        seed: int = 42,
        tokenizer: str | PreTrainedTokenizerBase = "embedded",
        trust_remote_code: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
        on_bad_row: str = "error",
        loader: LoaderOptions | None = None,
        cache_dir: str = CACHE_DIR,
    ) -> None:
        super().__init__(
            train_files=train_files,
            val_files=val_files,
            train_max_samples=train_max_samples,
            val_max_samples=val_max_samples,
            total_epochs=total_epochs,
            train_batch_size=train_batch_size,
            val_batch_size=val_batch_size,
            shuffle=shuffle,
            seed=seed,
            tokenizer=tokenizer,
            trust_remote_code=trust_remote_code,
            chat_template_kwargs=chat_template_kwargs,
            on_bad_row=on_bad_row,
            loader=loader,
            cache_dir=cache_dir,
        )
        if max_length is not None and max_length < 2:
            raise ConfigError(f"data.max_length must be null or >= 2 (found {max_length!r}).")
        self.messages_key, self.max_length = messages_key, max_length

    def _new_chat(self) -> Chat:
        return Chat(self._loaded_tokenizer, chat_template_kwargs=self.chat_template_kwargs)

    def _columns(self) -> tuple[list[str], bool]:
        return [self.messages_key], False

    def _judge(self) -> Judge:
        renderer = ConversationRenderer(self.chat, self.messages_key, self.max_length)
        return ConversationJudge(renderer, skip_bad=self.on_bad_row == "skip")

    def _collate(self, rows: Rows) -> Collate:
        return ConversationCollate(rows, ConversationRenderer(self.chat, self.messages_key, self.max_length))


@dataclass(frozen=True)
class ConversationRenderer:
    """A row's conversation as ids, cut on the right to `max_length` tokens.

    Args:
        chat: renders.
        messages_key: column of the conversation.
        max_length: tokens per row; None is no limit.
    """

    chat: Chat
    messages_key: str
    max_length: int | None

    def __call__(self, row: dict[str, Any], where: str) -> Supervised:
        whole = self.chat.supervised(row[self.messages_key], f"{where}, column {self.messages_key!r}")
        if self.max_length is None:
            return whole
        room = max(0, self.max_length - len(whole.prompt_ids))
        return Supervised(
            whole.prompt_ids[: self.max_length], whole.completion_ids[:room], whole.completion_mask[:room]
        )


@dataclass(frozen=True)
class ConversationJudge:
    """Leaves out conversations of which no supervised token is left.

    Args:
        renderer: renders and cuts.
        skip_bad: leave out rows that cannot be rendered; False raises.
    """

    renderer: ConversationRenderer
    skip_bad: bool

    def __call__(self, row: dict[str, Any], where: str) -> str | None:
        """Why the row is left out; None when it stays."""
        try:
            rendered = self.renderer(row, where)
        except DataError:
            if not self.skip_bad:
                raise
            return BAD_ROW
        if not any(rendered.completion_mask):
            return f"no supervised token within data.max_length={self.renderer.max_length}"
        return None


@dataclass(frozen=True)
class ConversationCollate:
    """Rows by index -> RolloutBatch with completions, one per prompt.

    Args:
        rows: read from here.
        renderer: renders and cuts.
    """

    rows: Rows
    renderer: ConversationRenderer

    def __call__(self, indices: Sequence[int]) -> RolloutBatch:
        rows = [self.rows[i] for i in indices]
        rendered = [self.renderer(row, self.rows.where(i)) for i, row in zip(indices, rows, strict=True)]
        fill = self.renderer.chat.pad_token_id
        prompt_ids, prompt_len = padded([r.prompt_ids for r in rendered], "left", fill)
        completion_ids, completion_len = padded([r.completion_ids for r in rendered], "right", fill)
        mask, _ = padded([[int(counts) for counts in r.completion_mask] for r in rendered], "right")
        return RolloutBatch(
            prompt_ids,
            prompt_len,
            torch.tensor(list(indices)),
            columns=columns_of(rows),
            completion_ids=completion_ids,
            completion_len=completion_len,
            completion_mask=mask.bool(),
        )
