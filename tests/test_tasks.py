"""When a run validates: before the first step, at its interval, and after the last step, each step once."""

from pathlib import Path

import lightning as L
import pytest
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel

from lit_rl import tasks


class Events(L.Callback):
    """Notes at which step each validation ran; resumes from `path`, as the checkpoint callback would."""

    def __init__(self, path: Path | None = None, save_to: Path | None = None) -> None:
        self.path, self.save_to = path, save_to
        self.validated: list[int] = []

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.validated.append(trainer.global_step)

    def on_train_batch_end(self, trainer: L.Trainer, *args: object) -> None:
        if self.save_to is not None and trainer.global_step == 2:
            trainer.save_checkpoint(self.save_to)

    def resume_path(self, total_steps: int | None, steps_per_data_epoch: float | None) -> Path | None:
        return self.path


class Data(BoringDataModule):
    """Rows with something to validate on."""

    val_files = "embedded"


def fit(events: Events, folder: Path, *, val_before_train: bool = True, **settings) -> L.Trainer:
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=1,
        num_sanity_val_steps=0,
        check_val_every_n_epoch=None,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=folder,
        callbacks=[events],
        **{"limit_val_batches": 1, **settings},
    )
    tasks.fit(
        trainer,
        BoringModel(),
        Data(),
        total_steps=3,
        steps_per_data_epoch=10.0,
        val_before_train=val_before_train,
    )
    return trainer


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"val_check_interval": 2}, [0, 2, 3]),
        ({"val_check_interval": 3}, [0, 3]),
        ({"val_check_interval": 1}, [0, 1, 2, 3]),
        ({"val_check_interval": 50}, [0, 3]),
        ({"val_check_interval": 2, "val_before_train": False}, [2, 3]),
        ({"val_check_interval": 2, "limit_val_batches": 0}, []),
    ],
)
def test_the_first_and_the_last_step_are_validated_once(tmp_path: Path, settings: dict, steps: list) -> None:
    events = Events()
    fit(events, tmp_path, max_steps=3, **settings)
    assert events.validated == steps


@pytest.mark.filterwarnings("ignore")
def test_a_resumed_run_is_not_validated_before_it_goes_on(tmp_path: Path) -> None:
    fit(Events(save_to=tmp_path / "two.ckpt"), tmp_path, max_steps=3, val_check_interval=3)
    events = Events(tmp_path / "two.ckpt")
    fit(events, tmp_path, max_steps=3, val_check_interval=3)
    assert events.validated == [3]


@pytest.mark.filterwarnings("ignore")
def test_a_finished_run_is_left_alone(tmp_path: Path) -> None:
    first = fit(Events(), tmp_path, max_steps=3, val_check_interval=2)
    first.save_checkpoint(tmp_path / "three.ckpt")
    events = Events(tmp_path / "three.ckpt")
    trainer = fit(events, tmp_path, max_steps=3, val_check_interval=2)
    assert events.validated == []
    assert trainer.global_step == 3
