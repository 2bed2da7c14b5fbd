"""CheckpointContents with copies in a remote folder."""

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from lit_rl.callbacks.checkpoint_contents import CheckpointContents
from lit_rl.checkpoint import verify
from lit_rl.errors import ConfigError, StorageError


def steps_in(folder) -> list[int]:
    return sorted(int(path.name[5:]) for path in folder.glob("step_*"))


@pytest.fixture
def remote():
    """A folder in fsspec's memory file system."""
    MemoryFileSystem.store.clear()
    yield "memory://runs/mine"
    MemoryFileSystem.store.clear()


def remote_steps(url: str) -> list[str]:
    files, path = fsspec.core.url_to_fs(url)
    return sorted(name.rpartition("/")[2] for name in files.ls(path, detail=False))


def test_copies_go_to_the_remote_folder_and_old_ones_are_removed_there_too(
    train, fake_module, tmp_path, remote
):
    callback = CheckpointContents(str(tmp_path / "c"), default_hdfs_dir=remote, save_freq=1, max_to_keep=2)
    train(fake_module(), [callback], steps=4)
    assert remote_steps(remote) == ["step_00000003", "step_00000004"]
    files, path = fsspec.core.url_to_fs(remote)
    for file in (tmp_path / "c" / "step_00000004").rglob("*"):
        assert files.cat_file(f"{path}/step_00000004/{file.name}") == file.read_bytes()


def test_a_new_machine_resumes_from_the_remote_folder(train, fake_module, tmp_path, remote, capsys):
    straight = fake_module()
    train(straight, [CheckpointContents(str(tmp_path / "a"))], steps=5)
    train(fake_module(), [CheckpointContents(str(tmp_path / "b"), default_hdfs_dir=remote)], steps=3)
    callback = CheckpointContents(str(tmp_path / "c"), default_hdfs_dir=remote)
    path = callback.resume_path()
    assert path == tmp_path / "c" / "step_00000003" and "Fetching memory://" in capsys.readouterr().out
    module = fake_module()
    train(module, [callback], steps=5, ckpt_path=path)
    assert module.seen == [4.0, 5.0] and torch.equal(module.policy.weight, straight.policy.weight)


def test_the_remote_folder_is_not_looked_at_unless_it_is_set(train, fake_module, tmp_path, remote):
    train(fake_module(), [CheckpointContents(str(tmp_path / "b"), default_hdfs_dir=remote)])
    assert CheckpointContents(str(tmp_path / "c")).resume_path() is None


def test_the_newer_of_local_and_remote_is_taken(train, fake_module, tmp_path, remote):
    train(fake_module(), [CheckpointContents(str(tmp_path / "c"), default_hdfs_dir=remote)], steps=3)
    train(fake_module(), [CheckpointContents(str(tmp_path / "c"))], steps=2)
    callback = CheckpointContents(str(tmp_path / "c"), default_hdfs_dir=remote)
    assert callback.resume_path() == tmp_path / "c" / "step_00000002", "written last, though of fewer steps"


def test_damaged_remote_copies_are_passed_over(train, fake_module, tmp_path, remote, capsys):
    train(fake_module(), [CheckpointContents(str(tmp_path / "b"), default_hdfs_dir=remote, save_freq=2)], 4)
    files, path = fsspec.core.url_to_fs(remote)
    files.pipe_file(f"{path}/step_00000004/model.safetensors", b"short")
    callback = CheckpointContents(str(tmp_path / "c"), default_hdfs_dir=remote)
    assert callback.resume_path() == tmp_path / "c" / "step_00000002"
    said = capsys.readouterr().out
    assert "Passed over: memory://runs/mine/step_00000004 is damaged" in said
    assert steps_in(tmp_path / "c") == [2] and not list((tmp_path / "c").glob(".tmp*"))


@pytest.mark.parametrize("what", ["the checkpoint", "the folder of checkpoints"])
def test_a_url_can_be_resumed_from(train, fake_module, tmp_path, remote, what):
    train(fake_module(), [CheckpointContents(str(tmp_path / "b"), default_hdfs_dir=remote)], steps=3)
    url = f"{remote}/step_00000003" if what == "the checkpoint" else remote
    callback = CheckpointContents(str(tmp_path / "c"), resume_mode="resume_path", resume_from_path=url)
    module = fake_module()
    train(module, [callback], steps=4, ckpt_path=callback.resume_path())
    assert module.seen == [4.0]
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == ["step_00000004"], "the fetched copy is gone"


@pytest.mark.field("ckpt/3")
def test_a_url_without_a_checkpoint_is_an_error(tmp_path, remote):
    callback = CheckpointContents(str(tmp_path), resume_mode="resume_path", resume_from_path=remote)
    with pytest.raises(
        ConfigError, match=r"resume_from_path holds no complete checkpoint.*memory://runs/mine"
    ):
        callback.resume_path()


def test_the_local_copy_goes_after_it_is_read_if_the_remote_folder_has_it(
    train, fake_module, tmp_path, remote
):
    settings = {"default_hdfs_dir": remote, "del_local_ckpt_after_load": True}
    train(fake_module(), [CheckpointContents(str(tmp_path / "c"), **settings)], steps=2)
    callback = CheckpointContents(str(tmp_path / "c"), **settings)
    train(fake_module(), [callback], steps=3, ckpt_path=callback.resume_path())
    assert steps_in(tmp_path / "c") == [3]
    fsspec.filesystem("memory").rm("/runs/mine/step_00000003", recursive=True)
    callback = CheckpointContents(str(tmp_path / "c"), **settings)
    path = callback.resume_path()
    assert path is not None
    train(fake_module(), [callback], steps=4, ckpt_path=path)
    assert steps_in(tmp_path / "c") == [3, 4], "the only copy stays"


class FakeVanishedFileSystem(MemoryFileSystem):
    """Refuses to write, as a share that is gone does."""

    protocol = "vanished"

    def put_file(self, *args, **kwargs):
        raise ConnectionError("connection refused")


@pytest.mark.parametrize("is_async", [False, True])
def test_a_vanished_remote_is_a_clear_error_and_the_local_checkpoint_is_whole(
    train, fake_module, tmp_path, is_async
):
    fsspec.register_implementation("vanished", FakeVanishedFileSystem, clobber=True)
    callback = CheckpointContents(
        str(tmp_path / "c"), default_hdfs_dir="vanished://x", save_freq=1, async_save=is_async
    )
    module = fake_module()
    with pytest.raises(
        StorageError, match=r"checkpoint\.default_hdfs_dir cannot be written to.*'vanished://x'"
    ):
        train(module, [callback], steps=50)
    assert len(module.seen) <= 3
    first = tmp_path / "c" / "step_00000001"
    verify(first)
    resumed = fake_module()
    train(resumed, [CheckpointContents(str(tmp_path / "d"))], 4, first)
    assert resumed.seen == [2.0, 3.0, 4.0]


def test_an_unknown_protocol_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match=r"checkpoint\.default_hdfs_dir must be a URL.*'nope://x'"):
        CheckpointContents(str(tmp_path), default_hdfs_dir="nope://x")
