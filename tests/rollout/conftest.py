"""The models that every claim about the engine is tried on."""

from collections.abc import Callable

import pytest
from transformers import PreTrainedModel

from .tiny import gpt2, llama


@pytest.fixture(params=["llama", "gpt2"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    """A model with rotary positions, then one with learned positions."""
    builders: dict[str, Callable[[], PreTrainedModel]] = {"llama": llama, "gpt2": gpt2}
    return builders[request.param]()
