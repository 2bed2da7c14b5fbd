"""Remote folders against a real S3 protocol: moto's server on this machine, through s3fs."""

import os

import fsspec
import pytest
import s3fs
import torch

from lit_rl.callbacks.checkpoint_contents import CheckpointContents
from lit_rl.checkpoint.remote import RemoteFolder
from lit_rl.errors import StorageError
from lit_rl.export import fetched

URL = "s3://bucket/runs/mine"


@pytest.fixture
def local_s3_server(monkeypatch):
    """A server, its bucket, and the environment that leads to it."""
    import boto3  # here, since vLLM trips over what moto imports when it looks through all modules
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    access = {"key": "x", "secret": "x", "endpoint_url": endpoint}
    monkeypatch.setitem(fsspec.config.conf, "s3", {**access, "config_kwargs": {"connect_timeout": 1}})
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    boto3.client(
        "s3",
        endpoint_url=endpoint,
        region_name="us-east-1",
        aws_access_key_id="x",
        aws_secret_access_key="x",
    ).create_bucket(Bucket="bucket")
    s3fs.S3FileSystem.clear_instance_cache()
    yield server
    s3fs.S3FileSystem.clear_instance_cache()
    server.stop()


@pytest.mark.slow
def test_a_run_is_saved_to_s3_beside_training_and_resumed_from_it(
    train, fake_module, tmp_path, local_s3_server
):
    straight = fake_module()
    train(straight, [CheckpointContents(str(tmp_path / "a"))], steps=5)
    settings = {"default_hdfs_dir": URL, "max_to_keep": 2, "save_freq": 1, "async_save": True}
    train(fake_module(), [CheckpointContents(str(tmp_path / "b"), **settings)], steps=3)
    assert RemoteFolder(URL).names() == ["step_00000002", "step_00000003"]
    callback = CheckpointContents(str(tmp_path / "c"), default_hdfs_dir=URL, del_local_ckpt_after_load=True)
    module = fake_module()
    train(module, [callback], steps=5, ckpt_path=callback.resume_path())
    assert module.seen == [4.0, 5.0] and torch.equal(module.policy.weight, straight.policy.weight)
    assert os.listdir(tmp_path / "c") == ["step_00000005"]
    assert fetched(f"{URL}/step_00000005", str(tmp_path / "d")).is_dir()


@pytest.mark.slow
def test_a_server_that_goes_away_is_a_clear_error(train, fake_module, tmp_path, local_s3_server):
    class ServerEnds(CheckpointContents):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if trainer.global_step == 2:
                self._writer.wait()
                local_s3_server.stop()

    module = fake_module()
    callback = ServerEnds(str(tmp_path / "c"), default_hdfs_dir=URL, save_freq=1)
    with pytest.raises(StorageError, match=r"default_hdfs_dir cannot be written to.*step_00000003"):
        train(module, [callback], steps=50)
    resumed = fake_module()
    train(resumed, [CheckpointContents(str(tmp_path / "d"))], 4, tmp_path / "c" / "step_00000003")
    assert resumed.seen == [4.0]
