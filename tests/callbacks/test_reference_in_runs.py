"""The reference in whole runs, on one and on two processes: left alone, or the same on all when it moves."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
COMMON = (
    *("algo=grpo", "algo.kl.beta=0.04", "optim.weight_decay=0.1", "trainer.max_steps=5", "logger=csv"),
    *("trainer.val_check_interval=0", "checkpoint.save_freq=-1"),
    *("data.train_batch_size=4", "algo.num_generations=4", "algo.batch.micro_batch_size=4"),
    f"callbacks.from_file.path={HERE / 'reference_watch.py'}",
    "callbacks.from_file.name=ReferenceWatch",
)


def watched(folder: Path, ranks: int, *overrides: str) -> list[dict]:
    """What the plug-in wrote, by rank."""
    words = [*COMMON, *overrides, f"+callbacks.from_file.arguments.folder={folder}", f"run_dir={folder}/run"]
    words += ["trainer=ddp", f"trainer.devices={ranks}"] if ranks > 1 else ["trainer=cpu"]
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "train.py", *words],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.slow
@pytest.mark.field("dist/3")
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_reference_without_sync_is_neither_trained_nor_moved(ranks: int, tmp_path: Path) -> None:
    found = watched(tmp_path / "watch", ranks, "callbacks=[default,from_file]")
    for rank in found:
        assert rank["start"] == rank["end"] != rank["policy"]
        assert not (rank["has_gradients"] or rank["trains"] or rank["in_optimizer"])
    assert len({rank["end"] for rank in found}) == len({rank["policy"] for rank in found}) == 1


@pytest.mark.slow
@pytest.mark.field("dist/3")
def test_a_synced_reference_is_the_same_on_all_ranks(tmp_path: Path) -> None:
    callbacks = "callbacks=[default,reference_sync,from_file]"
    found = watched(tmp_path / "watch", 2, callbacks, "callbacks.reference_sync.ref_model_sync_steps=2")
    assert found[0]["end"] == found[1]["end"] != found[0]["start"]
    assert not any(rank["has_gradients"] or rank["trains"] or rank["in_optimizer"] for rank in found)
