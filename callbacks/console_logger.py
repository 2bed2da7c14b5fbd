"""ConsoleLogger: every metric as a line of text."""

from argparse import Namespace
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_only


class ConsoleLogger(Logger):
    """Prints what is logged for a step on one line, on rank 0. For logs that are read or searched as text."""

    @property
    def name(self) -> str:
        return "console"

    @property
    def version(self) -> str:
        return ""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        values = (f"{name} {float(value):.6g}" for name, value in sorted(metrics.items()) if name != "epoch")
        print(f"step {0 if step is None else step + 1}:", *values, sep="  ", flush=True)

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Nothing: the configuration is in the run's folder."""
