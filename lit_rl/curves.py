"""One picture of a run: a panel for each thing one looks at first."""

from pathlib import Path
from typing import Any

PANELS = (
    ("reward", ("rollout/reward",)),
    ("validation accuracy", ("val/accuracy",)),
    ("loss", ("train/loss",)),
    ("KL to the reference", ("train/kl",)),
    ("completion length", ("rollout/completion_len",)),
    ("entropy", ("train/entropy",)),
)


def draw(history: dict[str, list[tuple[int, float]]], file: Path) -> Any:
    """The panels that have numbers, in one picture.

    Args:
        history: (step, value) by metric name.
        file: the picture to write.

    Returns:
        The figure.
    """
    from matplotlib.figure import Figure  # takes half a second to import, and only the end of a run needs it

    panels = [(title, [n for n in names if n in history]) for title, names in PANELS]
    panels = [(title, names) for title, names in panels if names]
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(4.2 * columns, 2.9 * rows), layout="constrained")
    for index, (title, names) in enumerate(panels):
        axes = figure.add_subplot(rows, columns, index + 1)
        for name in names:
            steps, values = zip(*history[name], strict=True)
            axes.plot(steps, values, marker="." if len(steps) < 30 else None, label=name)
        axes.set_title(title)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)
    return figure
