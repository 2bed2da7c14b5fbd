"""PromptDataModule: parquet in, RolloutBatch of prompts out; resumable, the same on any number of ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from lit_rl.batch import RolloutBatch, padded
from lit_rl.data.base import Collate, RowDataModule, ValidationSource, columns_of
from lit_rl.data.chat import Chat, check_length_policy
from lit_rl.data.loader import LoaderOptions
from lit_rl.data.parquet import Rows, RowSource
from lit_rl.data.scan import BAD_ROW, Judge
from lit_rl.errors import ConfigError, DataError


class PromptDataModule(RowDataModule):
    """Prompts for rollouts, and the columns that score them (source: verl `data.*`, TRL dataset columns).

    A training batch is the P / W prompts of this rank in one step, a validation batch a part of the rows that
    this rank validates. Every column goes along as plain Python values. Steps run on across data epochs.

    All prompts are rendered before the first step when that decides something: with
    `filter_overlong_prompts`, `truncation="error"` or `on_bad_row="skip"`. Otherwise each in its turn.

    Args:
        train_files: `embedded`, parquet files, globs; in Python also a Dataset or a list of rows.
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
        tokenizer: as `model.path`, or a tokenizer.
        trust_remote_code: run Python code that comes with the tokenizer.
        chat_template_kwargs: variables of the chat template, in rollout, validation and teacher alike.
        on_bad_row: error, or skip: leave out rows without a usable prompt, and say how many.
        remove_unused_columns: rewards and teacher see only the prompt.
        loader: torch's loader settings.

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
        tokenizer: str | PreTrainedTokenizerBase = "embedded",
        trust_remote_code: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
        on_bad_row: str = "error",
        remove_unused_columns: bool = False,
        loader: LoaderOptions | None = None,
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
            scan_workers=filter_overlong_prompts_workers,
        )
        check_length_policy(max_prompt_length, truncation)
        _check_filter(max_prompt_length, filter_overlong_prompts, filter_overlong_prompts_workers)
        self.max_prompt_length, self.truncation = max_prompt_length, truncation
        self.filter_overlong_prompts = filter_overlong_prompts
        self.filter_overlong_prompts_workers = filter_overlong_prompts_workers
        self.prompt_key, self.data_source_key = prompt_key, data_source_key
        self.reward_model_key, self.privileged_context_key = reward_model_key, privileged_context_key
        self.remove_unused_columns = remove_unused_columns

    def _new_chat(self, tokenizer: PreTrainedTokenizerBase) -> Chat:
        return Chat(
            tokenizer,
            chat_template_kwargs=self.chat_template_kwargs,
            max_prompt_length=self.max_prompt_length,
            truncation=self.truncation,
        )

    def _columns(self) -> tuple[list[str], bool]:
        return [self.prompt_key], self.remove_unused_columns

    def _judge(self) -> Judge | None:
        is_decided = self.max_prompt_length is not None and (
            self.filter_overlong_prompts or self.truncation == "error"
        )
        if not is_decided and self.on_bad_row == "error":
            return None
        return PromptJudge(
            self.chat,
            self.prompt_key,
            drop_overlong=self.filter_overlong_prompts,
            skip_bad=self.on_bad_row == "skip",
        )

    def _collate(self, rows: Rows) -> Collate:
        return PromptCollate(rows, self.chat, self.prompt_key)


@dataclass(frozen=True)
class PromptJudge:
    """Leaves out prompts that are too long or unusable, by the rendering that generation uses.

    Args:
        chat: renders.
        prompt_key: column of the prompt.
        drop_overlong: leave out prompts above the limit.
        skip_bad: leave out rows without a usable prompt; False raises.
    """

    chat: Chat
    prompt_key: str
    drop_overlong: bool
    skip_bad: bool

    def __call__(self, row: dict[str, Any], where: str) -> str | None:
        """Why the row is left out; None when it stays."""
        prompt, where = row[self.prompt_key], f"{where}, column {self.prompt_key!r}"
        try:
            ids = self.chat.rendered(prompt, where)
        except DataError:
            if not self.skip_bad:
                raise
            return BAD_ROW
        limit = self.chat.max_prompt_length
        if self.drop_overlong and limit is not None and len(ids) > limit:
            return f"a prompt longer than data.max_prompt_length={limit}"
        self.chat.cut(ids, prompt, where)
        return None


@dataclass(frozen=True)
class PromptCollate:
    """Rows by index -> RolloutBatch of prompts.

    Args:
        rows: read from here.
        chat: renders and cuts.
        prompt_key: column of the prompt.
    """

    rows: Rows
    chat: Chat
    prompt_key: str

    def __call__(self, indices: Sequence[int]) -> RolloutBatch:
        rows = [self.rows[i] for i in indices]
        ids = [
            self.chat.prompt_ids(row[self.prompt_key], f"{self.rows.where(i)}, column {self.prompt_key!r}")
            for i, row in zip(indices, rows, strict=True)
        ]
        prompt_ids, prompt_len = padded(ids, "left", self.chat.pad_token_id)
        return RolloutBatch(prompt_ids, prompt_len, torch.tensor(list(indices)), columns=columns_of(rows))


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
