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
    commands = [shlex.split(line, comments=True) for line in text.splitlines() if "train.py" in line]
    plain = [c[c.index("train.py") + 1 :] for c in commands if "-m" not in c and "--help" not in c]
    runnable = [
        c for c in plain if not any("parquet" in a or "my_package" in a or a.endswith("-m") for a in c)
    ]
    assert len(runnable) >= 4
    for arguments in runnable:
        arguments = arguments[: arguments.index("&&")] if "&&" in arguments else arguments
        done = subprocess.run(
            [sys.executable, "train.py", *arguments, "plan=true"], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
