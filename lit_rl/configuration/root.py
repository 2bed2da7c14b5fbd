"""The keys that belong to no group."""

from dataclasses import dataclass
from typing import Literal

from lit_rl.errors import ConfigError


@dataclass(frozen=True)
class Run:
    """What one call of `train.py` does.

    Args:
        task: fit trains; validate and test answer the validation rows with the weights as they are, or with
            those of the checkpoint that `checkpoint.resume_mode` finds, print the metrics and write every
            response with its reward to `responses.parquet` in the run's folder, for
            `python -m lit_rl.evaluate`; generate writes the responses and calls no reward; search looks for a
            first success on each training row, each time from the same weights
            (callbacks=[test_time_search]).
        run_dir: folder of everything the run writes; the same folder again resumes it.
        project_name: name for loggers.
        experiment_name: name for loggers and the summary.
        seed: of everything; every random draw is a function of it.
        log_level: least severe message that rank 0 prints; other ranks print warnings.
        float32_matmul_precision: torch's TF32 switch; null leaves it alone.
        val_before_train: validate before the first step; the last step is always validated.
        plan: print what would be run, and stop.
        full_trace: print the whole traceback of a user error.

    Raises:
        ConfigError: the seed is out of range.
    """

    task: Literal["fit", "validate", "test", "generate", "search"] = "fit"
    run_dir: str = "outputs"
    project_name: str = "lit_rl"
    experiment_name: str = "lit_rl"
    seed: int = 42
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    float32_matmul_precision: Literal["highest", "high", "medium"] | None = None
    val_before_train: bool = True
    plan: bool = False
    full_trace: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**32:
            raise ConfigError(f"seed must be in [0, 2**32) (found {self.seed!r}).")
        if not self.run_dir.strip():
            raise ConfigError("run_dir must not be empty; give a folder.")
