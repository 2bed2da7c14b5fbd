"""Shared parts of the tests: the embedded model and tokenizer, rows, and a trainer without extras."""

import os
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lit_rl.batch import RolloutBatch, length_mask

VOCABULARY = 103  # as the embedded tokenizer has

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of runs that a test starts beside another test


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def tiny_policy() -> Callable[..., LlamaForCausalLM]:
    """A function that builds a seeded two-layer Llama."""

    def build(seed: int = 0, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=256,
            initializer_range=0.2,
            tie_word_embeddings=True,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=None,
        )
        return LlamaForCausalLM(config).to(dtype)

    return build


@pytest.fixture
def make_batch() -> Callable[..., RolloutBatch]:
    """A function that makes scored rows, ragged by default: P prompts, G completions each."""

    def build(
        P: int = 3, G: int = 4, S: int = 7, T: int = 6, seed: int = 0, ragged: bool = True
    ) -> RolloutBatch:
        generator = torch.Generator().manual_seed(seed)

        def draw(low: int, high: int, shape: tuple[int, ...]) -> torch.Tensor:
            return torch.randint(low, high, shape, generator=generator)

        prompt_len = draw(2, S + 1, (P,)) if ragged else torch.full((P,), S)
        prompts = RolloutBatch(
            prompt_ids=draw(6, VOCABULARY, (P, S)), prompt_len=prompt_len, prompt_row=torch.arange(P)
        )
        batch = prompts.repeat(G)
        B = P * G
        batch.completion_ids = draw(6, VOCABULARY, (B, T))
        batch.completion_len = draw(1, T + 1, (B,)) if ragged else torch.full((B,), T)
        batch.completion_mask = length_mask(batch.completion_len, T)
        batch.finish_reason = ["stop"] * B
        batch.rewards = draw(0, 2, (B,)).float()
        batch.rewards_per_func = batch.rewards[:, None]
        return batch

    return build


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
