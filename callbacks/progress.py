"""Progress: how far a run is and how it is doing, live in a terminal, as lines elsewhere."""

import math
from typing import Any

import lightning as L
from rich import get_console
from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.table import Table
from rich.text import Text

from lit_rl.hooks import RLCallback

LINES_PER_RUN = 50
PHASES = ("generate", "score", "teacher", "update", "validate", "save")
SHOWN = (
    ("reward", "rollout/reward", "{:.3f}"),
    ("loss", "train/loss", "{:.4g}"),
    ("KL", "train/kl", "{:.3g}"),
    ("length", "rollout/completion_len", "{:.1f}"),
    ("tokens/s", "rollout/tokens_per_second", "{:.0f}"),
)


class Progress(RLCallback):
    """Takes the place of Lightning's bar: steps, reward, loss, KL, length, speed, and where the time goes.

    In a terminal a live display, in which a second bar moves during a generation; elsewhere (files,
    notebooks) about fifty lines a run. At the end a table. Rank 0 only, and only with
    `trainer.enable_progress_bar`.
    """

    def __init__(self) -> None:
        self._is_on = False
        self._live: Live | None = None
        self._bars: Bars | None = None
        self._total = math.inf
        self._metrics: dict[str, float] = {}
        self._first_reward: float | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        bar = trainer.progress_bar_callback
        self._is_on = bar is not None and trainer.is_global_zero
        if bar is not None:
            bar.disable()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not self._is_on:
            return
        self._total = trainer.max_steps if trainer.max_steps > 0 else trainer.num_training_batches
        console = get_console()
        if console.is_terminal and not console.is_jupyter:
            self._start(trainer.global_step)

    def on_update_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        *,
        step: int,
        metrics: dict[str, float],
        **payload: Any,
    ) -> None:
        self._metrics = metrics
        if self._first_reward is None:
            self._first_reward = metrics.get("rollout/reward")
        if self._bars is not None:
            self._bars.update(self._bars.task_ids[0], completed=step)
            self._bars.update(self._bars.task_ids[1], visible=False)
        elif self._is_on and self._is_line_step(step):
            total = "" if math.isinf(self._total) else f"/{self._total:.0f}"
            print(f"step {step}{total}  {line(metrics)}", flush=True)

    def generation_progress(self, done: int, total: int) -> None:
        """Called now and then while completions are written; moves the second bar.

        Args:
            done: rows finished.
            total: rows in all.
        """
        if self._bars is not None:
            self._bars.update(self._bars.task_ids[1], completed=done, total=total, visible=True)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._describe("validating")

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._describe("generating")

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._stop()
        if self._is_on and self._metrics:
            accuracy = trainer.callback_metrics.get("val/accuracy")
            found = None if accuracy is None else float(accuracy)
            get_console().print(
                summary_table(
                    trainer.global_step, self._first_reward, self._metrics, found, pl_module.clock.total
                )
            )

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        self._stop()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._stop()

    def _start(self, step: int) -> None:
        self._bars = Bars(
            TextColumn("{task.description:>10}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        total = None if math.isinf(self._total) else self._total
        self._bars.add_task("steps", total=total, completed=step)
        self._bars.add_task("generating", total=None, visible=False)
        self._live = Live(get_renderable=self._rendered, console=get_console(), refresh_per_second=4)
        self._live.start()

    def _rendered(self) -> Any:
        assert self._bars is not None
        return Group(self._bars, Text(line(self._metrics), no_wrap=True, overflow="ellipsis"))

    def _stop(self) -> None:
        if self._live is not None:
            self._live.stop()
        self._live = self._bars = None

    def _describe(self, description: str) -> None:
        if self._bars is not None:
            self._bars.update(self._bars.task_ids[1], description=description, visible=False)

    def _is_line_step(self, step: int) -> bool:
        if math.isinf(self._total):
            return step % 10 == 0 or step == 1
        return step in (1, self._total) or step % max(1, int(self._total) // LINES_PER_RUN) == 0


def line(metrics: dict[str, float]) -> str:
    """The numbers that matter most, and each phase's share of the step's time.

    Args:
        metrics: of one step, by name; those that an algorithm does not have are left out.
    """
    parts = [f"{label} {form.format(metrics[name])}" for label, name, form in SHOWN if name in metrics]
    seconds = {phase: metrics.get(f"time/{phase}", 0.0) for phase in PHASES}
    total = sum(seconds.values())
    shares = [f"{phase} {share / total:.0%}" for phase, share in seconds.items() if share > 0]
    return "  ".join([*parts, *([" ".join(shares)] if shares else [])])


def summary_table(
    steps: int,
    first_reward: float | None,
    metrics: dict[str, float],
    accuracy: float | None,
    seconds: dict[str, float],
) -> Table:
    """What a run came to.

    Args:
        steps: done.
        first_reward: mean reward of the first step of this process.
        metrics: of the last step.
        accuracy: of the last validation so far.
        seconds: by phase.
    """
    table = Table(title=f"{steps} steps", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    if first_reward is not None:
        table.add_row("reward, first and last step", f"{first_reward:.3f} -> {metrics['rollout/reward']:.3f}")
    if accuracy is not None:
        table.add_row("validation accuracy", f"{accuracy:.3f}")
    for label, name, form in SHOWN[1:]:
        if name in metrics:
            table.add_row(f"{label}, last step", form.format(metrics[name]))
    total = sum(seconds.values())
    for phase in PHASES:
        if seconds.get(phase, 0.0) > 0:
            table.add_row(f"time to {phase}", f"{seconds[phase]:.1f} s ({seconds[phase] / total:.0%})")
    return table
