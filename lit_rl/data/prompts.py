"""PromptDataModule: parquet in, RolloutBatch of prompts out; resumable, the same on any number of ranks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from lit_rl.batch import RolloutBatch, padded
from lit_rl.data.base import Collate, RowDataModule, ValidationSource, columns_of
from lit_rl.data.chat import Chat, Messages, as_messages, check_length_policy, plain_text
from lit_rl.data.custom import CustomClass
from lit_rl.data.image_chat import ImageChat, load_processor
from lit_rl.data.loader import LoaderOptions
from lit_rl.data.mix import ColumnOrders, blocks_by_source, check_weights, curriculum_values
from lit_rl.data.order import Order
from lit_rl.data.parquet import CACHE_DIR, Block, Rows, RowSource, local_files, paths_of
from lit_rl.data.reader import PromptReader
from lit_rl.data.scan import BAD_ROW, Judge
from lit_rl.errors import ConfigError, DataError


class PromptDataModule(RowDataModule):
    """Prompts for rollouts, and the columns that score them (source: verl `data.*`, TRL dataset columns).

    A training batch is the P / W prompts of this rank in one step, a validation batch a part of the rows that
    this rank validates. Every column goes along as plain Python values. Steps run on across data epochs.

    All prompts are rendered before the first step when that decides something: with
    `filter_overlong_prompts`, `truncation="error"` or `on_bad_row="skip"`. Otherwise each in its turn.

    Args:
        train_files: `embedded`, parquet files, globs, URLs; in Python also a Dataset or a list of rows.
        val_files: likewise, or several by name, each with its own metric; null: there is nothing to validate
            on.
        train_max_samples: rows used, the first ones; -1 is all.
        val_max_samples: likewise.
        total_epochs: passes over the training rows when `trainer.max_steps` is -1; may be a fraction.
        train_batch_size: prompts per step over all ranks, P; the ranks must divide it.
        val_batch_size: prompts per validation batch over all ranks.
        max_prompt_length: tokens of the rendered prompt; null is no limit.
        truncation: error, left, right or middle: what befalls a longer prompt; its generation header stays.
        filter_overlong_prompts: drop longer prompts before the first step.
        filter_overlong_prompts_workers: processes that look for them.
        shuffle: a new order in each data epoch; False is the order of the files.
        seed: of the order.
        prompt_key: column with the prompt: messages, or a string that is tokenized as it stands.
        data_source_key: column that names the source.
        reward_model_key: column with the reference answer.
        privileged_context_key: column with static feedback.
        image_key: column with images for a vision-language model: one, or a list of as many as the prompt
            has places for. null: the column is one like the others.
        source_weights: share of each source in the mix, by the name in the column `data_source_key`; 0 leaves
            one out. null takes every row once per epoch.
        curriculum_key: column of numbers by which rows come in ascending order in each epoch; null: in none.
        tokenizer: as `model.path`, or a tokenizer.
        trust_remote_code: run Python code that comes with the tokenizer.
        chat_template_kwargs: variables of the chat template, in rollout, validation and teacher alike.
        on_bad_row: error, or skip: leave out rows without a usable prompt, and say how many.
        remove_unused_columns: rewards and teacher see only the prompt.
        return_raw_input_ids: rows also carry `raw_input_ids`, the prompt's text as ids without the template.
        return_raw_chat: rows also carry `raw_chat`, the prompt as messages.
        return_full_prompt: rows also carry `full_prompt`, the text that the template makes of the prompt.
        custom_cls: your own dataset class in place of parquet files.
        loader: torch's loader settings.
        cache_dir: where copies of remote files lie, and of files in row groups too large to read at random.

    Raises:
        ConfigError: a value is out of range.
    """

    def __init__(
        self,
        *,
        train_files: RowSource | None = "embedded",
        val_files: ValidationSource = "embedded",
        train_max_samples: int = -1,
        val_max_samples: int = -1,
        total_epochs: float = 3.0,
        train_batch_size: int = 8,
        val_batch_size: int = 64,
        max_prompt_length: int | None = 512,
        truncation: str = "left",
        filter_overlong_prompts: bool = False,
        filter_overlong_prompts_workers: int = 1,
        shuffle: bool = True,
        seed: int = 42,
        prompt_key: str = "prompt",
        data_source_key: str = "data_source",
        reward_model_key: str = "reward_model",
        privileged_context_key: str = "privileged_context",
        image_key: str | None = "images",
        source_weights: dict[str, float] | None = None,
        curriculum_key: str | None = None,
        tokenizer: str | PreTrainedTokenizerBase = "embedded",
        trust_remote_code: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
        on_bad_row: str = "error",
        remove_unused_columns: bool = False,
        return_raw_input_ids: bool = False,
        return_raw_chat: bool = False,
        return_full_prompt: bool = False,
        custom_cls: CustomClass | None = None,
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
            scan_workers=filter_overlong_prompts_workers,
        )
        check_length_policy(max_prompt_length, truncation)
        _check_filter(max_prompt_length, filter_overlong_prompts, filter_overlong_prompts_workers)
        self.max_prompt_length, self.truncation = max_prompt_length, truncation
        self.filter_overlong_prompts = filter_overlong_prompts
        self.filter_overlong_prompts_workers = filter_overlong_prompts_workers
        self.prompt_key, self.data_source_key = prompt_key, data_source_key
        self.reward_model_key, self.privileged_context_key = reward_model_key, privileged_context_key
        self.image_key = image_key
        self.source_weights, self.curriculum_key = source_weights, curriculum_key
        self.remove_unused_columns = remove_unused_columns
        wanted = (return_raw_input_ids, return_raw_chat, return_full_prompt)
        self.renderings = [name for name, is_on in zip(RENDERINGS, wanted, strict=True) if is_on]
        self.custom_cls = custom_cls or CustomClass()
        if source_weights is not None:
            check_weights(source_weights)
        self._column_orders: ColumnOrders | None = None

    def num_rows(self) -> dict[str, int]:
        """See `RowDataModule.num_rows`.

        Raises:
            ConfigError: also where the rows hold images and the tokenizer is of a model of text.
        """
        if self.has_images:
            _ = self.chat
        return super().num_rows()

    def setup(self, stage: str | None = None) -> None:
        """See `RowDataModule.setup`.

        Raises:
            ConfigError: sources cannot be mixed as asked.
        """
        super().setup(stage)
        if self._is_ordered_by_column and "train" in self._used and self._column_orders is None:
            self._column_orders = self._read_columns(self._used["train"])
            self._column_orders.check(self.train_batch_size)
            self._used["train"] = self._column_orders.blocks

    @cached_property
    def has_images(self) -> bool:  # type: ignore[override]
        """Whether a file of the run has the column of images."""
        files = {"train": self.train_files, "val": self.val_files}
        return self.image_key is not None and any(
            self.image_key in self._open(split, [self.prompt_key], only_required=False).column_names()
            for split, given in files.items()
            if given is not None
        )

    @property
    def _is_ordered_by_column(self) -> bool:
        return self.source_weights is not None or self.curriculum_key is not None

    def _read_columns(self, blocks: list[Block]) -> ColumnOrders:
        parts, values = {"": blocks}, None
        if self.source_weights is not None:
            rows = self._open("train", [self.data_source_key], only_required=True)
            parts = blocks_by_source(rows, blocks, self.data_source_key, self.source_weights)
        if self.curriculum_key is not None:
            rows = self._open("train", [self.curriculum_key], only_required=True)
            values = {name: curriculum_values(rows, own, self.curriculum_key) for name, own in parts.items()}
        return ColumnOrders(parts, self.source_weights, values)

    def _order(self, *, shuffle: bool, seed: int, for_refills: bool = False) -> Order:
        if self._column_orders is None:
            return super()._order(shuffle=shuffle, seed=seed, for_refills=for_refills)
        return self._column_orders.order(shuffle=shuffle, seed=seed, with_curriculum=not for_refills)

    def _identity(self) -> dict[str, Any]:
        weights = None if self.source_weights is None else dict(self.source_weights)
        return {"data.source_weights": weights, "data.curriculum_key": self.curriculum_key}

    def _new_chat(self) -> Chat:
        settings: dict[str, Any] = {
            "chat_template_kwargs": self.chat_template_kwargs,
            "max_prompt_length": self.max_prompt_length,
            "truncation": self.truncation,
        }
        if not self.has_images:
            return Chat(self._loaded_tokenizer, **settings)
        processor = load_processor(self._tokenizer, trust_remote_code=self.trust_remote_code)
        return ImageChat(processor, **settings)

    def _columns(self) -> tuple[list[str], bool]:
        images = [str(self.image_key)] if self.remove_unused_columns and self.has_images else []
        return [self.prompt_key, *images], self.remove_unused_columns

    def _reader(self) -> PromptReader:
        return PromptReader(self.chat, self.prompt_key, self.image_key if self.has_images else None)

    def _judge(self) -> Judge | None:
        is_decided = self.max_prompt_length is not None and (
            self.filter_overlong_prompts or self.truncation == "error"
        )
        if not is_decided and self.on_bad_row == "error":
            return None
        return PromptJudge(
            self._reader(),
            drop_overlong=self.filter_overlong_prompts,
            skip_bad=self.on_bad_row == "skip",
        )

    def _collate(self, rows: Rows) -> Collate:
        return PromptCollate(rows, self._reader(), self.renderings)

    def column_names(self) -> list[str]:
        """Columns of the training rows that are handed to the rewards.

        Raises:
            ConfigError: a rendering would take the place of a column.
        """
        names = super().column_names()
        for name in self.renderings:
            if name in names:
                raise ConfigError(f"data.return_{name}=true would replace the column {name!r} of the data.")
        return [*names, *self.renderings]

    def _table(self, key: str, source: RowSource) -> RowSource:
        paths = paths_of(source)
        if self.custom_cls.path is None or paths is None:
            return source
        files = [file for file, _ in local_files(paths, key, self.cache_dir)]
        return self.custom_cls.dataset(files, lambda: self._loaded_tokenizer)


@dataclass(frozen=True)
class PromptJudge:
    """Leaves out prompts that are too long or unusable, by the rendering that generation uses.

    Args:
        read: reads a row.
        drop_overlong: leave out prompts above the limit.
        skip_bad: leave out rows without a usable prompt; False raises.
    """

    read: PromptReader
    drop_overlong: bool
    skip_bad: bool

    def __call__(self, row: dict[str, Any], where: str) -> str | None:
        """Why the row is left out; None when it stays."""
        try:
            found = self.read.whole(row, where)
        except DataError:
            if not self.skip_bad:
                raise
            return BAD_ROW
        limit = self.read.chat.max_prompt_length
        if self.drop_overlong and limit is not None and len(found.ids) > limit:
            return f"a prompt longer than data.max_prompt_length={limit}"
        self.read.limited(found, row, where)
        return None


@dataclass(frozen=True)
class PromptCollate:
    """Rows by index -> RolloutBatch of prompts.

    Args:
        rows: read from here.
        read: reads the prompt of one.
        renderings: of RENDERINGS, those that become columns.
    """

    rows: Rows
    read: PromptReader
    renderings: Sequence[str] = ()

    def __call__(self, indices: Sequence[int]) -> RolloutBatch:
        rows = [self.rows[i] for i in indices]
        found = [self.read(row, self.rows.where(i)) for i, row in zip(indices, rows, strict=True)]
        chat, key = self.read.chat, self.read.prompt_key
        prompt_ids, prompt_len = padded([prompt.ids for prompt in found], "left", chat.pad_token_id)
        columns = columns_of(rows)
        for name in self.renderings:
            columns[name] = [RENDERINGS[name](chat, row[key]) for row in rows]
        images = None if self.read.image_key is None else [prompt.images for prompt in found]
        return RolloutBatch(
            prompt_ids, prompt_len, torch.tensor(list(indices)), columns=columns, images=images
        )


RENDERINGS: dict[str, Callable[[Chat, str | Messages], Any]] = {
    "raw_input_ids": lambda chat, prompt: chat.ids(plain_text(prompt)),
    "raw_chat": lambda chat, prompt: as_messages(prompt),
    "full_prompt": lambda chat, prompt: chat.text(prompt),
}
"""Columns that a prompt can be handed on as, by name."""


def _check_filter(max_prompt_length: int | None, is_on: bool, workers: int) -> None:
    if workers < 1:
        raise ConfigError(f"data.filter_overlong_prompts_workers must be >= 1 (found {workers!r}).")
    if workers > 1 and not is_on:
        raise ConfigError(
            f"data.filter_overlong_prompts_workers (found {workers!r}) has no effect without "
            "data.filter_overlong_prompts=true; set that, or leave it at 1."
        )
    if is_on and max_prompt_length is None:
        raise ConfigError(
            "data.filter_overlong_prompts has no effect with data.max_prompt_length=null; give a length."
        )
