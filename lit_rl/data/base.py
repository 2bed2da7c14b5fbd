"""RowDataModule: what prompts and supervised rows share; files, order, loaders and counts."""

import logging
from abc import abstractmethod
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import islice
from typing import Any

import lightning as L
from transformers import PreTrainedTokenizerBase

from lit_rl.batch import RolloutBatch
from lit_rl.data.chat import Chat, load_tokenizer
from lit_rl.data.loader import LoaderOptions, RunLoader
from lit_rl.data.named import NamedRows
from lit_rl.data.order import Order, RowOrder, TrainBatches, rows_not_in_use, validation_batches
from lit_rl.data.parquet import Block, Rows, RowSource, open_rows
from lit_rl.data.scan import Judge, dropped_rows
from lit_rl.distributed import rank, world_size
from lit_rl.errors import ConfigError, DataError
from lit_rl.seeding import derived_seed

log = logging.getLogger(__name__)

ValidationSource = RowSource | dict[str, RowSource] | None
Collate = Callable[[Sequence[int]], RolloutBatch]


class RowDataModule(L.LightningDataModule):
    """Rows of files as sized, resumable loaders; one Lightning epoch is the whole run.

    Steps run on across data epochs: nothing is dropped at the end of one. Subclasses say which rows are used
    (`_judge`), how rows become a batch (`_collate`), and what a `Chat` needs.

    Raises:
        ConfigError: a value is out of range.
    """

    has_images: bool = False
    """Whether rows may hold images."""

    def __init__(
        self,
        *,
        train_files: RowSource | None,
        val_files: ValidationSource,
        train_max_samples: int,
        val_max_samples: int,
        total_epochs: float,
        train_batch_size: int,
        val_batch_size: int,
        shuffle: bool,
        seed: int,
        tokenizer: str | PreTrainedTokenizerBase,
        trust_remote_code: bool,
        chat_template_kwargs: dict[str, Any] | None,
        on_bad_row: str,
        loader: LoaderOptions | None,
        cache_dir: str,
        scan_workers: int = 1,
    ) -> None:
        super().__init__()
        _check(
            {
                "train_max_samples": (
                    train_max_samples,
                    train_max_samples == -1 or train_max_samples >= 1,
                    _SAMPLES,
                ),
                "val_max_samples": (val_max_samples, val_max_samples == -1 or val_max_samples >= 1, _SAMPLES),
                "total_epochs": (total_epochs, total_epochs > 0, "must be > 0"),
                "train_batch_size": (train_batch_size, train_batch_size >= 1, "must be >= 1"),
                "val_batch_size": (val_batch_size, val_batch_size >= 1, "must be >= 1"),
                "on_bad_row": (on_bad_row, on_bad_row in ("error", "skip"), "must be error or skip"),
                "seed": (
                    seed,
                    isinstance(seed, int),
                    "must be a whole number, so that the order is reproducible",
                ),
            }
        )
        self.train_files, self.val_files = train_files, val_files
        self.train_max_samples, self.val_max_samples = train_max_samples, val_max_samples
        self.total_epochs = total_epochs
        self.train_batch_size, self.val_batch_size = train_batch_size, val_batch_size
        self.shuffle, self.data_seed = shuffle, seed
        self.trust_remote_code = trust_remote_code
        self.chat_template_kwargs = dict(chat_template_kwargs or {})
        self.on_bad_row = on_bad_row
        self.loader = loader or LoaderOptions()
        self.cache_dir = cache_dir
        self._scan_workers = scan_workers
        self._tokenizer = tokenizer
        self._chat: Chat | None = None
        self._rows: dict[str, Rows] = {}
        self._used: dict[str, list[Block]] = {}

    @abstractmethod
    def _new_chat(self) -> Chat: ...

    @abstractmethod
    def _columns(self) -> tuple[list[str], bool]:
        """Columns that every row must have; and whether the others are left out."""

    @abstractmethod
    def _judge(self) -> Judge | None:
        """Says which rows are left out; None: every row is used, and none is looked at before its turn."""

    @abstractmethod
    def _collate(self, rows: Rows) -> Collate: ...

    def _order(self, *, shuffle: bool, seed: int, for_refills: bool = False) -> Order:
        """The order of the training rows that are used."""
        return RowOrder(self._blocks("train"), shuffle=shuffle, seed=seed)

    def _identity(self) -> dict[str, Any]:
        """What else the order depends on, by dotted key."""
        return {}

    @property
    def chat(self) -> Chat:
        """The renderer of every prompt; the tokenizer is loaded on first use."""
        if self._chat is None:
            self._chat = self._new_chat()
        return self._chat

    @cached_property
    def _loaded_tokenizer(self) -> PreTrainedTokenizerBase:
        if isinstance(self._tokenizer, str):
            return load_tokenizer(self._tokenizer, trust_remote_code=self.trust_remote_code)
        return self._tokenizer

    def num_rows(self) -> dict[str, int]:
        """Rows by split, "train" and "val", from the footers; after `setup`, those that are used.

        Raises:
            ConfigError: there are no training files.
            DataError: a file is missing, cannot be read or lacks a column.
        """
        splits = ["train"] if self.val_files is None else ["train", "val"]
        counts = {split: sum(len(block.rows) for block in self._blocks(split)) for split in splits}
        return {"val": 0, **counts}

    def column_names(self) -> list[str]:
        """Columns of the training rows that are handed to the rewards."""
        return list(self._opened("train")[0])

    def total_steps(self, max_steps: int = -1) -> int:
        """Steps of the run: `max_steps`, or floor(total_epochs * N / P) when that is -1.

        Before `setup`, rows that it will drop still count.

        Raises:
            ConfigError: there is not one whole step.
        """
        rows = self.num_rows()["train"]
        if self.train_batch_size > rows:
            raise ConfigError(
                f"data.train_batch_size must not exceed the {rows} rows of data.train_files "
                f"(found {self.train_batch_size}); make it smaller."
            )
        if max_steps >= 0:
            return max_steps
        steps = int(self.total_epochs * rows / self.train_batch_size + 1e-9)  # 0.1 * 30 / 3 is one step
        if steps < 1:
            raise ConfigError(
                f"data.total_epochs * rows / data.train_batch_size must be at least one step (found "
                f"{self.total_epochs} * {rows} / {self.train_batch_size}); raise data.total_epochs."
            )
        return steps

    def setup(self, stage: str | None = None) -> None:
        """Open the files of the stage, load the tokenizer, and find the rows that are used."""
        splits = {"train", "val"} if stage in (None, "fit") else {"val"}
        if self.val_files is None and stage != "validate":
            splits.discard("val")
        self._show_tools()
        for split in sorted(splits - self._used.keys()):
            self._used[split] = self._scanned(split)

    def _show_tools(self) -> None:
        """Give the chat template the tools of the run's environment, which the callback of rollouts has.

        Raises:
            ConfigError: the template is given other tools too.
        """
        callbacks = self.trainer.callbacks if self.trainer else []  # type: ignore[attr-defined]
        given = [tool for callback in callbacks for tool in getattr(callback, "tool_schemas", list)()]
        if given and self.chat_template_kwargs.get("tools"):
            raise ConfigError(
                "data.chat_template_kwargs.tools and rollout.environment.tools must not both be set; leave "
                "those of the environment."
            )
        self.chat.chat_template_kwargs |= {"tools": given} if given else {}

    def train_dataloader(self) -> RunLoader:
        """Steps of the whole run.

        Raises:
            ConfigError: the ranks do not divide a step.
        """
        ranks = world_size()
        if self.train_batch_size % ranks:
            raise ConfigError(
                f"data.train_batch_size must divide by the {ranks} ranks (found {self.train_batch_size}); "
                f"{self.train_batch_size + -self.train_batch_size % ranks} is the next that does."
            )
        steps = self.total_steps(self.trainer.max_steps if self.trainer else -1)
        order = self._order(shuffle=self.shuffle, seed=self.data_seed)
        batches = TrainBatches(
            order, batch_size=self.train_batch_size, steps=steps, rank=rank(), world_size=ranks
        )
        identity = {
            "data.train_files": f"{len(order)} rows, {self._opened('train').fingerprint()}",
            "data.train_batch_size": self.train_batch_size,
            "data.shuffle": self.shuffle,
            "data.seed": self.data_seed,
            **self._identity(),
        }
        return RunLoader(
            batches, self._collate(self._opened("train")), options=self.loader, identity=identity
        )

    def fresh_rows(self, start: int, count: int, in_use: set[int]) -> tuple[list[int], int]:
        """Training rows from a second order of their own, to replace rows of a step. See `rows_not_in_use`.

        Always shuffled, so that the rows of the coming steps are not used up in their order.
        """
        seed = derived_seed(self.data_seed, "fresh rows")
        order = self._order(shuffle=True, seed=seed, for_refills=True)
        return rows_not_in_use(order, start, count, in_use)

    def train_rows(self, rows: Sequence[int]) -> RolloutBatch:
        """These training rows as a batch."""
        return self._collate(self._opened("train"))(rows)

    def first_rows(self, count: int) -> RolloutBatch:
        """The first training rows that are used, in the order of the files."""
        used = islice((row for block in self._blocks("train") for row in block.rows), count)
        return self.train_rows(list(used))

    def val_dataloader(self) -> RunLoader | list[RunLoader]:
        """Every validation row once over all ranks; no loader when `val_files` is null.

        Raises:
            ConfigError: there are fewer rows than ranks.
        """
        if self.val_files is None:
            return []
        rows = [row for block in self._blocks("val") for row in block.rows]
        ranks = world_size()
        if len(rows) < ranks:
            raise ConfigError(
                f"data.val_files must hold at least one row for each of the {ranks} ranks (found {len(rows)} "
                "rows); give more rows or fewer devices."
            )
        batches = validation_batches(rows, batch_size=self.val_batch_size, rank=rank(), world_size=ranks)
        return RunLoader(batches, self._collate(self._opened("val")), options=self.loader, identity={})

    def _opened(self, split: str) -> Rows:
        if split not in self._rows:
            required, only_required = self._columns()
            self._rows[split] = self._open(split, required, only_required=only_required)
        return self._rows[split]

    def _open(self, split: str, required: list[str], *, only_required: bool) -> Rows:
        key = f"data.{split}_files"
        source = self.train_files if split == "train" else self.val_files
        if source is None:
            raise ConfigError(f"{key} must be set (found None); give one or several parquet files.")
        if split == "val" and isinstance(source, dict):
            if not source:
                raise ConfigError(f"{key} must hold at least one set (found {{}}); null is no validation.")
            sets = {n: self._rows_of(f"{key}.{n}", s, required, only_required) for n, s in source.items()}
            return NamedRows(sets)
        return self._rows_of(key, source, required, only_required)

    def _rows_of(self, key: str, source: Any, required: list[str], only_required: bool) -> Rows:
        return open_rows(
            self._table(key, source),
            key=key,
            required=required,
            only_required=only_required,
            max_samples=self.train_max_samples if key == "data.train_files" else self.val_max_samples,
            cache_dir=self.cache_dir,
        )

    def _table(self, key: str, source: RowSource) -> RowSource:
        """What the rows of this key are read from."""
        return source

    def _scanned(self, split: str) -> list[Block]:
        """The rows that are used, after saying how many."""
        key, blocks = f"data.{split}_files", self._opened(split).blocks
        total = sum(len(block.rows) for block in blocks)
        dropped: dict[int, str] = {}
        if judge := self._judge():
            is_narrow = not judge.skip_bad and not self.has_images
            rows = self._open(split, self._columns()[0], only_required=is_narrow)
            dropped = dropped_rows(rows, judge, workers=self._scan_workers)
        reasons = "; ".join(f"{count} with {reason}" for reason, count in Counter(dropped.values()).items())
        if len(dropped) == total:
            raise DataError(f"{key}: none of the {total} rows is left: {reasons}.")
        if dropped and rank() == 0:
            first = self._opened(split).where(min(dropped))
            log.warning(
                "%s: %d of %d rows left out: %s (first: %s)", key, len(dropped), total, reasons, first
            )
        if rank() == 0:
            log.info("%s: %d rows", key, total - len(dropped))
        kept = [Block(array("q", (i for i in b.rows if i not in dropped)), b.size) for b in blocks]
        return [block for block in kept if block.rows] if dropped else blocks

    def _blocks(self, split: str) -> list[Block]:
        return self._used.get(split) or self._opened(split).blocks


_SAMPLES = "must be -1 (all) or >= 1"


def _check(ranges: dict[str, tuple[Any, bool, str]]) -> None:
    """Raise a ConfigError for the first value that is out of its range."""
    for name, (value, is_legal, rule) in ranges.items():
        if not is_legal:
            raise ConfigError(f"data.{name} {rule} (found {value!r}).")


def columns_of(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """One list per column that some row has; None where a row has it not."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}
