"""LogCompletions: what the policy wrote and what it was given for it, as files, tables and text."""

import json
import math
import os
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from rich import get_console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from lit_rl.batch import RolloutBatch
from lit_rl.callbacks.trackers import log_rows
from lit_rl.distributed import gather_objects
from lit_rl.errors import ConfigError
from lit_rl.hooks import RLCallback

TABLE_WIDTH = 100
TABLES_PER_RUN = 10


class LogCompletions(RLCallback):
    """The first rows of a step: as JSON lines in `completions.jsonl`, in the loggers as text, table or file
    (`trackers.py`), and as a table on the console where it is wide enough, ten times a run.

    Validation rows go to `completions_val.jsonl`. A line has step, prompt_row, generation, prompt,
    completion, rewards by function, reward, advantage, length, finish_reason and feedback; a number that is
    not there is null. Rows of all ranks, each once. A resumed run takes out the lines of steps that it makes
    again; a fresh run in a used folder keeps the old file under another name. Source: TRL `log_completions`,
    verl `trainer.log_val_generations`.

    Args:
        run_dir: where the files go.
        every_n_steps: steps between two logs; None = `trainer.log_every_n_steps`.
        num_rows: training rows per log.
        log_val_generations: validation rows per validation; 0 = none.

    Raises:
        ConfigError: a value is out of range.
    """

    def __init__(
        self,
        run_dir: str,
        *,
        every_n_steps: int | None = None,
        num_rows: int = 8,
        log_val_generations: int = 0,
    ) -> None:
        for name, value, low in (
            ("every_n_steps", every_n_steps, 1),
            ("num_rows", num_rows, 1),
            ("log_val_generations", log_val_generations, 0),
        ):
            if value is not None and value < low:
                raise ConfigError(f"callbacks.log_completions.{name} must be >= {low} (found {value!r}).")
        self.run_dir = Path(run_dir)
        self.every_n_steps = every_n_steps
        self.num_rows = num_rows
        self.log_val_generations = log_val_generations
        self._tables = 0
        self._start_step = 0
        self._ready: set[Path] = set()

    @property
    def file(self) -> Path:
        """Training rows."""
        return self.run_dir / "completions.jsonl"

    @property
    def val_file(self) -> Path:
        """Validation rows."""
        return self.run_dir / "completions_val.jsonl"

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._start_step = trainer.global_step

    def on_update_end(
        self,
        trainer: L.Trainer,
        pl_module: Any,
        *,
        step: int,
        metrics: dict[str, float],
        **payload: Any,
    ) -> None:
        period = self.every_n_steps
        if period is None:
            period = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if period == 0 or step % period != 0:
            return
        rows = gathered_rows(pl_module, [pl_module.last_rollout], step, self.num_rows)
        if trainer.is_global_zero:
            self._write(self.file, rows)
            _to_loggers(trainer, "completions", rows, step)
            self._to_console(trainer, rows, step)

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        if self.log_val_generations == 0 or trainer.sanity_checking:
            return
        step = trainer.global_step
        rows = gathered_rows(pl_module, pl_module.validation.rollouts, step, self.log_val_generations)
        if trainer.is_global_zero:
            self._write(self.val_file, rows)
            _to_loggers(trainer, "validation_completions", rows, step)

    def _write(self, file: Path, rows: list[dict[str, Any]]) -> None:
        """Append; a full disk costs rows, never the run."""
        try:
            if file not in self._ready:
                file.parent.mkdir(parents=True, exist_ok=True)
                continue_after(file, self._start_step)
                self._ready.add(file)
            with file.open("a", encoding="ascii") as out:
                out.writelines(json.dumps(row, allow_nan=False) + "\n" for row in rows)
        except OSError as error:
            rank_zero_warn(f"Completions were not written to {file}: {error}.")

    def _to_console(self, trainer: L.Trainer, rows: list[dict[str, Any]], step: int) -> None:
        console = get_console()
        if trainer.progress_bar_callback is None or not console.is_terminal or console.width < TABLE_WIDTH:
            return
        total = trainer.max_steps if trainer.max_steps > 0 else trainer.num_training_batches
        if step * TABLES_PER_RUN >= self._tables * total:
            self._tables = math.floor(step * TABLES_PER_RUN / total) + 1
            console.print(table(rows, f"Step {step}"))


