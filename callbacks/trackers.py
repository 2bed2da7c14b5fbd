"""Rows and figures in every logger that can show them: one function for each kind of thing."""

from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger, WandbLogger

from lit_rl.callbacks.console_logger import ConsoleLogger
from lit_rl.callbacks.swanlab_logger import SwanLabLogger

COLUMNS = ("prompt", "completion", "reward", "advantage", "length", "finish_reason", "feedback")


def log_rows(logger: Logger, tag: str, rows: list[dict[str, Any]], step: int) -> None:
    """Show completions: as text (TensorBoard, SwanLab, console), a table (wandb) or a file (MLflow).

    A logger that can do none of these is left alone.

    Args:
        logger: on rank 0.
        tag: name of the place.
        rows: as `completion_rows` makes them.
        step: after which they were written.
    """
    match logger:
        case TensorBoardLogger():
            logger.experiment.add_text(tag, markdown(rows), step)
        case WandbLogger():
            data = [
                ["" if row[name] is None else _printable(str(row[name])) for name in COLUMNS] for row in rows
            ]
            logger.log_table(tag, columns=list(COLUMNS), data=data, step=max(step - 1, 0))
        case MLFlowLogger():
            logger.experiment.log_text(logger.run_id, markdown(rows), f"{tag}/step_{step:08d}.md")
        case SwanLabLogger():
            import swanlab

            logger.experiment.log({tag: swanlab.Text(markdown(rows))}, step=max(step - 1, 0))
        case ConsoleLogger():
            for row in rows:
                print(f"step {step}:  {tag}  reward {row['reward']}  {row['completion']!r}", flush=True)


def log_figure(logger: Logger, tag: str, figure: Any, file: Path, step: int) -> None:
    """Show a picture.

    Args:
        logger: on rank 0; one that shows no pictures is left alone.
        tag: name of the place.
        figure: of matplotlib.
        file: the same, saved.
        step: after which it was drawn.
    """
    match logger:
        case TensorBoardLogger():
            logger.experiment.add_figure(tag, figure, step)
        case WandbLogger():
            logger.log_image(tag, [str(file)])
        case MLFlowLogger():
            logger.experiment.log_artifact(logger.run_id, str(file))
        case SwanLabLogger():
            import swanlab

            logger.experiment.log({tag: swanlab.Image(str(file))}, step=max(step - 1, 0))


def markdown(rows: list[dict[str, Any]]) -> str:
    """Rows as a Markdown table."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + " --- |" * len(COLUMNS)]
    for row in rows:
        cells = ["" if row[key] is None else str(row[key]) for key in COLUMNS]
        lines.append("| " + " | ".join(_cell(cell) for cell in cells) + " |")
    return "\n".join(lines)


def _cell(text: str) -> str:
    return _printable(text).replace("|", "\\|").replace("\n", "<br>")


def _printable(text: str) -> str:
    """Lone surrogates, which no encoder takes, as escapes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
