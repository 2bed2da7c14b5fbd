"""Checkpoint folders without a trainer: the codec, atomic writing, damage, and Lightning's dictionary."""

import errno
import json
import math
import os
import struct
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch

from lit_rl.checkpoint import (
    FolderCheckpointIO,
    codec,
    decode_tree,
    encode_tree,
    newest_complete,
    step_folder,
    verify,
)
from lit_rl.errors import ConfigError, DataError


def assert_same(a, b):
    """Equal in value and type, bit by bit for floats and tensors."""
    assert type(a) is type(b), (a, b)
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    elif isinstance(a, float):
        assert struct.pack("d", a) == struct.pack("d", b) or (math.isnan(a) and math.isnan(b))
    else:
        assert a == b


def round_trip(tree, folder: Path):
    codec.write_tree(folder, "tree", *encode_tree(tree))
    return codec.read_tree(folder, "tree")


AWKWARD = {
    "plain": [1, -(2**70), True, None, 0.1, -0.0, 1e-320, "a\nb\"c'é", "lone \ud83d surrogate", ""],
    "floats": [math.nan, math.inf, -math.inf],
    "pair": (1, (2.0, ["x"], ())),
    0: {1: "int keys", "1": "a string key beside them"},
    "$tensor": "looks like a mark",
    "mark": {"$tuple": [1]},
    "empty": {},
    "tensors": {
        "bf16": torch.tensor([1.0, math.nan, -0.0], dtype=torch.bfloat16),
        "f64": torch.tensor(math.pi, dtype=torch.float64),
        "int": torch.arange(6).view(2, 3),
        "bool": torch.tensor([True, False]),
        "none": torch.zeros(0, 4),
        "u8": torch.get_rng_state()[:16],
    },
}


def test_awkward_trees_come_back_exactly(tmp_path):
    assert_same(round_trip(AWKWARD, tmp_path), AWKWARD)


def test_int_and_string_keys_that_print_alike_stay_apart(tmp_path):
    tree = {1: torch.ones(2), "1": torch.zeros(2), "a/b": torch.ones(1), "a": {"b": torch.zeros(1)}}
    assert_same(round_trip(tree, tmp_path), tree)


def test_views_and_transposes_come_back_as_what_they_showed(tmp_path):
    base = torch.arange(12.0).view(3, 4)
    tree = {"whole": base, "row": base[1], "turned": base.t(), "again": base}
    assert_same(round_trip(tree, tmp_path), tree)


def test_tied_tensors_are_kept_once_and_come_back_tied():
    shared = torch.randn(4, 3)
    structure, tensors = encode_tree({"embed": shared, "head": torch.nn.Parameter(shared)})
    assert list(tensors) == ["embed"]
    back = decode_tree(structure, tensors)
    assert back["head"] is back["embed"]


def test_the_optimizer_state_of_torch_comes_back_exactly(tmp_path):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    assert_same(round_trip([optimizer.state_dict()], tmp_path), [optimizer.state_dict()])


@pytest.mark.field("ckpt/4")
@pytest.mark.parametrize(
    "value", [Path("x"), np.float64(1.0), np.arange(2), {1, 2}, torch.float32, OrderedDict, b"x", object()]
)
def test_anything_else_is_refused_with_its_place(value):
    with pytest.raises(TypeError, match=r"checkpoint\['a'\]\[2\]\['b'\]"):
        encode_tree({"a": [0, 1, {"b": value}]})


@pytest.mark.parametrize("key", [True, None, 1.0, (1,)])
def test_other_keys_are_refused(key):
    with pytest.raises(TypeError, match="Keys in a checkpoint"):
        encode_tree({"a": {key: 1}})


def test_sparse_tensors_are_refused():
    with pytest.raises(TypeError, match=r"checkpoint\['w'\]"):
        encode_tree({"w": torch.eye(2).to_sparse()})


# ------------------------------------------------------------------------------------------------- folders


def lightning_checkpoint(step: int = 3) -> dict:
    """What `Trainer` dumps, in small."""
    return {
        "epoch": 0,
        "global_step": step,
        "pytorch-lightning_version": "2.6.0",
        "state_dict": OrderedDict(weight=torch.full((2, 2), float(step))),
        "optimizer_states": [{"state": {0: {"exp_avg": torch.ones(2, 2)}}, "param_groups": [{"lr": 0.1}]}],
        "lr_schedulers": [{"last_epoch": step}],
        "loops": {"fit_loop": {"state_dict": {}}},
        "callbacks": {"RunSummary": {"tokens": 7}},
        "lit_rl": {"optimizer_steps": step, "roles": {"teacher": {"weight": torch.ones(2)}}},
    }


def save(folder: Path, step: int = 3, **options) -> Path:
    path = step_folder(folder, step)
    FolderCheckpointIO().save_checkpoint(lightning_checkpoint(step), path, storage_options=options)
    return path


def test_what_the_trainer_dumps_comes_back(tmp_path):
    path = save(tmp_path, manifest={"algorithm": "GRPO"})
    expected = {**lightning_checkpoint(), "state_dict": dict(lightning_checkpoint()["state_dict"])}
    loaded = FolderCheckpointIO().load_checkpoint(path)
    assert set(loaded) == set(expected)
    for key, value in expected.items():
        assert_same(loaded[key], value)
    manifest = verify(path)
    assert (manifest["step"], manifest["algorithm"]) == (3, "GRPO")
    assert manifest["contents"] == ["model", "optimizer", "extra"]


def test_only_json_and_safetensors_are_written(tmp_path):
    path = save(tmp_path)
    assert {file.suffix for file in path.rglob("*") if file.is_file()} == {".json", ".safetensors"}


