"""Local copies of remote files: any URL that fsspec opens, downloaded once into a cache."""

import hashlib
import logging
import os
from pathlib import Path
from typing import Any

import fsspec
from filelock import FileLock
from fsspec.core import url_to_fs

from lit_rl.errors import ConfigError, DataError

log = logging.getLogger(__name__)

VERSION = ("size", "ETag", "etag", "mtime", "LastModified", "last_modified", "updated")
"""What file systems report that changes when a file does."""


def is_url(path: str) -> bool:
    """Whether this is no path of this machine."""
    return "://" in path


def local_copies(url: str, *, key: str, cache_dir: str) -> dict[str, str]:
    """The files at a URL or remote glob, each as a copy on this machine.

    A copy is kept under the file's address, size and version, so one that has changed is downloaded again.
    Processes of one machine download a file once. Credentials and endpoints are those of the file system's
    own environment variables and configuration files, or `FSSPEC_<PROTOCOL>_<ARGUMENT>`.

    Args:
        url: such as s3://bucket/train-*.parquet, https://host/train.parquet, hf://datasets/name/file.
        key: dotted key that error messages name.
        cache_dir: where copies lie.

    Returns:
        address by path of the copy, in order of the addresses.

    Raises:
        ConfigError: no installed package speaks the URL's protocol.
        DataError: there is no such file, or it cannot be read.
    """
    protocol = url.partition("://")[0]
    try:
        fsspec.get_filesystem_class(protocol)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"{key} cannot open {protocol}:// (found {url!r}): {error}.") from error
    try:
        files, path = url_to_fs(url)
        paths = sorted(files.glob(path)) if any(sign in path for sign in "*[") else [path]
        copies = {_copy(files, remote, Path(cache_dir).expanduser(), key): remote for remote in paths}
    except Exception as error:  # every file system has errors of its own
        reason = "" if isinstance(error, FileNotFoundError) else f": {_words(error)}"
        raise DataError(f"{key} must be files that can be read (found {url!r}{reason}).") from error
    if not copies:
        raise DataError(f"{key} matches no file (found {url!r}); check the pattern.")
    return {copy: str(files.unstrip_protocol(remote)) for copy, remote in copies.items()}


def _words(error: Exception) -> str:
    """The first line; some clients list every place they looked at."""
    line = (str(error).splitlines() or [""])[0]
    needs_java = "; hdfs:// needs Java and Hadoop's libhdfs" if "libjvm" in line or "libhdfs" in line else ""
    return f"{type(error).__name__}: {line}{needs_java}"


def _copy(files: Any, remote: str, cache: Path, key: str) -> str:
    """Path of the copy of one remote file."""
    address, info = files.unstrip_protocol(remote), files.info(remote)
    version = [str(info[name]) for name in VERSION if info.get(name) is not None]
    digest = hashlib.sha256(repr((address, version)).encode()).hexdigest()[:16]
    name = remote.partition("?")[0].rstrip("/").rpartition("/")[2]
    copy = cache / "files" / digest / name
    copy.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(copy.with_name(f"{name}.lock")):
        if not copy.exists():
            log.info("%s: downloading %s to %s", key, address, copy)
            part = copy.with_name(f"{name}.part")
            files.get_file(remote, str(part))
            os.replace(part, copy)
    return str(copy)
