"""Remote files over real protocols: a web server and an S3 server (moto's) on this machine."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from byte_tokenizer import byte_tokenizer

from lit_rl.data.parquet import open_rows
from lit_rl.data.prompts import PromptDataModule
from lit_rl.errors import ConfigError, DataError

KEY = "data.train_files"


@pytest.fixture
def web(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """Address and folder of a web server, a process of its own."""
    folder = tmp_path / "web"
    folder.mkdir()
    serve = (
        "import http.server as s; h = s.ThreadingHTTPServer(('127.0.0.1', 0), s.SimpleHTTPRequestHandler); "
    )
    command = [sys.executable, "-c", serve + "print(h.server_port, flush=True); h.serve_forever()"]
    server = subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert server.stdout is not None
    yield f"http://127.0.0.1:{int(server.stdout.readline())}", folder
    server.kill()
    server.wait()


def copies(cache: Path) -> list[Path]:
    return sorted(cache.rglob("*.parquet"))


def test_a_file_on_the_web_is_downloaded_once_and_again_when_it_changes(
    web: tuple[str, Path], tmp_path: Path, prompt_rows: Callable, write_parquet: Callable
) -> None:
    cache = tmp_path / "cache"
    write_parquet(prompt_rows(6), "web/train.parquet", 2)
    url = f"{web[0]}/train.parquet?download=true"
    rows = open_rows(url, key=KEY, cache_dir=str(cache))
    assert [row["reward_model"]["ground_truth"] for row in map(rows.__getitem__, range(6))] == list("012345")
    assert rows.where(3) == f"{url}, row 3"
    (copy,) = copies(cache)
    first = copy.stat()
    open_rows(url, key=KEY, cache_dir=str(cache))
    assert copies(cache) == [copy] and copy.stat() == first
    write_parquet(prompt_rows(9), "web/train.parquet", 2)
    assert len(open_rows(url, key=KEY, cache_dir=str(cache))) == 9
    assert len(copies(cache)) == 2 and not list(cache.rglob("*.part"))


def test_a_datamodule_trains_on_an_address_in_loader_workers(
    web: tuple[str, Path], tmp_path: Path, prompt_rows: Callable, write_parquet: Callable
) -> None:
    from lit_rl.data.loader import LoaderOptions

    write_parquet(prompt_rows(6), "web/train.parquet", 2)
    datamodule = PromptDataModule(
        train_files=[f"{web[0]}/train.parquet"],
        val_files=None,
        train_batch_size=3,
        total_epochs=1,
        tokenizer=byte_tokenizer(),
        cache_dir=str(tmp_path / "cache"),
        loader=LoaderOptions(num_workers=2),
    )
    datamodule.setup("fit")
    served = [row for batch in datamodule.train_dataloader() for row in batch.prompt_row.tolist()]
    assert sorted(served) == list(range(6))


def test_what_cannot_be_fetched_is_named(web: tuple[str, Path], tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=rf"{KEY} must be files that can be read \(found '{web[0]}/no\.parquet'"
    ):
        open_rows(f"{web[0]}/no.parquet", key=KEY, cache_dir=str(tmp_path))
    (web[1] / "text.parquet").write_text("not parquet")
    with pytest.raises(DataError, match=rf"^{web[0]}/text\.parquet is not a readable parquet file"):
        open_rows(f"{web[0]}/text.parquet", key=KEY, cache_dir=str(tmp_path))
    with pytest.raises(DataError, match=r"must be files that can be read \(found 'http://127\.0\.0\.1:9/"):
        open_rows("http://127.0.0.1:9/a.parquet", key=KEY, cache_dir=str(tmp_path))


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("gopher://host/a.parquet", r"data\.train_files cannot open gopher:// .*Protocol not known"),
        ("dropbox://host/a.parquet", r"data\.train_files cannot open dropbox:// .*dropboxdrivefs"),
    ],
)
def test_a_missing_client_names_its_package(url: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        open_rows(url, key=KEY)


@pytest.fixture
def local_s3_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """A server with a bucket, and the environment that leads to it; puts a local file under a name."""
    boto3, fsspec, s3fs, moto = map(pytest.importorskip, ("boto3", "fsspec", "s3fs", "moto.server"))
    server = moto.ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    monkeypatch.setitem(fsspec.config.conf, "s3", {"key": "x", "secret": "x", "endpoint_url": endpoint})
    client = boto3.client(
        "s3", endpoint_url=endpoint, region_name="us-east-1", aws_access_key_id="x", aws_secret_access_key="x"
    )
    client.create_bucket(Bucket="bucket")
    s3fs.S3FileSystem.clear_instance_cache()
    yield lambda file, name: client.upload_file(file, "bucket", name)
    s3fs.S3FileSystem.clear_instance_cache()
    server.stop()


def test_a_glob_on_s3_is_read_through_the_cache(
    local_s3_server: Callable, tmp_path: Path, prompt_rows: Callable, write_parquet: Callable
) -> None:
    rows = prompt_rows(10)
    for i in range(2):
        local_s3_server(write_parquet(rows[5 * i : 5 * i + 5]), f"sets/part-{i}.parquet")
    source = "s3://bucket/sets/part-*.parquet"
    opened = open_rows(source, key=KEY, cache_dir=str(tmp_path / "cache"))
    assert [opened[i] for i in range(10)] == rows
    assert opened.where(7) == "s3://bucket/sets/part-1.parquet, row 2"
    again = open_rows(source, key=KEY, cache_dir=str(tmp_path / "cache"))
    assert again.fingerprint() == opened.fingerprint()
    assert len(copies(tmp_path / "cache")) == 2
    with pytest.raises(DataError, match=r"matches no file \(found 's3://bucket/none-\*\.parquet'\)"):
        open_rows("s3://bucket/none-*.parquet", key=KEY, cache_dir=str(tmp_path))