def gathered_rows(
    pl_module: Any, rollouts: list[RolloutBatch], step: int, limit: int
) -> list[dict[str, Any]]:
    """The first rows of the step over all ranks, in the order of prompts and generations. Collective.

    Rank r of W has every W-th prompt, so that prompts of the ranks alternate.

    Args:
        pl_module: has `chat` and `reward_names`.
        rollouts: scored rows of this rank.
        step: written into each row.
        limit: rows at most.
    """
    own: list[tuple[int, dict[str, Any]]] = []
    prompts = 0
    for rollout in rollouts:
        size = rollout.num_generations
        count = min(len(rollout), limit - len(own))
        rows = completion_rows(rollout.select(slice(0, count)), pl_module.chat, pl_module.reward_names, step)
        own += [(prompts + i // size, row) for i, row in enumerate(rows)]
        prompts += len(rollout) // size
    by_rank = gather_objects(own)
    merged = [(prompt, rank, row) for rank, rows in enumerate(by_rank) for prompt, row in rows]
    merged.sort(key=lambda item: item[:2])
    return [row for _, _, row in merged[:limit]]


def completion_rows(
    rollout: RolloutBatch, chat: Any, reward_names: list[str], step: int
) -> list[dict[str, Any]]:
    """Each row as plain values.

    Args:
        rollout: rows with completions; rewards and advantages where there are any.
        chat: has `decode(ids)`.
        reward_names: of the columns of `rewards_per_func`.
        step: written into each row.
    """
    assert rollout.completion_ids is not None and rollout.completion_len is not None
    out = []
    for b, (prompt_len, length) in enumerate(
        zip(rollout.prompt_len.tolist(), rollout.completion_len.tolist(), strict=True)
    ):
        width = rollout.prompt_ids.shape[1]
        parts = [] if rollout.rewards_per_func is None else rollout.rewards_per_func[b].tolist()
        out.append(
            {
                "step": step,
                "prompt_row": int(rollout.prompt_row[b]),
                "generation": b % rollout.num_generations,
                "prompt": chat.decode(rollout.prompt_ids[b, width - prompt_len :].tolist()),
                "completion": chat.decode(rollout.completion_ids[b, :length].tolist()),
                "rewards": dict(zip(reward_names, map(_number, parts), strict=True)) if parts else {},
                "reward": None if rollout.rewards is None else _number(float(rollout.rewards[b])),
                "advantage": _advantage(rollout, b, length),
                "length": length,
                "finish_reason": None if rollout.finish_reason is None else rollout.finish_reason[b],
                "feedback": None if rollout.feedback is None else rollout.feedback[b],
            }
        )
    return out


def continue_after(file: Path, step: int) -> None:
    """Get a file of rows ready for the steps after this one.

    Args:
        file: may not exist.
        step: the run's steps so far; lines of later ones are taken out. At 0 the file is another run's and
            is set aside.
    """
    if not file.exists():
        return
    if step == 0:
        number = next(n for n in range(1, 1_000_000) if not _numbered(file, n).exists())
        os.rename(file, _numbered(file, number))
        return
    lines = file.read_text("ascii", errors="replace").splitlines(keepends=True)
    kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
    temporary = file.with_suffix(".tmp")
    temporary.write_text("".join(kept), "ascii")
    os.replace(temporary, file)


def table(rows: list[dict[str, Any]], title: str) -> Table:
    """Rows as a table, each text on one line and cut to what fits."""
    out = Table(title=title, expand=True)
    out.add_column("prompt", ratio=3, no_wrap=True)
    out.add_column("completion", ratio=4, no_wrap=True)
    names = list(rows[0]["rewards"]) if rows and len(rows[0]["rewards"]) > 1 else []
    for name in [*names, "reward", "advantage", "tokens", "end"]:
        out.add_column(name, no_wrap=True, justify="right")
    for row in rows:
        numbers = [row["rewards"][name] for name in names] + [row["reward"], row["advantage"]]
        shown = [_printable(" ".join(row[key].split())) for key in ("prompt", "completion")]
        cells = [
            *shown,
            *("" if n is None else f"{n:.3g}" for n in numbers),
            str(row["length"]),
            row["finish_reason"] or "",
        ]
        out.add_row(*(Text(cell) for cell in cells))
    return out


def _to_loggers(trainer: L.Trainer, tag: str, rows: list[dict[str, Any]], step: int) -> None:
    for logger in trainer.loggers:
        log_rows(logger, tag, rows, step)


def _printable(text: str) -> str:
    """Lone surrogates, which no encoder takes, as escapes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _advantage(rollout: RolloutBatch, b: int, length: int) -> float | None:
    """The row's advantage, or the mean of its tokens' advantages."""
    advantages: Tensor | None = rollout.advantages
    if advantages is None or (advantages.ndim == 2 and length == 0):
        return None
    if advantages.ndim == 1:
        return _number(float(advantages[b]))
    return _number(float(advantages[b][rollout.written_mask[b]].mean()))


def _numbered(file: Path, number: int) -> Path:
    return file.with_name(f"{file.stem}.{number}{file.suffix}")
