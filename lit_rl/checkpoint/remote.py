"""RemoteFolder: copies of checkpoints under any fsspec URL."""

import json
import math
import re
from pathlib import Path
from typing import Any

import fsspec
from fsspec.core import url_to_fs

from lit_rl.checkpoint.folder import FORMAT, MANIFEST, atomic_folder, read_manifest, verify
from lit_rl.errors import ConfigError, DataError, StorageError


class RemoteFolder:
    """A folder of checkpoints elsewhere. One counts as there when its manifest is, which is written last.

    Credentials and endpoints are those of the file system's own environment variables and configuration
    files, or `FSSPEC_<PROTOCOL>_<ARGUMENT>`.

    Args:
        url: such as s3://bucket/runs/mine, hdfs://host/path, file:///mnt/share.
        key: dotted key that messages name.

    Raises:
        ConfigError: nothing that is installed speaks the URL's protocol.
    """

    def __init__(self, url: str, key: str = "checkpoint.default_hdfs_dir") -> None:
        self.url, self.key = url.rstrip("/"), key
        protocol = url.partition("://")[0] if "://" in url else "file"
        try:
            fsspec.get_filesystem_class(protocol)
        except (ImportError, ValueError) as error:
            raise ConfigError(
                f"{key} must be a URL that fsspec can open (found {url!r}): {error}."
            ) from error

    def upload(self, folder: Path) -> None:
        """Copy a complete checkpoint there; one of the same name is replaced.

        Raises:
            StorageError: it cannot be written; what lies here is as it was.
        """
        manifest = read_manifest(folder)
        assert manifest is not None
        try:
            files, base = self._opened()
            target = f"{base}/{folder.name}"
            if files.exists(f"{target}/{MANIFEST}"):
                files.rm(f"{target}/{MANIFEST}")
            for name in (*manifest["files"], MANIFEST):
                place = f"{target}/{name}"
                files.makedirs(place.rpartition("/")[0], exist_ok=True)
                files.put_file(str(folder / name), place)
        except Exception as error:  # every file system has errors of its own
            raise StorageError(
                f"{self.key} cannot be written to (found {self.url!r}): {_words(error)}. The checkpoint "
                f"{folder} is complete; mend the connection and start the same command again."
            ) from error

    def names(self) -> list[str]:
        """Checkpoints that are complete there by their manifests, in the order in which they were written.

        Raises:
            StorageError: the folder cannot be read. One that does not exist is empty.
        """
        try:
            files, base = self._opened()
            if not files.exists(base):
                return []
            folders = [entry["name"].rstrip("/").rpartition("/")[2] for entry in files.ls(base, detail=True)]
            steps = [name for name in folders if re.fullmatch(r"step_\d+", name)]
            known = {name: self.manifest(name) for name in steps}
        except StorageError:
            raise
        except Exception as error:
            raise self._unreadable(error) from error
        written = {name: m.get("written", -math.inf) for name, m in known.items() if m is not None}
        return sorted(written, key=lambda name: (written[name], name))

    def manifest(self, name: str) -> dict[str, Any] | None:
        """The manifest of one checkpoint there; None when it has none that can be read."""
        files, base = self._opened()
        try:
            manifest = json.loads(files.cat_file(f"{base}/{name}/{MANIFEST}"))
        except (FileNotFoundError, ValueError):
            return None
        except Exception as error:
            raise self._unreadable(error) from error
        return manifest if manifest.get("format") == FORMAT else None

    def fetch(self, name: str, parent: Path) -> Path:
        """Bring one checkpoint here, whole and verified.

        Args:
            name: of its folder.
            parent: where the folder goes.

        Raises:
            DataError: it is damaged.
            StorageError: it cannot be read, or not be written here.
        """
        manifest = self.manifest(name)
        if manifest is None:
            raise DataError(f"{self.url}/{name} is no complete checkpoint: it has no readable {MANIFEST}.")
        try:
            files, base = self._opened()
            with atomic_folder(parent / name) as folder:
                for file in (*manifest["files"], MANIFEST):
                    (folder / file).parent.mkdir(parents=True, exist_ok=True)
                    files.get_file(f"{base}/{name}/{file}", str(folder / file))
                verify(folder)
        except (DataError, FileNotFoundError) as error:
            raise DataError(f"{self.url}/{name} is damaged: {error}") from error
        except Exception as error:
            raise self._unreadable(error) from error
        return parent / name

    def remove(self, name: str) -> None:
        """Delete one checkpoint there, its manifest first.

        Raises:
            StorageError: it cannot be deleted.
        """
        try:
            files, base = self._opened()
            files.rm(f"{base}/{name}/{MANIFEST}")
            files.rm(f"{base}/{name}", recursive=True)
        except Exception as error:
            raise StorageError(
                f"{self.key} cannot be written to (found {self.url!r}; removing {name}): {_words(error)}."
            ) from error

    def _opened(self) -> tuple[Any, str]:
        files, base = url_to_fs(self.url)
        files.invalidate_cache()  # others write there too
        return files, base.rstrip("/")

    def _unreadable(self, error: Exception) -> StorageError:
        return StorageError(f"{self.key} cannot be read (found {self.url!r}): {_words(error)}.")


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
