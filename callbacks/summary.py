"""RunSummary: one JSON file with what a run reached and what it cost."""

import json
import os
import platform
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

import lightning as L

from lit_rl.callbacks.memory import peak_resident_bytes
from lit_rl.hooks import RLCallback

PHASES = ("generate", "score", "teacher", "update", "validate", "save")
PACKAGES = ("lit-rl", "torch", "lightning", "transformers")
ACCURACY = "val/accuracy/"


class RunSummary(RLCallback):
    """Writes `summary.json` when training ends, and again when a validation follows it.

    | key | meaning |
    | --- | --- |
    | algo, seed | class of the algorithm in lower case; seed of the run |
    | steps, optimizer_steps | iterations; updates of the weights |
    | val_start, val_end | accuracy by data source, validated at step 0 ({} if it was not), and last |
    | seconds_to_first_update | from the creation of the process to the end of the first step's updates |
    | seconds_total | from the creation of the process to now |
    | seconds | in generating for training, scoring, teacher, updates, validation, saving; rank 0 |
    | tokens_generated, tokens_per_second | completion tokens of training, all ranks; per second generating |
    | peak_rss_gb | largest resident memory of rank 0's process, in 1e9 bytes |
    | versions | of Python and the main packages |

    The process's creation is before any import. A second run in the same process counts from the end of
    the first. A resumed run goes on from what its checkpoint holds; what was lost to an interruption is not
    in it.

    Args:
        run_dir: where the file goes.
    """

    _counted_until: ClassVar[float] = 0.0
    """Age of this process, in seconds, when a run ended that was counted."""

    def __init__(self, run_dir: str) -> None:
        self.file = Path(run_dir) / "summary.json"
        self.val_start: dict[str, float] = {}
        self.val_end: dict[str, float] = {}
        self.seconds_to_first_update: float | None = None
        self.tokens_generated = 0
        self._seconds_before = 0.0
        self._rss_before = 0.0
        self._begin = RunSummary._counted_until
        self._has_trained = False

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.sanity_checking:
            return
        metrics = trainer.callback_metrics
        self.val_end = {
            name.removeprefix(ACCURACY): float(value)
            for name, value in metrics.items()
            if name.startswith(ACCURACY)
        }
        if trainer.global_step == 0:
            self.val_start = self.val_end

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._has_trained = True

    def on_update_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        *,
        step: int,
        metrics: dict[str, float],
        **payload: Any,
    ) -> None:
        self.tokens_generated += round(metrics["rollout/tokens"])
        if self.seconds_to_first_update is None:
            self.seconds_to_first_update = round(self.seconds_total, 3)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if self._has_trained and trainer.is_global_zero:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            temporary = self.file.with_suffix(".tmp")
            temporary.write_text(json.dumps(self.summary(trainer, pl_module), indent=2) + "\n", "utf-8")
            os.replace(temporary, self.file)
        RunSummary._counted_until = process_age()

    def summary(self, trainer: L.Trainer, pl_module: Any) -> dict[str, Any]:
        """What is written; see the table above.

        Args:
            trainer: of the run.
            pl_module: an RLModule.
        """
        seconds = {phase: round(pl_module.clock.total.get(phase, 0.0), 3) for phase in PHASES}
        generating = seconds["generate"]
        return {
            "algo": type(pl_module).__name__.lower(),
            "seed": pl_module.seed,
            "steps": trainer.global_step,
            "optimizer_steps": pl_module.optimizer_steps,
            "val_start": self.val_start,
            "val_end": self.val_end,
            "seconds_to_first_update": self.seconds_to_first_update,
            "seconds_total": round(self.seconds_total, 3),
            "seconds": seconds,
            "tokens_generated": self.tokens_generated,
            "tokens_per_second": round(self.tokens_generated / generating, 1) if generating else None,
            "peak_rss_gb": round(self.peak_rss_gb, 3),
            "versions": {
                "python": platform.python_version(),
                **{name.replace("-", "_"): version(name) for name in PACKAGES},
            },
        }

    @property
    def seconds_total(self) -> float:
        """Of this run so far, all its processes one after another."""
        return self._seconds_before + process_age() - self._begin

    @property
    def peak_rss_gb(self) -> float:
        """Largest resident memory so far, of all its processes one after another."""
        return max(self._rss_before, peak_resident_bytes() / 1e9)

    def state_dict(self) -> dict[str, Any]:
        return {
            "val_start": self.val_start,
            "val_end": self.val_end,
            "seconds_to_first_update": self.seconds_to_first_update,
            "tokens_generated": self.tokens_generated,
            "seconds_total": self.seconds_total,
            "peak_rss_gb": self.peak_rss_gb,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.val_start, self.val_end = state_dict["val_start"], state_dict["val_end"]
        self.seconds_to_first_update = state_dict["seconds_to_first_update"]
        self.tokens_generated = state_dict["tokens_generated"]
        self._seconds_before = state_dict["seconds_total"]
        self._rss_before = state_dict["peak_rss_gb"]


def process_age() -> float:
    """Seconds since this process was created, before any import."""
    stat = Path("/proc/self/stat")
    if stat.exists():
        # Field 22 counts clock ticks from boot to creation; the name in field 2 may hold spaces.
        ticks = int(stat.read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    import psutil  # reads the same on other systems, to a second

    return time.time() - psutil.Process().create_time()
