"""RunCSVLogger: metrics of a run in one CSV file, also when it is resumed."""

import csv
import os
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import rank_zero_experiment
from lightning.pytorch.utilities.rank_zero import rank_zero_only


class RunCSVLogger(CSVLogger):
    """Lightning's CSV logger, which deletes the file it finds, made to go on with it.

    Rows of steps that a resumed run makes again give way to the new ones, so that each step is there once.
    The folder as it was stays as `csv.1`, also when a run starts at step 0 in a used one.

    Args:
        root_dir: folder of the run.
        name: folder in it; the file is `metrics.csv`.
        flush_logs_every_n_steps: steps between two writes.
    """

    def __init__(self, root_dir: str, name: str = "csv", flush_logs_every_n_steps: int = 1) -> None:
        super().__init__(root_dir, name=name, version="", flush_logs_every_n_steps=flush_logs_every_n_steps)
        self._earlier: list[dict[str, Any]] = []
        self._has_rows = False

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The writer; None until the first row comes: making it moves the file of before aside."""
        if not self._has_rows:
            return None
        if self._experiment is None:
            folder = Path(self.log_dir)
            if (folder / "metrics.csv").exists():
                with (folder / "metrics.csv").open(newline="") as rows:
                    self._earlier = list(csv.DictReader(rows))
                aside = (folder.with_name(f"{folder.name}.{n}") for n in range(1, 1_000_000))
                os.rename(folder, next(path for path in aside if not path.exists()))
        return super().experiment

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self._has_rows = True
        writer = self.experiment
        if self._earlier and step is not None:
            last = step if any(name.startswith("val/") for name in metrics) else step - 1
            kept = [row for row in self._earlier if int(row["step"]) <= last]  # a step that is only validated
            for row in kept:
                values = {name: float(v) for name, v in row.items() if v != "" and name != "step"}
                writer.log_metrics(values, int(row["step"]))
            self._earlier = []
        super().log_metrics(metrics, step)

    def log_hyperparams(self, params: Any = None, *args: Any, **kwargs: Any) -> None:
        """Nothing: the configuration is in the run's folder."""

    @rank_zero_only
    def save(self) -> None:
        """Write what was logged; a run that logs nothing, such as a finished one, leaves the file alone."""
        if self._experiment is not None:
            super().save()
