"""SwanLabLogger: metrics, completions and figures of a run in SwanLab."""

from argparse import Namespace
from typing import Any, Literal

from lightning.pytorch.loggers import Logger
from lightning.pytorch.loggers.logger import rank_zero_experiment
from lightning.pytorch.utilities.rank_zero import rank_zero_only


class SwanLabLogger(Logger):
    """Sends what is logged to SwanLab, on rank 0 (source: verl `trainer.logger: [swanlab]`).

    Args:
        project: project of the run.
        name: of the run.
        log_dir: folder of the run's files.
        mode: offline and local write `log_dir` only, online sends it, disabled does nothing.
    """

    def __init__(
        self,
        project: str,
        name: str,
        log_dir: str,
        mode: Literal["online", "local", "offline", "disabled"] = "offline",
    ) -> None:
        super().__init__()
        self.project, self._name, self._log_dir, self.mode = project, name, log_dir, mode
        self._run: Any = None

    @property
    def name(self) -> str:
        return self._name

    @property
    def version(self) -> str:
        return ""

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """SwanLab's run: started when the first value comes, finished by SwanLab when the process ends."""
        if self._run is None:
            import swanlab

            self._run = swanlab.init(
                project=self.project, name=self._name, log_dir=self._log_dir, mode=self.mode, reinit=True
            )
        return self._run

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        values = {name: float(value) for name, value in metrics.items() if name != "epoch"}
        self.experiment.log(values, step=step)

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Nothing: the configuration is in the run's folder."""
