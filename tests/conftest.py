"""Shared parts of the tests: the embedded model and tokenizer, rows, and a trainer without extras."""

import os
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_parts import scored_rows, tiny_policy
from transformers import LlamaForCausalLM

from lit_rl.batch import RolloutBatch

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of runs that a test starts beside another test


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(name="tiny_policy")
def _tiny_policy() -> Callable[..., LlamaForCausalLM]:
    """A function that builds a seeded two-layer Llama."""
    return tiny_policy


@pytest.fixture
def make_batch() -> Callable[..., RolloutBatch]:
    """A function that makes scored rows, ragged by default: P prompts, G completions each."""
    return scored_rows


@pytest.fixture
def shared_folder() -> Path:
    """The folder of fixtures that some checkouts have beside them; the test is skipped elsewhere."""
    folder = Path(__file__).resolve().parents[2] / "shared"
    if not folder.is_dir():
        pytest.skip("no shared fixtures beside this checkout")
    return folder


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Passed, failed and skipped tests by marker."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.getreports(outcome):
            if outcome != "passed" or report.when == "call":
                known = [m for m in ("slow", "vllm", "gpu", "field") if m in getattr(report, "keywords", ())]
                for marker in known or ["unmarked"]:
                    counts[marker]["failed" if outcome == "error" else outcome] += 1
    for marker, count in sorted(counts.items()):
        line = ", ".join(f"{count[outcome]} {outcome}" for outcome in ("passed", "failed", "skipped"))
        terminalreporter.write_line(f"{marker}: {line}")
