"""A plug-in that writes down, on each rank, what became of the reference in a run."""

import hashlib
import json
from pathlib import Path

import lightning as L
from torch import Tensor


def digest(tensors: dict[str, Tensor]) -> str:
    """Of all bits, names included."""
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(name.encode() + tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


class ReferenceWatch(L.Callback):
    """Args: folder: where `<rank>.json` goes."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.start = ""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        with pl_module.ref.model() as model:  # type: ignore[union-attr]
            self.start = digest(model.state_dict())

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trained = {
            id(p) for optimizer in trainer.optimizers for g in optimizer.param_groups for p in g["params"]
        }
        with pl_module.ref.model() as model:  # type: ignore[union-attr]
            found = {
                "start": self.start,
                "end": digest(model.state_dict()),
                "policy": digest(pl_module.policy.state_dict()),  # type: ignore[union-attr,operator]
                "has_gradients": any(p.grad is not None for p in model.parameters()),
                "trains": model.training or any(p.requires_grad for p in model.parameters()),
                "in_optimizer": any(id(p) in trained for p in model.parameters()),
            }
        self.folder.mkdir(exist_ok=True)
        (self.folder / f"{trainer.global_rank}.json").write_text(json.dumps(found))
