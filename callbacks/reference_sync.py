"""ReferenceSync: moves the reference toward the policy every n steps."""

from typing import Any

import lightning as L

from lit_rl.errors import ConfigError
from lit_rl.hooks import RLCallback
from lit_rl.models.roles import FrozenCopy
from lit_rl.models.weights import has_adapters


class ReferenceSync(RLCallback):
    """TR-DPO: reference = alpha * policy + (1 - alpha) * reference, every n steps.

    Alpha 1 replaces the reference (hard update), below 1 mixes (soft update). The module registers a moved
    reference, so it is part of every checkpoint. Source: Gorbatovski et al., Learn Your Reference Model for
    Real Good Alignment, arXiv 2404.09656, eq. 6; TRL `sync_ref_model`.

    Args:
        ref_model_mixup_alpha: share of the policy, in [0, 1].
        ref_model_sync_steps: steps between two moves.

    Raises:
        ConfigError: out of range; when training starts, also without a reference, or with one that cannot
            move.
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

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        ref: Any = pl_module.ref
        if ref is None:
            raise ConfigError(
                "callbacks.reference_sync needs a reference, and without a KL none is loaded; "
                "set algo.kl.beta above 0 or algo.kl.use_kl_in_reward=true, or leave the callback out."
            )
        if not isinstance(ref, FrozenCopy) or has_adapters(pl_module.policy):  # type: ignore[arg-type]
            raise ConfigError(
                "callbacks.reference_sync cannot move the reference of a LoRA run, which is the policy with "
                "its adapters off; set model.lora.lora_rank=0, or leave the callback out."
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
            ref.mix_(pl_module.policy, self.ref_model_mixup_alpha)
