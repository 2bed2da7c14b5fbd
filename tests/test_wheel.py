"""The wheel: everything a run needs, and a run from it outside the clone."""

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_package_and_every_kind_of_data_file_is_listed() -> None:
    folders = {
        "lit_rl": ROOT / "lit_rl",
        "lit_rl.callbacks": ROOT / "callbacks",
        "lit_rl.conf": ROOT / "conf",
    }
    found = {
        ".".join([name, *init.parent.relative_to(folder).parts])
        for name, folder in folders.items()
        for init in folder.rglob("__init__.py")
    }
    assert found == set(PROJECT["tool"]["setuptools"]["packages"])
    kinds = {f.suffix for f in (ROOT / "lit_rl").rglob("*") if f.is_file() and "__pycache__" not in f.parts}
    patterns = [p for listed in PROJECT["tool"]["setuptools"]["package-data"].values() for p in listed]
    assert kinds - {".py", ".md"} <= {Path(pattern).suffix or ".typed" for pattern in patterns}


def test_version_and_licence_are_told_alike() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == PROJECT["project"]["version"]
    assert citation["license"] == PROJECT["project"]["license"]
    assert f"## {citation['version']}" in (ROOT / "CHANGELOG.md").read_text()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that nothing is left in the clone."""
    clone, out = tmp_path_factory.mktemp("build") / "clone", tmp_path_factory.mktemp("wheel")
    ignore = shutil.ignore_patterns(".git", "outputs", "*.egg-info", "__pycache__", ".venv", "tests")
    shutil.copytree(ROOT, clone, ignore=ignore)
    pip = [sys.executable, "-m", "pip", "wheel", str(clone), "--no-deps", "--no-build-isolation"]
    done = subprocess.run([*pip, "--wheel-dir", str(out)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(out.glob("*.whl"))


@pytest.mark.slow
def test_the_wheel_holds_what_a_run_needs_and_nothing_generic(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name.split("/")[0] for name in names} == {"lit_rl", "lit_rl-0.1.0.dist-info"}
    needed = {"py.typed", "cli.py", "conf/train.yaml", "conf/algo/grpo.yaml", "callbacks/rollout.py"}
    needed |= {"assets/tiny/model.safetensors", "assets/train.parquet", "migrate/parameters.csv"}
    assert {f"lit_rl/{name}" for name in needed} <= names
    with zipfile.ZipFile(wheel) as opened:
        info = "lit_rl-0.1.0.dist-info"
        assert "lit-rl = lit_rl.cli:main" in opened.read(f"{info}/entry_points.txt").decode()
        metadata = Parser().parsestr(opened.read(f"{info}/METADATA").decode())
    assert metadata["License-Expression"] == "Apache-2.0"
    assert {"wandb", "mlflow", "swanlab", "gguf", "vllm"} <= set(metadata.get_all("Provides-Extra") or [])


@pytest.mark.slow
def test_the_main_job_runs_from_the_wheel_alone(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    command = [sys.executable, "-m", "lit_rl.cli", "fit", "algo=grpo", "debug=fast", "run_dir=run"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "run" / "summary.json").is_file()
    where = [sys.executable, "-c", "import lit_rl.callbacks.rollout as m; print(m.__file__)"]
    printed = subprocess.run(where, cwd=tmp_path, env=environment, capture_output=True, text=True).stdout
    assert printed.strip().startswith(str(tmp_path / "site"))
