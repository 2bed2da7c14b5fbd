"""Makes `trainer.global_step` count iterations under manual optimization.

Lightning counts optimizer steps there, so that two updates per rollout would halve every period. This is the
one place that touches its private loop state; `tests/algorithms/test_iteration.py` holds it to the installed
version.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import lightning as L
from lightning.pytorch.core.optimizer import do_nothing_closure


@contextmanager
def rl_iteration(pl_module: L.LightningModule) -> Iterator[None]:
    """Wrap one `training_step`: however many optimizer steps are taken inside, the trainer counts one."""
    loop = pl_module.trainer.fit_loop.epoch_loop.manual_optimization
    progress = loop.optim_step_progress
    for optimizer in pl_module.trainer.strategy._lightning_optimizers:
        optimizer._on_before_step = optimizer._on_after_step = do_nothing_closure
    progress.increment_ready()
    yield
    progress.increment_completed()
