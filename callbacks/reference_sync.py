"""ReferenceSync: moves the reference toward the policy every n steps."""

from typing import Any

import lightning as L

from lit_rl.errors import ConfigError
from lit_rl.hooks import RLCallback


class ReferenceSync(RLCallback):
    """TR-DPO: reference = alpha * policy + (1 - alpha) * reference, every n steps.

    Alpha 1 replaces the reference (hard update), below 1 mixes (soft update). Mixed are the weights as they
    act, adapters added, in sums of float32. The module registers a moved reference, so it is part of every
    checkpoint. Source: Gorbatovski et al., Learn Your Reference Model for
    Real Good Alignment, arXiv 2404.09656, eq. 6; TRL `sync_ref_model`.

    Args:
        ref_model_mixup_alpha: share of the policy, in [0, 1].
        ref_model_sync_steps: steps between two moves.

    Raises:
        ConfigError: out of range; when training starts, also without a reference.
    """

    def __init__(self, ref_model_mixup_alpha: float = 0.6, ref_model_sync_steps: int = 512) -> None:
        if not 0 <= ref_model_mixup_alpha <= 1:
            raise ConfigError(
                f"callbacks.reference_sync.ref_model_mixup_alpha must be in [0, 1] "
                f"(found {ref_model_mixup_alpha!r})."
            )
        if ref_model_sync_steps < 1:
            raise ConfigError(
                f"callbacks.reference_sync.ref_model_sync_steps must be >= 1 "
                f"(found {ref_model_sync_steps!r})."
            )
        self.ref_model_mixup_alpha = ref_model_mixup_alpha
        self.ref_model_sync_steps = ref_model_sync_steps

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Before the module makes its reference: it will move, so it needs weights of its own."""
        pl_module.ref_moves = True  # type: ignore[assignment]

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if pl_module.ref is None:
            raise ConfigError(
                "callbacks.reference_sync needs a reference, and without a KL none is loaded; "
                "set algo.kl.beta above 0 or algo.kl.use_kl_in_reward=true, or leave the callback out."
            )

    def on_update_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        *,
        step: int,
        metrics: dict[str, float],
        **payload: Any,
    ) -> None:
        if step % self.ref_model_sync_steps == 0:
            ref: Any = pl_module.ref
            ref.mix_(self.ref_model_mixup_alpha)
