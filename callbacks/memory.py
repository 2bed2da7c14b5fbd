"""MemoryMetrics: what each step takes, and a cache that is given back now and then."""

import resource
import sys

import lightning as L
import psutil
import torch

from lit_rl.errors import ConfigError

GB = 1e9


class MemoryMetrics(L.Callback):
    """Logs memory at the end of each step, the largest over all ranks, in 1e9 bytes.

    | metric | meaning |
    | --- | --- |
    | memory/rss_gb, memory/peak_rss_gb | resident memory of the process: now, largest so far |
    | memory/allocated_gb, memory/peak_allocated_gb | on a GPU: tensors at the end of the step, most in it |
    | memory/reserved_gb | on a GPU: what torch holds, its cache included |

    Args:
        torch_empty_cache_steps: steps between two releases of torch's cache on the GPU; null is never. Costs
            time, and helps where another process shares the GPU. Source: TRL `torch_empty_cache_steps`.

    Raises:
        ConfigError: it is below 1, or set where there is no GPU.
    """

    def __init__(self, torch_empty_cache_steps: int | None = None) -> None:
        if torch_empty_cache_steps is not None and torch_empty_cache_steps < 1:
            raise ConfigError(
                f"callbacks.memory.torch_empty_cache_steps must be null or >= 1 "
                f"(found {torch_empty_cache_steps!r})."
            )
        self.torch_empty_cache_steps = torch_empty_cache_steps

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if self.torch_empty_cache_steps is not None and trainer.strategy.root_device.type == "cpu":
            raise ConfigError(
                f"callbacks.memory.torch_empty_cache_steps (found {self.torch_empty_cache_steps}) has no "
                f"effect here; it needs a GPU (found trainer.accelerator cpu)."
            )

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: object, batch_idx: int
    ) -> None:
        if pl_module.device.type != "cpu":
            torch.accelerator.reset_peak_memory_stats()

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: object,
        batch: object,
        batch_idx: int,
    ) -> None:
        found = {
            "memory/rss_gb": psutil.Process().memory_info().rss / GB,
            "memory/peak_rss_gb": peak_resident_bytes() / GB,
        }
        if pl_module.device.type != "cpu":
            found["memory/allocated_gb"] = torch.accelerator.memory_allocated() / GB
            found["memory/peak_allocated_gb"] = torch.accelerator.max_memory_allocated() / GB
            found["memory/reserved_gb"] = torch.accelerator.memory_reserved() / GB
        pl_module.log_dict(found, reduce_fx="max", sync_dist=True)
        every = self.torch_empty_cache_steps
        if every is not None and trainer.global_step % every == 0:
            torch.accelerator.empty_cache()


def peak_resident_bytes() -> int:
    """Largest resident memory of this process so far."""
    unit = 1 if sys.platform == "darwin" else 1024  # macOS reports bytes, Linux kibibytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