def test_a_part_left_out_reads_as_empty_and_keeps_what_the_module_added(tmp_path):
    path = tmp_path / "step_00000003"
    FolderCheckpointIO(save_contents=("model",)).save_checkpoint(lightning_checkpoint(), path)
    loaded = FolderCheckpointIO().load_checkpoint(path)
    assert loaded["optimizer_states"] == [] and loaded["lr_schedulers"] == []
    assert "loops" not in loaded and "callbacks" not in loaded
    assert loaded["lit_rl"]["optimizer_steps"] == 3
    assert not list(path.glob("optimizer.*"))


def test_parts_can_be_left_unread(tmp_path):
    loaded = FolderCheckpointIO(load_contents=("optimizer",)).load_checkpoint(save(tmp_path))
    assert loaded["state_dict"] == {} and len(loaded["optimizer_states"]) == 1 and "loops" not in loaded


def test_asking_for_a_part_that_is_not_there_is_an_error(tmp_path):
    path = tmp_path / "step_00000003"
    FolderCheckpointIO(save_contents=("model", "extra")).save_checkpoint(lightning_checkpoint(), path)
    with pytest.raises(ConfigError, match=r"checkpoint\.load_contents asks for \['optimizer'\]"):
        FolderCheckpointIO(load_contents=("model", "optimizer")).load_checkpoint(path)


@pytest.mark.field("ckpt/5")
@pytest.mark.parametrize("damage", ["no manifest", "half a manifest", "cut", "flipped", "missing"])
def test_a_damaged_folder_is_rejected_and_the_one_before_it_chosen(tmp_path, damage):
    old, new = save(tmp_path, 2), save(tmp_path, 4)
    target = new / "model.safetensors"
    manifest = new / "manifest.json"
    if damage == "no manifest":
        manifest.unlink()
    elif damage == "half a manifest":
        manifest.write_text(manifest.read_text()[:40])
    elif damage == "cut":
        target.write_bytes(target.read_bytes()[:-1])
    elif damage == "flipped":
        content = bytearray(target.read_bytes())
        content[-1] ^= 1
        target.write_bytes(bytes(content))
    else:
        target.unlink()
    with pytest.raises(DataError, match="manifest" if "manifest" in damage else "model.safetensors"):
        FolderCheckpointIO().load_checkpoint(new)
    said: list[str] = []
    assert newest_complete(tmp_path, said.append) == old
    assert len(said) <= 1


@pytest.mark.field("ckpt/5")
def test_a_full_disk_leaves_the_previous_checkpoint_and_nothing_half_written(tmp_path, monkeypatch):
    old = save(tmp_path, 2)

    def full_disk(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(codec, "save_file", full_disk)
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path, 4)
    assert list(tmp_path.iterdir()) == [old]
    assert newest_complete(tmp_path) == old


@pytest.mark.field("ckpt/5")
def test_a_process_killed_while_saving_leaves_the_previous_checkpoint(tmp_path):
    old = save(tmp_path, 2)
    child = os.fork()
    if child == 0:
        save(tmp_path, 4, extra_files=lambda _: os.kill(os.getpid(), 9))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 9
    assert (tmp_path / ".tmp-step_00000004").is_dir()
    assert newest_complete(tmp_path) == old
    new = save(tmp_path, 5)
    assert sorted(tmp_path.iterdir()) == [old, new]


def test_a_step_can_be_saved_again(tmp_path):
    save(tmp_path, 2)
    path = save(tmp_path, 2, manifest={"seed": 9})
    assert verify(path)["seed"] == 9
    assert list(tmp_path.iterdir()) == [path]


def test_the_newest_is_the_one_written_last_not_the_one_with_most_steps(tmp_path):
    save(tmp_path, 8)
    rewound = save(tmp_path, 6)
    assert newest_complete(tmp_path) == rewound


def test_there_is_no_newest_in_an_empty_or_absent_folder(tmp_path):
    assert newest_complete(tmp_path) is None
    assert newest_complete(tmp_path / "absent") is None


def test_extra_files_are_inside_the_atomic_folder_and_under_its_checksums(tmp_path):
    def write_hf(folder: Path) -> None:
        (folder / "hf").mkdir()
        (folder / "hf" / "config.json").write_text("{}")

    path = save(tmp_path, extra_files=write_hf)
    assert "hf/config.json" in verify(path)["files"]
    (path / "hf" / "config.json").write_text("[]")
    with pytest.raises(DataError, match=r"hf/config\.json"):
        verify(path)


def test_another_format_is_refused(tmp_path):
    path = save(tmp_path)
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**manifest, "format": 99}))
    with pytest.raises(DataError, match="format 99"):
        verify(path)


class Marker:
    """Would create a file if it were ever unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


@pytest.mark.field("sec/1")
def test_a_pickled_checkpoint_is_refused_without_running_it(tmp_path):
    marker, path = tmp_path / "marker", tmp_path / "evil.ckpt"
    torch.save({"state_dict": Marker(marker)}, path)
    with pytest.raises(DataError, match="never read"):
        FolderCheckpointIO().load_checkpoint(path)
    assert not marker.exists()


def test_the_check_sees_manifest_and_checkpoint_and_may_refuse(tmp_path):
    def refuse(manifest, checkpoint):
        raise DataError(f"{manifest['algorithm']} {checkpoint['global_step']}")

    path = save(tmp_path, manifest={"algorithm": "SDPO"})
    with pytest.raises(DataError, match="SDPO 3"):
        FolderCheckpointIO(check=refuse).load_checkpoint(path)
