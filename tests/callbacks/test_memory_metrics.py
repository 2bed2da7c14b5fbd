"""Memory of each step in the log."""

from collections.abc import Callable
from pathlib import Path

import pytest

from lit_rl.callbacks.memory import MemoryMetrics, peak_resident_bytes
from lit_rl.errors import ConfigError


def test_the_largest_memory_so_far_counts_what_is_held() -> None:
    held = bytearray(b"x" * 200_000_000)
    assert peak_resident_bytes() >= len(held)


def test_every_step_is_logged(train: Callable, fake_module: Callable, tmp_path: Path) -> None:
    trainer = train(fake_module(), [MemoryMetrics()], steps=2)
    found = trainer.logged_metrics
    assert 0 < found["memory/rss_gb"] <= found["memory/peak_rss_gb"] * 1.01
    assert not any(name.startswith("memory/") and "alloc" in name for name in found)


def test_a_release_of_the_cache_needs_a_gpu(train: Callable, fake_module: Callable) -> None:
    with pytest.raises(ConfigError, match=r"torch_empty_cache_steps \(found 3\) has no effect"):
        train(fake_module(), [MemoryMetrics(3)], steps=1)
    with pytest.raises(ConfigError, match="must be null or >= 1"):
        MemoryMetrics(0)
