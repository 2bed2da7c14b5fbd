"""Nothing piles up: tensors and resident memory stay flat over a hundred iterations."""

import gc
import importlib.util
from pathlib import Path

import lightning as L
import psutil
import pytest
import torch

from lit_rl.configuration.compose import Source
from lit_rl.configuration.job import checked

ROOT = Path(__file__).resolve().parents[1]
STEPS = 100
RUN = (
    "debug=fast",
    f"trainer.max_steps={STEPS}",
    "trainer.val_check_interval=20",
    "trainer.enable_progress_bar=false",
    "checkpoint.save_freq=10",
    "checkpoint.max_to_keep=1",
    "checkpoint.async_save=true",
    "callbacks.curves=null",
    "logger=[csv]",
    "+callbacks.probe._target_=test_memory.MemoryProbe",
)


class MemoryProbe(L.Callback):
    """Living tensors and resident bytes every tenth step."""

    seen: list[tuple[int, int]] = []  # noqa: RUF012 (read by the test that runs it)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        MemoryProbe.seen = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if trainer.global_step % 10 == 5:
            gc.collect()
            tensors = sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())
            MemoryProbe.seen.append((tensors, psutil.Process().memory_info().rss))


@pytest.mark.slow
@pytest.mark.field("mem/3")
@pytest.mark.field("mem/5")
@pytest.mark.parametrize("algo", ["grpo", "sdpo"])
def test_tensors_and_memory_are_flat_over_a_hundred_iterations(algo: str, tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("train_under_test", ROOT / "train.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.run(checked(Source(ROOT / "conf"), [f"algo={algo}", *RUN, f"run_dir={tmp_path}"]))
    tensors, resident = zip(*MemoryProbe.seen, strict=True)
    assert len(tensors) == STEPS // 10
    assert max(tensors[-4:]) <= max(tensors[2:6]), tensors  # one may be on its way
    weights = (ROOT / "lit_rl/assets/tiny/model.safetensors").stat().st_size
    assert resident[-1] - resident[2] < 2 * weights, resident
