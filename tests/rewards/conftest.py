from collections.abc import Callable
from typing import Any

import pytest

from lit_rl.rewards.reward import Sample


def sample_of(
    completion: str, truth: Any = "7", source: str = "lit_rl/arithmetic_add", **columns: Any
) -> Sample:
    cells = {"data_source": source, "reward_model": {"style": "rule", "ground_truth": truth}, **columns}
    prompt = [{"role": "user", "content": "3+4=?"}]
    return Sample(prompt=prompt, completion=completion, completion_ids=[5, 1], columns=cells)


@pytest.fixture
def sample() -> Callable[..., Sample]:
    return sample_of
