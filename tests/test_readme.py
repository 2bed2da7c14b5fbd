"""README does what it says: its step is the code's, its algorithm runs, its commands parse."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def dedented(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines()]


def test_the_page_is_the_code() -> None:
    code = dedented((ROOT / "lit_rl/algorithms/base.py").read_text())
    page = dedented(next(block for block in blocks("python") if "def training_step" in block))
    start = code.index(page[0])
    assert code[start : start + len(page)] == page


def test_the_plug_in_is_the_tested_one() -> None:
    code = dedented((ROOT / "tests/callbacks/plugin_example.py").read_text())
    plug_in = dedented(next(block for block in blocks("python") if "on_teacher_context_built" in block))
    assert code[code.index(plug_in[0]) :] == plug_in


def test_the_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


@pytest.mark.slow
def test_the_algorithm_of_the_page_runs(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    ignore = shutil.ignore_patterns(".git", "outputs", "*.egg-info", "__pycache__", ".venv")
    shutil.copytree(ROOT, clone, ignore=ignore)
    code = next(block for block in blocks("python") if "class BestOf" in block)
    (clone / "lit_rl/algorithms/best_of.py").write_text(code)
    (clone / "conf/algo/best_of.yaml").write_text(blocks("yaml")[0])
    command = [sys.executable, "train.py", "algo=best_of", "debug=fast", f"run_dir={tmp_path / 'run'}"]
    done = subprocess.run(command, cwd=clone, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "run" / "summary.json").is_file()


@pytest.mark.slow
@pytest.mark.field("cfg/6")
def test_the_commands_of_the_page_compose() -> None:
    text = "\n".join(blocks("bash")).replace("\\\n", " ")
    lines = [line for line in text.splitlines() if "train.py" in line]
    commands = [shlex.split(line.split("train.py", 1)[1].split("&&")[0], comments=True) for line in lines]
    readers = (
        "parquet",
        "my_package",
        "Qwen/",
        "FOLDER_OR_HUB_ID",
        "rollout=vllm",
    )  # files and packages of the reader
    runnable = [
        command
        for command in commands
        if not {"-m", "--help"} & set(command)
        and not any(word in part for word in readers for part in command)
    ]
    assert len(runnable) >= 4
    for arguments in runnable:
        done = subprocess.run(
            [sys.executable, "train.py", *arguments, "plan=true"], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
